"""Work ahead: while the network computes, a thread makes what it will need next."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

T = TypeVar("T")


def one_ahead(items: Generator[T]) -> Generator[T]:
    """The same items in the same order; the next one is under way while the caller has the last one.

    Only one thread touches the generator at a time, and it is closed in the end, whatever happens.
    """
    with ThreadPoolExecutor(1, "prefetch") as thread:
        try:
            waiting = thread.submit(_next, items)
            while found := waiting.result():
                waiting = thread.submit(_next, items)
                yield from found
        finally:
            thread.submit(items.close).result()


def _next(items: Iterator[T]) -> list[T]:
    """The next item, or nothing at the end."""
    return list(islice(items, 1))
