"""Starting a command again in several processes, where params.yaml asks for it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import typer

from salcli.errors import UsageMistakeError
from salcli.ranks import world_size

NONE = "none"
TORCHRUN = "torchrun"


def launch(launcher: str) -> None:
    """Run the same command under `launcher` and end with its exit code; return where there is none to use.

    DVC sees the same command whatever the launcher is, so another machine makes nothing run again.
    """
    if launcher == NONE or world_size() > 1:
        return
    words = shlex.split(launcher)
    # by its module, so that it is the one of this environment wherever that lies
    program = [sys.executable, "-m", "torch.distributed.run"] if words[0] == TORCHRUN else words[:1]
    command = [*program, *words[1:], "-m", "salcli", *sys.argv[1:]]
    try:
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")})
    except OSError as error:
        raise UsageMistakeError(
            f"launcher {launcher!r} cannot be started: {error.strerror}; see `launcher` in params.yaml"
        ) from None
    raise typer.Exit(done.returncode)
