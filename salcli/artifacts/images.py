"""Decoded image sets on disk, read as a map of the file: what is not looked at takes no memory."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from salcli.artifacts.hdf5 import Stored, about, creating, reading
from salcli.artifacts.layout import Found
from salcli.data.image_set import ImageSet
from salcli.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    import h5py
    from numpy.typing import NDArray

KIND = "image-set"
ROWS_AT_ONCE = 1024
TOO_SMALL_TO_ASK = 10_000_000  # bytes: writing them fails soon enough


@dataclass(frozen=True)
class Description:
    """What goes with the images of a set, and how they were made."""

    name: str
    labels: NDArray[np.int64] | None = None  # n
    class_names: tuple[str, ...] = ()
    is_test: NDArray[np.bool_] | None = None  # n
    made_with: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()  # n, where each image comes from a file


def write_image_set(
    path: Path,
    image_set: ImageSet,
    name: str,
    made_with: Mapping[str, Any] | None = None,
    files: tuple[str, ...] = (),
) -> None:
    """Store what the set has. Its images may be a map of another file: they are copied piece by piece."""
    images = image_set.images
    pieces = (images[start : start + ROWS_AT_ONCE] for start in range(0, len(images), ROWS_AT_ONCE))
    rest = Description(name, image_set.labels, image_set.class_names, image_set.is_test, made_with or {}, files)
    write_streamed(path, images.shape, images.dtype, pieces, lambda: rest)


def write_streamed(
    path: Path,
    shape: tuple[int, ...],  # n, C, H, W
    dtype: np.dtype[Any],
    pieces: Iterable[NDArray[Any]],  # of b, C, H, W
    describe: Callable[[], Description],
    *,
    may_be_fewer: bool = False,
) -> None:
    """Store images as they come, then what `describe` says of them when all are there.

    The space of a mapped array is fixed when its first row is written. So where fewer than n may come, they go to a
    draft first, and are copied if it really turns out too large.
    """
    _check_space(path, shape, dtype)
    place = path.with_name(f".{path.name}.draft") if may_be_fewer else path
    try:
        with creating(place, KIND, {}) as file:
            n_written = _write_images(file, shape, dtype, pieces)
            rest = describe()
            if n_written == shape[0]:
                _write_rest(file, rest)
        if n_written < shape[0]:
            images = np.memmap(place, dtype, "r", _offset_of(place), shape)[:n_written]
            kept = ImageSet(images, rest.labels, rest.class_names, rest.is_test)
            write_image_set(path, kept, rest.name, rest.made_with, rest.files)
        elif place != path:
            place.replace(path)
    finally:
        if place != path:
            place.unlink(missing_ok=True)


def read_image_set(found: Found) -> ImageSet:
    """The set, with its images as a read-only map of the file."""
    with reading(found, KIND) as file:
        about(file)["name"]  # so that a file of another program is told from ours
        image_set = ImageSet(
            images=Stored.of(found.path, file["images"]).open(),
            labels=np.asarray(file["labels"]) if "labels" in file else None,
            class_names=tuple(os.fsdecode(name) for name in file.get("class_names", ())),
            is_test=np.asarray(file["is_test"]) if "is_test" in file else None,
        )
        _check_lengths(image_set)
        return image_set


def read_file_names(found: Found) -> tuple[str, ...]:
    """The file of each image, below the place of its set; empty where images do not come from files of their own."""
    with reading(found, KIND) as file:
        return tuple(os.fsdecode(name) for name in file["files"][()]) if "files" in file else ()


def read_made_with(found: Found) -> dict[str, Any]:
    """How a set was decoded."""
    with reading(found, KIND) as file:
        return about(file)


def _write_images(file: h5py.File, shape: tuple[int, ...], dtype: np.dtype[Any], pieces: Iterable[NDArray[Any]]) -> int:
    stored, n_written = file.create_dataset("images", shape, dtype), 0
    for piece in pieces:
        if len(piece):
            stored[n_written : n_written + len(piece)] = piece
        n_written += len(piece)
    return n_written


def _write_rest(file: h5py.File, rest: Description) -> None:
    for name in ("labels", "is_test"):
        array = getattr(rest, name)
        if array is not None:
            file.create_dataset(name, data=array)
    for names in ("class_names", "files"):  # no attributes: those may not be longer than 64 kB
        if getattr(rest, names):
            file.create_dataset(names, data=np.array([os.fsencode(name) for name in getattr(rest, names)]))
    file.attrs["about"] = json.dumps({**rest.made_with, "name": rest.name}, sort_keys=True)


def _offset_of(path: Path) -> int:
    with reading(Found(path), KIND) as file:
        offset: int = file["images"].id.get_offset() or 0
        return offset


def _check_lengths(image_set: ImageSet) -> None:
    if image_set.images.ndim != 4:
        raise ValueError(f"its images have {image_set.images.ndim} axes, not 4")
    for array in (image_set.labels, image_set.is_test):
        if array is not None and array.shape != (len(image_set),):
            raise ValueError(f"it has {len(image_set)} images, but not as many labels or marks")


def _check_space(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Better now than after hours of decoding."""
    folder = next(place for place in path.absolute().parents if place.is_dir())
    needed, free = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, shutil.disk_usage(folder).free
    if needed > max(free, TOO_SMALL_TO_ASK):
        raise StorageError(
            f"{path} needs {needed / 1e9:,.2f} GB, {free / 1e9:,.2f} GB are free; "
            "make room, or choose a smaller data.image_size"
        )
