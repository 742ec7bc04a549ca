"""Run by test_distributed.py under torchrun: salcli, whose main process comes late to each part of a command."""

import time
from typing import Any

from salcli.cli import main
from salcli.cli.session import Session
from salcli.progress import is_main_process

run = Session.run


def late(session: Session, *stage: Any, **options: Any) -> list[Any]:
    time.sleep(3 * is_main_process())
    return run(session, *stage, **options)


Session.run = late  # type: ignore[method-assign]
main()
