"""Folders of image files: an official split, classes, or just images."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from salcli.data.image_set import Source
from salcli.errors import DataError

SUFFIXES = {
    ".apng", ".avif", ".bmp", ".dib", ".gif", ".ico", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpf", ".jpg", ".jpx",
    ".pbm", ".pcx", ".pgm", ".png", ".pnm", ".ppm", ".psd", ".qoi", ".sgi", ".tga", ".tif", ".tiff", ".webp",
}  # fmt: skip
EXAMPLES = ".jpeg, .jpg, .png, .tiff, .webp"
PARTS = ("train", "test")


def read_folder(folder: Path, *, labeled: bool) -> Source:
    """`{train,test}/CLASS/…`, `CLASS/…`, or images anywhere below the folder, which have no labels then."""
    parts = [part for part in PARTS if (folder / part).is_dir()]
    if set(_folders(folder)) != set(PARTS[: len(parts)]) or not parts:
        return _read_part(folder, folder, labeled=labeled)
    if len(parts) == 1:
        if not labeled or not _folders(folder / "train"):
            return _read_part(folder, folder, labeled=False)
        raise DataError(f"{folder} has train/, but no test/; add it, or put the classes straight into {folder}")
    training, test = (_read_part(folder / part, folder, labeled=labeled) for part in PARTS)
    if training.class_names != test.class_names:
        odd = sorted(set(training.class_names) ^ set(test.class_names))
        raise DataError(f"{folder}: train/ and test/ must have the same classes, but only one has {', '.join(odd)}")
    labels = None
    if training.labels is not None and test.labels is not None:
        labels = np.concatenate([training.labels, test.labels])
    return Source(
        (*_files(training), *_files(test)),
        labels,
        training.class_names,
        np.repeat([False, True], [len(training), len(test)]),
    )


def image_files(folder: Path, *, top: Path | None = None) -> tuple[Path, ...]:
    """All image files below a folder, in a fixed order. Links are followed, but never in circles.

    `top` is the folder of the whole set: a link that leads back to it would bring in what has another place there.
    """
    return tuple(path for path in files_below(folder, top=top) if path.suffix.lower() in SUFFIXES)


def files_below(folder: Path, *, top: Path | None = None) -> list[Path]:
    """All files, images or not."""
    seen = {_identity(place) for place in (top or folder, folder)}
    found: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        folders[:] = [name for name in sorted(folders) if _is_shown(name) and _is_new(Path(place, name), seen)]
        found += [Path(place, name) for name in names if _is_shown(name)]
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def _read_part(folder: Path, top: Path, *, labeled: bool) -> Source:
    classes = _folders(folder) if labeled else []
    if not classes:
        files = image_files(folder, top=top)
        if not files:
            raise DataError(f"{folder} holds no images; put some there, in formats such as {EXAMPLES}")
        return Source(files)
    by_class = [image_files(folder / name, top=top) for name in classes]
    empty = [name for name, files in zip(classes, by_class, strict=True) if not files]
    if len(empty) == len(classes):
        raise DataError(f"{folder} holds no images, neither in {', '.join(classes[:5])} nor in another folder")
    if empty:
        raise DataError(f"{folder}: class {', '.join(empty)} has no images; add some, or remove its folder")
    stray = [path.name for path in sorted(folder.iterdir()) if path.suffix.lower() in SUFFIXES and path.is_file()]
    if stray:
        raise DataError(f"{folder} has {len(stray)} images beside its classes ({stray[0]}); move them into a class")
    labels = np.repeat(np.arange(len(classes)), [len(files) for files in by_class])
    return Source(tuple(path for files in by_class for path in files), labels, tuple(classes))


def _raise(error: OSError) -> None:
    raise error  # by itself os.walk passes over what may not be read


def _files(part: Source) -> tuple[Path, ...]:
    assert isinstance(part.pictures, tuple)
    return part.pictures


def _folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if _is_shown(path.name) and path.is_dir())


def _is_shown(name: str) -> bool:
    """Hidden files and what macOS packs beside the real ones are no data."""
    return not name.startswith(".") and name != "__MACOSX"


def _is_new(folder: Path, seen: set[tuple[int, int]]) -> bool:
    identity = _identity(folder)
    is_new = identity not in seen
    seen.add(identity)
    return is_new


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino
