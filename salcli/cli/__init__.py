"""The command line: parse, call one function, print one table. torch is imported inside commands only."""

import atexit
import gc

# Imports create many objects and no garbage. A process that imports torch takes 2.6 s with these two lines and 3.8 s
# without (median of 5, two cores), and the demo starts 45 of them.
gc.set_threshold(100_000)
atexit.register(gc.freeze)

from salcli.cli.app import main  # noqa: E402

__all__ = ["main"]
