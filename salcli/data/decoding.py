"""A data set as arrays of one shape, block by block, so that it may be larger than the memory."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from salcli.data.pictures import BadPictureError, fit_array, read_picture
from salcli.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from salcli.data.image_set import Source
    from salcli.progress import Task

BLOCK_BYTES = 2**25
MOST_IN_BLOCK = 1024
MOST_THREADS = 16


@dataclass(frozen=True)
class Shape:
    """What every image is brought to."""

    channels: int
    size: int  # height and width

    @property
    def axes(self) -> tuple[int, int, int]:
        """C, H, W."""
        return self.channels, self.size, self.size


@dataclass(frozen=True)
class Block:
    """Some decoded images, where they stood in the source, and the files that gave none, with the reason."""

    images: NDArray[Any]  # b, C, H, W
    index: NDArray[np.int64]  # b
    bad: tuple[tuple[Path, str], ...] = ()


def dtype_of(source: Source) -> np.dtype[Any]:
    """Points in the plane are float32, images are uint8."""
    return source.pictures.dtype if isinstance(source.pictures, np.ndarray) else np.dtype(np.uint8)


def check_shape(name: str, source: Source, shape: Shape) -> None:
    """Points cannot be resized, and no image has two channels."""
    is_points = dtype_of(source) != np.uint8
    if is_points and isinstance(source.pictures, np.ndarray) and source.pictures.shape[1:] != shape.axes:
        raise DataError(f"{name} holds points in the plane; set data.image_size to 1 and data.channels to 2")
    if not is_points and shape.channels == 2:
        raise DataError(f"{name} holds images, but data.channels is 2, which is for points; set it to 1 or 3")


def decode(source: Source, shape: Shape, task: Task, *, skip_bad: bool) -> Generator[Block]:
    """The whole set in order. A bad image is an error, or is left out."""
    n_bytes = int(np.prod(shape.axes))
    step = min(MOST_IN_BLOCK, max(1, BLOCK_BYTES // n_bytes))
    cuts = [*range(0, len(source), step), len(source)]
    # Threads share the filters of warnings, so they are set once, around all of them. Other warnings of PIL are about
    # oddities of files that were read all the same.
    with warnings.catch_warnings(), ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_THREADS)) as pool:
        warnings.filterwarnings("ignore", module=r"PIL\.")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        for start, stop in pairwise(cuts):
            if isinstance(source.pictures, np.ndarray):
                block = _from_array(source.pictures[start:stop], source, shape, pool)
            else:
                block = _from_files(source.pictures[start:stop], source, shape, pool)
            if block.bad and not skip_bad:
                path, reason = block.bad[0]
                raise DataError(
                    f"{printable(path)} cannot be decoded: {reason}; replace or remove it, or leave such files out "
                    "with data.on_bad_image: skip"
                )
            task.advance(stop - start)
            yield Block(block.images, block.index + start, block.bad)


def printable(path: Path) -> str:
    """A file's name need not be text; what is none in it is shown as �."""
    return os.fsencode(path).decode(errors="replace")


def _from_array(images: NDArray[Any], source: Source, shape: Shape, pool: ThreadPoolExecutor) -> Block:
    index = np.arange(len(images))
    if images.shape[1:] == shape.axes:
        return Block(np.ascontiguousarray(images), index)
    fitted = list(pool.map(lambda image: fit_array(image, shape.size, shape.channels, source.fit), images))
    return Block(np.stack(fitted), index)


def _from_files(files: Sequence[Path], source: Source, shape: Shape, pool: ThreadPoolExecutor) -> Block:
    def read(path: Path) -> NDArray[np.uint8] | str:
        try:
            return read_picture(path, shape.size, shape.channels, source.fit)
        except BadPictureError as error:
            return str(error)

    results = list(pool.map(read, files))
    images = np.empty((len(files), *shape.axes), np.uint8)
    good = [i for i, result in enumerate(results) if not isinstance(result, str)]
    for place, i in enumerate(good):
        images[place] = results[i]
    bad = tuple((path, result) for path, result in zip(files, results, strict=True) if isinstance(result, str))
    return Block(images[: len(good)], np.array(good, dtype=np.int64), bad)
