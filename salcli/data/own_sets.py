"""Sets of one's own: a folder, a CSV list or an .npz file anywhere, under a name that the user chose (data.own)."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING

from salcli.data.array_files import read_npz
from salcli.data.image_folder import EXAMPLES, image_files, read_folder
from salcli.data.image_list import read_list
from salcli.data.image_set import Source
from salcli.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Collection

# they become parts of commands, of file names and of keys in dvc.yaml
NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")
SPLIT_NAMES = {"train", "training", "test", "testing", "val", "valid", "validation", "dev"}
TAKEN = {"average", "networks"}  # a row of the table, a folder beside those of the experiments


def read_own(name: str, place: Path, *, labeled: bool) -> Source:
    """The set, not decoded yet: with its classes, or all images that are there."""
    try:
        if not place.exists():
            raise DataError(f"{place} does not exist; put a folder of images there, or name another place for {name}")
        if place.suffix.lower() == ".npz":
            return read_npz(place, labeled=labeled)
        if place.is_file():
            return _read_file(name, place, labeled=labeled)
        if labeled:
            return _classes(name, place)
        found = image_files(place)
    except (OSError, ValueError) as error:
        where = getattr(error, "filename", None) or place
        raise DataError(f"{name}: {where} cannot be read ({getattr(error, 'strerror', error)}); mend that") from None
    if not found:
        raise DataError(f"{name}: {place} holds no images; put some there, in formats such as {EXAMPLES}")
    return Source(found)


def _classes(name: str, place: Path) -> Source:
    found = read_folder(place, labeled=True)
    if len(found.class_names) > 1 and SPLIT_NAMES.issuperset(found.class_names):
        raise DataError(
            f"{name}: {place} has the folders {', '.join(found.class_names)}, which look like parts, not like "
            "classes; "
            f"name one of them ({place / found.class_names[0]}), or have train/ and test/ alone"
        )
    return found


def _read_file(name: str, place: Path, *, labeled: bool) -> Source:
    if place.suffix.lower() != ".csv":
        raise DataError(f"{name}: {place} is a file; give a folder of images, a .csv with their paths, or an .npz file")
    return read_list(place, labeled=labeled)


def read_from_own(name: str, place: Path) -> list[Path]:
    """The files and folders that a set is read from: those whose change means other data."""
    if place.suffix.lower() != ".csv" or not place.is_file():
        return [place]
    pictures = read_own(name, place, labeled=False).pictures
    return [place, *(path for path in pictures if isinstance(path, Path))]


def name_for(place: Path, taken: Collection[str], fallback: str) -> str:
    """A name made of the place's own, such as data.own takes it, unlike those that are taken."""
    plain = unicodedata.normalize("NFKD", place.stem if place.is_file() else place.name).encode("ascii", "ignore")
    name = re.sub(r"[^a-z0-9]+", "-", plain.decode().lower()).strip("-")[:48]
    name = name if NAME.fullmatch(name) else f"{fallback}-{name}".rstrip("-")
    count, unique = 1, name
    while unique in taken or unique in TAKEN:
        count += 1
        unique = f"{name}-{count}"
    return unique
