"""The command line: parse, call one function, print one table. torch is imported inside commands only."""

import os

# OpenMP's threads wait for each other in a busy loop. A short one is as fast on a quiet machine and many times as fast
# on a busy one (docs/performance.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

from salcli.cli.app import main

__all__ = ["main"]
