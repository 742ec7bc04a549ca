"""Run by test_distributed.py under torchrun: process 1 alone meets an error or is stuck, the other waits for it."""

import sys
import time

import typer

from salcli.cli.app import friendly_errors
from salcli.engine import device
from salcli.errors import DataError

device.SECONDS_TO_REPORT = 1
try:
    with friendly_errors(), device.joined(timeout=2 if sys.argv[1:] else device.TIMEOUT) as together:
        if together.rank == 1:
            if sys.argv[1:] == ["sleep"]:
                time.sleep(600)
            raise DataError("only this process has seen it")
        together.wait()
except typer.Exit as end:
    sys.exit(end.exit_code)
