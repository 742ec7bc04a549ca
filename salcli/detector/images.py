"""Images for a detector: files, PIL images, arrays or tensors, brought to the form that its network was trained on."""

import os
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from salcli.data.decoding import BROKEN, Shape, decode, fit_array, fit_picture, plain
from salcli.data.samples import Fit, Source
from salcli.errors import DataError
from salcli.progress import Silent

# files read at once: enough for all threads, and few enough that even large photographs show progress
FEWEST_AT_ONCE = 64

Picture = str | os.PathLike[str] | Image.Image
Images = Picture | Sequence[Picture] | np.ndarray[Any, Any] | torch.Tensor
T = TypeVar("T")


@dataclass(frozen=True)
class ImageFormat:
    """What images are converted to, as `prepare` did it. Points in the plane are float32, everything else is uint8."""

    channels: int
    size: int  # height and width
    fit: Fit = "resize"
    dtype: Literal["uint8", "float32"] = "uint8"

    def check_takes_pictures(self) -> None:
        if self.dtype != "uint8":
            raise DataError(
                "this detector takes points in the plane, not pictures: "
                f"an array of float32, n × {self.channels} × 1 × 1"
            )


@dataclass(frozen=True)
class Decoded:
    """Some consecutive files and the images read from them."""

    files: tuple[Path, ...]
    images: NDArray[Any]  # b, C, H, W, of the files that could be read, in their order
    failed: dict[int, str]  # index in `files` → why it could not be read


def as_paths(images: Images) -> tuple[Path, ...] | None:
    """The given files, or None where images are given."""
    several = [images] if isinstance(images, str | os.PathLike) else images
    if isinstance(several, Sequence) and several and all(isinstance(one, str | os.PathLike) for one in several):
        return tuple(Path(one) for one in several)  # type: ignore[arg-type]
    return None


def as_array(images: Images, wanted: ImageFormat) -> NDArray[Any]:
    """Images in memory as one array (n, C, H, W)."""
    if isinstance(images, torch.Tensor):
        images = images.detach().cpu().numpy()
    if isinstance(images, np.ndarray):
        return _fit_arrays(images, wanted)
    if isinstance(images, Image.Image):
        images = [images]
    if not (isinstance(images, Sequence) and all(isinstance(one, Image.Image) for one in images)):
        raise DataError("a detector takes paths, PIL images, or one array or tensor of images (n, C, H, W), uint8")
    wanted.check_takes_pictures()
    try:
        return _stack([fit_picture(plain(one), wanted.size, wanted.channels, wanted.fit) for one in images], wanted)  # type: ignore[arg-type]
    except BROKEN as error:
        raise DataError(f"an image cannot be decoded: {error}") from None


def _fit_arrays(images: NDArray[Any], wanted: ImageFormat) -> NDArray[Any]:
    if images.ndim == 3:
        images = images[None]
    shape = " × ".join(map(str, images.shape))
    if images.dtype.name != wanted.dtype or images.ndim != 4:
        raise DataError(
            f"this detector takes arrays of {wanted.dtype} with the axes n, C, H, W; got {images.dtype.name} of {shape}"
        )
    if images.shape[1:] == (wanted.channels, wanted.size, wanted.size):
        return np.require(images, requirements=["C", "W"])  # copies only what torch would warn about
    wanted.check_takes_pictures()
    if images.shape[1] not in (1, 3) or 0 in images.shape[2:]:
        raise DataError(f"images have 1 or 3 channels, in the second axis (n, C, H, W); got {shape}")
    return _stack([fit_array(image, wanted.size, wanted.channels, wanted.fit) for image in images], wanted)


def _stack(images: list[NDArray[Any]], wanted: ImageFormat) -> NDArray[Any]:
    return np.stack(images) if images else np.empty((0, wanted.channels, wanted.size, wanted.size), wanted.dtype)


def read_files(files: tuple[Path, ...], wanted: ImageFormat, batch_size: int) -> Generator[Decoded]:
    """All files in their order, read by the code of `prepare`, so that the network sees what it would be trained on."""
    shape = Shape(wanted.channels, wanted.size)
    at_once = batch_size * max(1, FEWEST_AT_ONCE // batch_size)
    for first in range(0, len(files), at_once):
        some, start = files[first : first + at_once], 0
        for block in decode(Source(some, fit=wanted.fit), shape, Silent(), skip_bad=True):
            stop = start + len(block.index) + len(block.bad)
            unreadable = np.setdiff1d(np.arange(start, stop), block.index) - start
            failed = {int(i): reason for i, (_, reason) in zip(unreadable, block.bad, strict=True)}
            yield Decoded(some[start:stop], block.images, failed)
            start = stop


def one_ahead(items: Generator[T]) -> Generator[T]:
    """The same items in the same order; a thread makes the next one while the caller works on the last one.

    Only one thread runs the generator at a time, and the generator is always closed in the end.
    """
    with ThreadPoolExecutor(1, "prefetch") as thread:
        try:
            waiting = thread.submit(lambda: list(islice(items, 1)))
            while found := waiting.result():
                waiting = thread.submit(lambda: list(islice(items, 1)))
                yield from found
        finally:
            thread.submit(items.close).result()
