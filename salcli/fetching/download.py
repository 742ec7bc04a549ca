"""Fetching one file: resumed where it broke off, compared with its checksum, there as a whole or not at all."""

from __future__ import annotations

import hashlib
import os
import time
from typing import TYPE_CHECKING

from salcli.errors import FetchError
from salcli.fetching.transfer import Interrupted, Opener, Refused, Satisfied, Unwritable, open_url, transfer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from salcli.fetching.data_source import RemoteFile
    from salcli.progress import Task

ATTEMPTS = 4  # in a row without a single new byte
FIRST_PAUSE = 1.0  # seconds; doubles with each attempt


def download(
    file: RemoteFile,
    folder: Path,
    task: Task,
    *,
    again: str = "salcli data fetch",
    opener: Opener = open_url,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Put the file into the folder; False where it was there already. `again` is the command that errors advise.

    A transfer that breaks off leaves NAME.part, from which the next one goes on.
    """
    target = folder / file.name
    if target.exists():
        _accept_present(file, target, again)
        return False
    part = part_of(target)
    failures = []
    for url in (file.url, *file.mirrors):
        try:
            resumed = part.exists()
            _fetch(url, part, task, opener, sleep)
            if resumed and _wrong_digest(file, part):  # it went on from the beginning of another file
                part.unlink()
                _fetch(url, part, task, opener, sleep)
            _publish(file, part, target)
            return True
        except (Refused, Interrupted) as error:
            failures.append(f"  {url}: {error}")
        except (Unwritable, OSError) as error:
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
            raise FetchError(f"{target} cannot be written: {reason}; mend that, then go on with: {again}") from None
    raise FetchError("\n".join([f"{file.name} cannot be fetched", *failures, by_hand(file, target, again)]))


def part_of(target: Path) -> Path:
    """Where a file is while it is not complete."""
    return target.with_name(f"{target.name}.part")


def by_hand(file: RemoteFile, target: Path, again: str) -> str:
    """The way out that always works."""
    checksum = f" ({_shown(file)})" if file.checksum else ""
    return f"get it in another way, put it at {target}{checksum}, then run: {again}"


def checksum_of(path: Path, algorithm: str) -> str:
    """The digest of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def _fetch(url: str, part: Path, task: Task, opener: Opener, sleep: Callable[[float], None]) -> None:
    """Try until all is here, as long as every few attempts bring something new."""
    failed_in_a_row, most = 0, _size(part)
    while True:
        try:
            return transfer(url, part, task, opener)
        except Satisfied:  # the part was complete: a process was killed just before it could be renamed
            return None
        except Interrupted:
            failed_in_a_row = 1 if _size(part) > most else failed_in_a_row + 1
            most = max(most, _size(part))
            if failed_in_a_row == ATTEMPTS:
                raise
            sleep(FIRST_PAUSE * 2 ** (failed_in_a_row - 1))


def _publish(file: RemoteFile, part: Path, target: Path) -> None:
    if actual := _wrong_digest(file, part):
        part.unlink()
        raise Refused(f"sent other bytes than published: expected {_shown(file)}, got {actual}; they are thrown away")
    with part.open("rb") as complete:
        os.fsync(complete.fileno())
    part.replace(target)


def _accept_present(file: RemoteFile, target: Path, again: str) -> None:
    if actual := _wrong_digest(file, target):
        raise FetchError(
            f"{target} is there, but damaged or another file: expected {_shown(file)}, got {actual}; "
            f"remove it, then run: {again}"
        )


def _wrong_digest(file: RemoteFile, path: Path) -> str | None:
    """The digest of a file that is not what was published, None for one that is."""
    if file.checksum is None:
        return None
    algorithm, _, expected = file.checksum.partition(":")
    actual = checksum_of(path, algorithm)
    return actual if actual != expected else None


def _shown(file: RemoteFile) -> str:
    return (file.checksum or "").replace(":", " ")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
