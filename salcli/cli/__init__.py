"""The command line: parse, call one function, print one table. torch is imported inside commands only."""

import gc

# Imports create many objects and no garbage. A process that imports torch takes 2.7 s with this and with the freeze in
# `main`, and 3.8 s without (median of 5, two cores); the demo starts 45 of them.
gc.set_threshold(100_000)

from salcli.cli.app import main  # noqa: E402

__all__ = ["main"]
