"""The command line: parse, call one function, print one table. torch is imported inside commands only."""

import gc
import os

# Imports create many objects and no garbage. A process that imports torch takes 2.7 s with this and with the freeze in
# `main`, and 3.8 s without (median of 5, two cores); the demo starts 45 of them.
gc.set_threshold(100_000)
# OpenMP's threads wait for each other in a busy loop. A short one is as fast on a quiet machine and many times as fast
# on a busy one (docs/performance.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

from salcli.cli.app import main  # noqa: E402

__all__ = ["main"]
