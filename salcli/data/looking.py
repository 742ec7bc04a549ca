"""A look at image files before anything is done with them: sizes, channels, and what cannot be read."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from salcli.data.pictures import BadPictureError, PictureFacts, picture_facts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from salcli.data.image_set import Source
    from salcli.progress import Task

MOST_LOOKED_AT = 20_000  # files; of more, so many at equal distances
MOST_DECODED = 1 << 27  # bytes; of larger sets, the headers alone are read


@dataclass(frozen=True)
class Look:
    """What a set's pictures are like."""

    n_looked_at: int
    was_decoded: bool  # else a file that breaks off in the middle still counts as good
    smallest: tuple[int, int]  # width and height, by the shorter side
    largest: tuple[int, int]
    median_side: int  # of the shorter sides
    is_gray: bool  # all of them
    bad: tuple[tuple[Path, str], ...]


def look(source: Source, task: Task) -> Look:
    """Read what is needed to describe the set."""
    if isinstance(source.pictures, np.ndarray):
        return _of_array(source.pictures, task)
    files = source.pictures
    chosen = [files[i] for i in np.unique(np.linspace(0, len(files) - 1, MOST_LOOKED_AT).astype(int))]
    decode = sum(_size(path) for path in chosen) <= MOST_DECODED
    seen = _read(chosen, task, decode=decode)
    bad = tuple((path, fact) for path, fact in zip(chosen, seen, strict=True) if isinstance(fact, str))
    good = sorted(
        (fact for fact in seen if isinstance(fact, PictureFacts)), key=lambda fact: min(fact.width, fact.height)
    )
    if not good:
        return Look(len(chosen), decode, (0, 0), (0, 0), 0, False, bad)
    return Look(
        n_looked_at=len(chosen),
        was_decoded=decode,
        smallest=(good[0].width, good[0].height),
        largest=(good[-1].width, good[-1].height),
        median_side=min(good[len(good) // 2].width, good[len(good) // 2].height),
        is_gray=all(fact.is_gray for fact in good),
        bad=bad,
    )


def _of_array(images: NDArray[np.generic], task: Task) -> Look:
    task.advance(len(images))
    _, channels, height, width = images.shape
    return Look(len(images), True, (width, height), (width, height), min(width, height), channels == 1, ())


def _read(files: Sequence[Path], task: Task, *, decode: bool) -> list[PictureFacts | str]:
    def facts(path: Path) -> PictureFacts | str:
        try:
            return picture_facts(path, decode=decode)
        except BadPictureError as error:
            return str(error)

    # threads share the filters of warnings, so they are set once, around all of them
    with warnings.catch_warnings(), ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
        warnings.filterwarnings("ignore", module=r"PIL\.")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        results = []
        for found in pool.map(facts, files):
            results.append(found)
            task.advance(1)
        return results


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return 0
