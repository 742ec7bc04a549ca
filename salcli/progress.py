"""How long steps tell that they get on. Stages speak to this protocol; who shows it is not their business."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager


class Task(Protocol):
    """A step under way."""

    def advance(self, n: int, **values: float) -> None:
        """n more units are done; `values` are the latest figures worth showing."""
        ...

    def skip(self, n: int) -> None:
        """n units were done by an earlier run."""
        ...

    def note(self, text: str) -> None:
        """Something that people should know."""
        ...


class Progress(Protocol):
    """Shows steps."""

    def task(self, name: str, total: int, unit: str) -> AbstractContextManager[Task]:
        """Begin a step of `total` units, 0 where nobody knows how many. The unit "bytes" is shown in MB."""
        ...


class Silent:
    """Shows nothing. The default for callers from Python."""

    @contextmanager
    def task(self, name: str, total: int, unit: str) -> Iterator[Task]:
        """Begin a step that nobody watches."""
        yield self

    def advance(self, n: int, **values: float) -> None:
        """Nobody watches."""

    def skip(self, n: int) -> None:
        """Nobody watches."""

    def note(self, text: str) -> None:
        """Nobody reads it."""


def world_size() -> int:
    """How many processes work together, as torchrun says through the environment; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The number of this process among them."""
    return int(os.environ.get("RANK", "0"))


def is_main_process() -> bool:
    """Whether this process is the one that prints and writes. Known before torch is loaded."""
    return rank() == 0
