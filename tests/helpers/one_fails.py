"""Run by test_distributed.py under torchrun: process 1 alone meets an error or is stuck, the other waits for it."""

import os
import signal
import sys
import time
from pathlib import Path

import typer

from salcli.cli.app import end_well_when_terminated, friendly_errors
from salcli.engine import device
from salcli.errors import SalError

(how,) = sys.argv[1:]
device.SECONDS_TO_REPORT = 1
end_well_when_terminated()
try:
    with friendly_errors(), device.joined(timeout=2 if how == "is stuck" else device.TIMEOUT) as together:
        Path(f"process-{together.rank}").write_text(str(os.getpid()))
        if together.rank == 1:
            if how == "is stuck":
                time.sleep(600)
            if how == "is stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            raise SalError("only this process has seen it")
        together.wait()
except typer.Exit as end:
    sys.exit(end.exit_code)
