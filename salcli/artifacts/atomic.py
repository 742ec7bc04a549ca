"""Files that are either there as a whole or not at all."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from salcli.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes `path` when the block ends well and vanishes when it does not.

    A killed process leaves the old file as it was, and at most the hidden partial file, which the next
    run of the same stage replaces.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:  # a full disk, a read-only folder, a file where a folder should be
        reason = os.strerror(error.errno) if error.errno else error
        raise StorageError(f"{path} cannot be written: {reason}; mend that and run the same command again") from None


def write_text(path: Path, text: str) -> None:
    """Write a small text file."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")
