"""The same picture twice: by its pixels once it is decoded, by the bytes of its file before."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from salcli.progress import Silent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from salcli.progress import Task

    Digests = NDArray[np.void]  # n, 16 bytes each

BYTES = 16
AT_ONCE = 1024
SILENT = Silent()


def pixel_digests(images: NDArray[np.generic], rows: NDArray[np.int64] | None = None, task: Task = SILENT) -> Digests:
    """One for each image (n, C, H, W), or for some rows; equal pixels have equal digests."""
    index = np.arange(len(images)) if rows is None else rows
    digests = []
    for start in range(0, len(index), AT_ONCE):
        block = index[start : start + AT_ONCE]
        digests += [hashlib.blake2b(images[i].tobytes(), digest_size=BYTES).digest() for i in block]
        task.advance(len(block))
    return np.frombuffer(b"".join(digests), dtype=f"V{BYTES}")


def first_of_each(digests: Digests) -> NDArray[np.int64]:
    """The places of all images but those that an earlier one equals, in order."""
    return np.sort(np.unique(digests, return_index=True)[1])


def not_in(
    known: NDArray[np.generic], images: NDArray[np.generic], task: Task = SILENT, *, each_once: bool
) -> NDArray[np.int64]:
    """The places of images that are not among the known ones; of several that are equal the first, or all."""
    own, others = pixel_digests(images, task=task), pixel_digests(known, task=task)
    new = np.flatnonzero(~np.isin(own, others))
    return new[first_of_each(own[new])] if each_once else new


def file_digests(files: Sequence[Path], task: Task) -> list[bytes]:
    """One for each file; files of equal bytes have equal ones. One whose size no other has is not read: it gets b""."""
    sizes = [_size(path) for path in files]
    count = Counter(sizes)

    def digest(place: int) -> bytes:
        if sizes[place] < 1 or count[sizes[place]] == 1:
            return b""
        try:
            with files[place].open("rb") as file:
                return hashlib.file_digest(file, "sha256").digest()
        except OSError:  # it is counted among those that cannot be read
            return b""

    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        digests = []
        for found in pool.map(digest, range(len(files))):
            digests.append(found)
            task.advance(1)
        return digests


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return -1
