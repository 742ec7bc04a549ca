"""Run by test_distributed.py under torchrun: process 1 alone meets an error, the other waits for it."""

import sys

import typer

from salcli.cli.app import friendly_errors
from salcli.engine.device import joined
from salcli.errors import DataError

try:
    with friendly_errors(), joined() as together:
        if together.rank == 1:
            raise DataError("only this process has seen it")
        together.wait()
except typer.Exit as end:
    sys.exit(end.exit_code)
