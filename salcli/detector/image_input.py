"""Images in memory, in any of the forms that people have them in, as the array that the network takes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from salcli.data.pictures import BROKEN, fit_array, fit_picture, plain
from salcli.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from salcli.artifacts.detector import ImageFormat

Picture = str | os.PathLike[str] | Image.Image
Images = Picture | Sequence[Picture] | np.ndarray[Any, Any] | torch.Tensor


def as_paths(images: Images) -> tuple[Path, ...] | None:
    """The files that are meant, or None where images are given."""
    several = [images] if isinstance(images, str | os.PathLike) else images
    if isinstance(several, Sequence) and several and all(isinstance(one, str | os.PathLike) for one in several):
        return tuple(Path(one) for one in several)  # type: ignore[arg-type]
    return None


def as_array(images: Images, wanted: ImageFormat) -> NDArray[Any]:
    """n, C, H, W of images that are in memory."""
    if isinstance(images, torch.Tensor):
        images = images.detach().cpu().numpy()
    if isinstance(images, np.ndarray):
        return _fitted(images, wanted)
    if isinstance(images, Image.Image):
        images = [images]
    if isinstance(images, Sequence) and all(isinstance(one, Image.Image) for one in images):
        check_takes_pictures(wanted)
        try:
            fitted = [fit_picture(plain(one), wanted.size, wanted.channels, wanted.fit) for one in images]  # type: ignore[arg-type]
        except BROKEN as error:
            raise DataError(f"an image cannot be decoded: {error}") from None
        return np.stack(fitted) if fitted else _none(wanted)
    raise DataError("a detector takes paths, PIL images, or one array or tensor of images (n, C, H, W), uint8")


def _fitted(images: NDArray[Any], wanted: ImageFormat) -> NDArray[Any]:
    if images.ndim == 3:
        images = images[None]
    axes = (wanted.channels, wanted.size, wanted.size)
    if images.dtype.name != wanted.dtype or images.ndim != 4:
        raise DataError(
            f"this detector takes arrays of {wanted.dtype} with the axes n, C, H, W; "
            f"got {images.dtype.name} of {' × '.join(map(str, images.shape))}"
        )
    if images.shape[1:] == axes:
        return np.require(images, requirements=["C", "W"])  # a copy only of what torch would warn of
    check_takes_pictures(wanted)
    if images.shape[1] not in (1, 3) or 0 in images.shape[2:]:
        raise DataError(
            f"images have 1 or 3 channels, in the second axis (n, C, H, W); got {' × '.join(map(str, images.shape))}"
        )
    fitted = [fit_array(image, wanted.size, wanted.channels, wanted.fit) for image in images]
    return np.stack(fitted) if fitted else _none(wanted)


def check_takes_pictures(wanted: ImageFormat) -> None:
    """Points in the plane are no pictures."""
    if wanted.dtype != "uint8":
        raise DataError(
            f"this detector takes points in the plane, not pictures: an array of float32, n × {wanted.channels} × 1 × 1"
        )


def _none(wanted: ImageFormat) -> NDArray[Any]:
    return np.empty((0, wanted.channels, wanted.size, wanted.size), wanted.dtype)
