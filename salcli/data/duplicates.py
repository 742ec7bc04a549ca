"""Duplicate samples: by pixels or values once they are decoded, by the bytes of their files before."""

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from salcli.data.sets import file_size
from salcli.progress import Silent, Task

Digests = NDArray[np.void]  # n, 16 bytes each
DIGEST_BYTES = 16
AT_ONCE = 1024
SILENT = Silent()


def sample_digests(array: NDArray[Any], task: Task = SILENT) -> Digests:
    """One digest for each image (n, C, H, W) or vector (n, D); equal samples have equal digests."""
    digests = []
    for start in range(0, len(array), AT_ONCE):
        block = array[start : start + AT_ONCE]
        if block.dtype.kind == "f":
            block = block + np.zeros(1, block.dtype)  # −0 and 0 are equal numbers
        digests += [hashlib.blake2b(row.tobytes(), digest_size=DIGEST_BYTES).digest() for row in block]
        task.advance(len(block))
    return np.frombuffer(b"".join(digests), dtype=f"V{DIGEST_BYTES}")


def first_of_each(digests: Digests) -> NDArray[np.int64]:
    """The index of each sample that equals no earlier one, in order."""
    return np.sort(np.unique(digests, return_index=True)[1])


def not_in(known: Digests, own: Digests, *, each_once: bool) -> NDArray[np.int64]:
    """The index of each own sample that is not among the known ones; of equal samples the first, or all of them."""
    new = np.flatnonzero(~np.isin(own, known))
    return new[first_of_each(own[new])] if each_once else new


def file_digests(files: Sequence[Path], task: Task) -> list[bytes]:
    """One digest for each file; files of equal bytes have equal digests. A file of unique size is not read: b""."""
    sizes = [file_size(path) for path in files]
    count = Counter(sizes)

    def digest(i: int) -> bytes:
        if sizes[i] < 1 or count[sizes[i]] == 1:
            return b""
        try:
            with files[i].open("rb") as file:
                return hashlib.file_digest(file, "sha256").digest()
        except OSError:  # `look` reports it
            return b""

    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        digests = []
        for found in pool.map(digest, range(len(files))):
            digests.append(found)
            task.advance(1)
        return digests
