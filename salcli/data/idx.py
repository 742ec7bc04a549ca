"""MNIST and Fashion-MNIST as published: idx files, packed or not."""

from __future__ import annotations

import gzip
import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np

from salcli.data.image_set import Source, joined
from salcli.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

GARMENTS = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
UINT8 = 0x08  # the type code of idx


def load_mnist(root: Path) -> Source:
    """Handwritten digits, 28 × 28, gray; the last 10,000 are the official test set."""
    return _load(root / "MNIST" / "raw", tuple("0123456789"))


def load_fashion_mnist(root: Path) -> Source:
    """Garments, 28 × 28, gray; the last 10,000 are the official test set."""
    return _load(root / "FashionMNIST" / "raw", GARMENTS)


def _load(folder: Path, class_names: tuple[str, ...]) -> Source:
    return joined(*(_part(folder, prefix, class_names) for prefix in ("train", "t10k")))


def _part(folder: Path, prefix: str, class_names: tuple[str, ...]) -> Source:
    images = _read(folder / f"{prefix}-images-idx3-ubyte", n_axes=3)
    labels = _read(folder / f"{prefix}-labels-idx1-ubyte", n_axes=1)
    if len(images) != len(labels):
        raise DataError(f"{folder}: {prefix} has {len(images)} images, but {len(labels)} labels; get both again")
    if len(labels) and labels.max() >= len(class_names):
        raise DataError(f"{folder}: {prefix} has a label {labels.max()}, but there are {len(class_names)} classes")
    return Source(images[:, None], labels.astype(np.int64), class_names)


def _read(path: Path, n_axes: int) -> NDArray[np.uint8]:
    packed = path.with_name(f"{path.name}.gz")
    try:
        content = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
        zeros, code, axes = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{n_axes}I", content, 4)
    except (OSError, EOFError, struct.error, zlib.error) as error:
        raise _damaged(path, error) from None
    if (zeros, code, axes) != (0, UINT8, n_axes):
        raise _damaged(path, f"it does not hold bytes along {n_axes} axes")
    n_bytes, start = int(np.prod(shape, dtype=np.int64)), 4 + 4 * n_axes
    if len(content) != start + n_bytes:
        raise _damaged(path, f"it promises {n_bytes:,} bytes of data, but has {len(content) - start:,}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _damaged(path: Path, reason: object) -> DataError:
    return DataError(f"{path} is damaged or no idx file ({reason}); remove it and get it again: salcli data fetch")
