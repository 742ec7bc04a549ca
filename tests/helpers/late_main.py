"""Run by test_distributed.py under torchrun: salcli, whose main process comes late to each part of a command."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from salcli.cli import main
from salcli.progress import is_main_process
from salcli.store.layout import Experiment, Workspace

running = Workspace.running


@contextmanager
def late(workspace: Workspace, stage: str, experiment: Experiment) -> Iterator[None]:
    time.sleep(2 * is_main_process())
    with running(workspace, stage, experiment):
        yield


Workspace.running = late  # type: ignore[method-assign]
main()
