"""Starting a command again in several processes, where params.yaml asks for it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import typer

from salcli.errors import UsageMistakeError
from salcli.ranks import was_started_by_torchrun

NONE = "none"
TORCHRUN = "torchrun"
STARTED = "SALCLI_LAUNCHED"  # marks what we started, or a launcher with one process would start itself for ever


def launch(launcher: str) -> None:
    """Run the same command under `launcher` and end with its exit code; return where there is none to use.

    DVC sees the same command whatever the launcher is, so another machine makes nothing run again.
    """
    if launcher == NONE or STARTED in os.environ or was_started_by_torchrun():
        return
    words = _words(launcher)
    # by its module, so that it is the one of this environment wherever that lies
    program = [sys.executable, "-m", "torch.distributed.run"] if words[0] == TORCHRUN else words[:1]
    command = [*program, *words[1:], "-m", "salcli", *sys.argv[1:]]
    try:
        done = subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ, STARTED: "1"})
    except OSError as error:
        raise UsageMistakeError(
            f"launcher {launcher!r} cannot be started: {error.strerror}; see `launcher` in params.yaml"
        ) from None
    raise typer.Exit(done.returncode)


def _words(launcher: str) -> list[str]:
    try:
        words = shlex.split(launcher)
    except ValueError as error:
        raise UsageMistakeError(
            f"launcher {launcher!r} cannot be read: {error}; see `launcher` in params.yaml"
        ) from None
    if not words:
        raise UsageMistakeError("launcher is empty; it must be none, or a command such as torchrun --nproc-per-node 4")
    return words
