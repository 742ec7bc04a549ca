"""Sets that are one file of arrays: .npz of one's own, and the .npy of 300K Random Images."""

from __future__ import annotations

import zipfile
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from salcli.data.image_set import Source
from salcli.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

RANDOM_IMAGES = "300K_random_images.npy"
UNREADABLE = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError)
LAYOUT = "`images` (n × height × width [× 1 or 3], uint8), and `labels`, `is_test`, `class_names` where there are any"


def load_random_images(root: Path) -> Source:
    """300K Random Images: mapped, not read."""
    path = root / RANDOM_IMAGES
    try:
        images = np.load(path, mmap_mode="r")
    except UNREADABLE as error:
        raise DataError(f"{path} is damaged ({error}); remove it, then: salcli data fetch 300k-random") from None
    return Source(_channels_first(path, images))


def read_npz(path: Path, *, labeled: bool) -> Source:
    """`images` with what goes with them, or Keras's `x_train`, `y_train`, `x_test`, `y_test`."""
    try:
        with path.open("rb") as opened, np.load(opened) as file:
            arrays = {name: np.asarray(file[name]) for name in file.files}
    except (*UNREADABLE, AttributeError, TypeError) as error:
        raise DataError(f"{path} cannot be read as .npz ({error}); it should hold {LAYOUT}") from None
    if "images" not in arrays:
        arrays = _from_keras(path, arrays)
    images = _channels_first(path, arrays["images"])
    is_test = arrays.get("is_test")
    if is_test is not None and (is_test.shape != (len(images),) or is_test.dtype != np.bool_):
        raise DataError(f"{path}: `is_test` must be {len(images)} booleans, got {_shown(is_test)}")
    source = Source(images, is_test=is_test)
    return _with_labels(path, source, arrays) if labeled and "labels" in arrays else source


def _from_keras(path: Path, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    wanted = ("x_train", "y_train", "x_test", "y_test")
    missing = [name for name in wanted if name not in arrays]
    if missing:
        raise DataError(
            f"{path} has no `images`, and no {', '.join(missing)}; it has {', '.join(arrays) or 'nothing'}, "
            f"but should hold {LAYOUT}"
        )
    parts = {name: arrays[name] for name in wanted}
    for part in ("train", "test"):
        if len(parts[f"x_{part}"]) != len(parts[f"y_{part}"]):
            raise DataError(f"{path}: x_{part} and y_{part} differ in length")
    return {
        "images": np.concatenate([parts["x_train"], parts["x_test"]]),
        "labels": np.concatenate([parts["y_train"].ravel(), parts["y_test"].ravel()]),
        "is_test": np.repeat([False, True], [len(parts["x_train"]), len(parts["x_test"])]),
        **{name: array for name, array in arrays.items() if name == "class_names"},
    }


def _channels_first(path: Path, images: NDArray[Any]) -> NDArray[Any]:
    n_channels = {3: 1, 4: images.shape[-1] if images.ndim else 0}.get(images.ndim)
    if images.dtype != np.uint8 or n_channels not in (1, 3) or 0 in images.shape[1:]:
        raise DataError(f"{path}: images must be n × height × width [× 1 or 3] of uint8, got {_shown(images)}")
    if len(images) == 0:
        raise DataError(f"{path} holds no images")
    return images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)


def _with_labels(path: Path, source: Source, arrays: Mapping[str, NDArray[Any]]) -> Source:
    labels, names = arrays["labels"], arrays.get("class_names")
    if labels.shape != (len(source),) or labels.dtype.kind not in "iu":
        raise DataError(f"{path}: `labels` must be {len(source)} integers, got {_shown(labels)}")
    if labels.min() < 0:
        raise DataError(f"{path}: `labels` must not be negative, got {labels.min()}; leave unlabeled images out")
    found, renumbered = np.unique(labels, return_inverse=True)
    if names is None:
        return Source(source.pictures, renumbered.astype(np.int64), tuple(map(str, found)), source.is_test)
    if names.ndim != 1 or found[-1] >= len(names):
        raise DataError(f"{path}: labels run from {found[0]} to {found[-1]}, but `class_names` has {names.size} names")
    empty = sorted(set(range(len(names))) - set(found.tolist()))
    if empty:
        raise DataError(f"{path}: class {names[empty[0]]} has no images; add some, or leave it out of `class_names`")
    return Source(source.pictures, labels.astype(np.int64), tuple(map(str, names)), source.is_test)


def _shown(array: NDArray[Any]) -> str:
    return f"{' × '.join(map(str, array.shape)) or 'one'} of {array.dtype}"
