"""Images for a detector: files, PIL images, arrays or tensors, brought to the form that its network was trained on."""

import os
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from salcli.data.decoding import BROKEN, Interpolation, Shape, decode, fit_array, fit_picture, plain
from salcli.data.folders import SUFFIXES
from salcli.data.sets import Fit, Samples
from salcli.data.vectors import ANY, ARRAYS, TABLES, Columns
from salcli.errors import SalError, printable
from salcli.progress import Silent

# files read at once: enough for all threads, and few enough that even large photographs show progress
FEWEST_AT_ONCE = 64


@dataclass(frozen=True)
class Decoded:
    """Some consecutive samples, images or vectors."""

    names: tuple[str, ...]  # paths of files, or ids of rows
    array: NDArray[Any]  # b, C, H, W or b, D: of those that could be read, in their order
    failed: dict[int, str]  # index in `names` → why it could not be read


@dataclass(frozen=True)
class ImageFormat:
    """What images are converted to, as `prepare` did it."""

    kind: ClassVar[str] = "images"
    name_column: ClassVar[str] = "path"  # of predictions
    dtype: ClassVar[str] = "uint8"
    suffixes: ClassVar[tuple[str, ...]] = tuple(sorted(SUFFIXES))

    channels: int
    size: int  # height and width
    fit: Fit = "resize"
    interpolation: Interpolation = "bilinear"
    crop: int | None = None  # what a frozen backbone takes of the middle

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return self.channels, self.size, self.size

    def as_array(self, samples: Any) -> NDArray[Any]:
        """Images in memory as one array (n, C, H, W)."""
        if isinstance(samples, torch.Tensor):
            samples = samples.detach().cpu().numpy()
        if isinstance(samples, np.ndarray):
            return self._of_arrays(samples)
        if isinstance(samples, Image.Image):
            samples = [samples]
        if not (isinstance(samples, Sequence) and all(isinstance(one, Image.Image) for one in samples)):
            raise SalError("a detector takes paths, PIL images, or one array or tensor of images (n, C, H, W), uint8")
        try:
            return self._stack([fit_picture(plain(one), self._shape, self.fit) for one in samples])
        except BROKEN as error:
            raise SalError(f"an image cannot be decoded: {error}") from None

    def check_file(self, path: Path) -> None:
        """Files of vectors would fail later with a less helpful message."""
        if path.suffix.lower() in (*ARRAYS, *TABLES):
            raise SalError(f"{printable(path)} is a file of arrays or vectors, but this detector takes image files")

    def fitting(self, files: Iterable[Path]) -> list[Path]:
        """Files with the suffix of an image."""
        return [path for path in files if path.suffix.lower() in self.suffixes]

    def read(self, files: tuple[Path, ...], batch_size: int, asked: Columns = ANY) -> Generator[Decoded]:
        """All files in order, by the code of `prepare`, so that the network sees what it would be trained on."""
        if asked != ANY:
            raise SalError("--vector and --row-id are for detectors of vectors; this one takes images")
        at_once = batch_size * max(1, FEWEST_AT_ONCE // batch_size)
        for first in range(0, len(files), at_once):
            some, start = files[first : first + at_once], 0
            for block in decode(Samples(files=some, fit=self.fit), self._shape, Silent(), skip_bad=True):
                stop = start + len(block.index) + len(block.bad)
                unreadable = np.setdiff1d(np.arange(start, stop), block.index) - start
                failed = {int(i): reason for i, (_, reason) in zip(unreadable, block.bad, strict=True)}
                yield Decoded(tuple(map(str, some[start:stop])), block.images, failed)
                start = stop

    def _of_arrays(self, images: NDArray[Any]) -> NDArray[Any]:
        if images.ndim == 3:
            images = images[None]
        shape = " × ".join(map(str, images.shape))
        if images.dtype != np.uint8 or images.ndim != 4:
            raise SalError(
                f"this detector takes arrays of uint8 with the axes n, C, H, W; got {images.dtype.name} of {shape}"
            )
        if images.shape[1:] == self.sample_shape:
            return np.require(images, requirements=["C", "W"])  # copies only what torch would warn about
        if images.shape[1] not in (1, 3) or 0 in images.shape[2:]:
            raise SalError(f"images have 1 or 3 channels, in the second axis (n, C, H, W); got {shape}")
        return self._stack([fit_array(image, self._shape, self.fit) for image in images])

    @property
    def _shape(self) -> Shape:
        return Shape(self.channels, self.size, self.interpolation, self.crop)

    def _stack(self, images: list[NDArray[Any]]) -> NDArray[Any]:
        return np.stack(images) if images else np.empty((0, *self.sample_shape), np.uint8)


def as_paths(samples: Any) -> tuple[Path, ...] | None:
    """The given files, or None where samples are given."""
    several = [samples] if isinstance(samples, str | os.PathLike) else samples
    if isinstance(several, Sequence) and several and all(isinstance(one, str | os.PathLike) for one in several):
        return tuple(Path(one) for one in several)
    return None
