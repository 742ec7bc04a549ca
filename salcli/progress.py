"""Progress reporting for long-running steps. Stages report to these protocols; the CLI shows them."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable


@runtime_checkable
class Task(Protocol):
    """A running step."""

    def advance(self, n: int, **values: float) -> None:
        """n more units are done; `values` are the latest metrics worth showing."""
        ...

    def skip(self, n: int) -> None:
        """n units were done by an earlier run."""
        ...

    def note(self, text: str) -> None:
        """Show a message."""
        ...


@runtime_checkable
class Progress(Protocol):
    """Shows steps."""

    def task(self, name: str, total: int, unit: str) -> AbstractContextManager[Task]:
        """Begin a step of `total` units; 0 if the total is not known. The unit "bytes" is shown in MB."""
        ...


class Silent:
    """Shows nothing. The default for callers from Python."""

    @contextmanager
    def task(self, name: str, total: int, unit: str) -> Iterator[Task]:
        yield self

    def advance(self, n: int, **values: float) -> None:
        pass

    def skip(self, n: int) -> None:
        pass

    def note(self, text: str) -> None:
        pass


def world_size() -> int:
    """How many processes work together, as torchrun says through the environment; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The number of this process among them."""
    return int(os.environ.get("RANK", "0"))


def is_main_process() -> bool:
    """Whether this process is the one that prints and writes. Known before torch is loaded."""
    return rank() == 0
