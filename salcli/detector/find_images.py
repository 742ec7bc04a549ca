"""From what people type to a list of image files: files, folders, patterns, lists."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import TYPE_CHECKING

from salcli.data.decoding import printable
from salcli.data.image_folder import SUFFIXES, image_files
from salcli.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

LIST = "-"


def find_images(arguments: Iterable[str], listed: Iterable[str] = ()) -> tuple[Path, ...]:
    """All files in the order of the arguments. `listed` are the paths that «-» stands for.

    A file that is named is taken whatever its suffix is; a folder or a pattern brings in files with an image's suffix.
    What a list names and is not there is left to the reader of files: one entry must not stop all others.
    """
    found: list[Path] = []
    for argument in arguments:
        if argument == LIST:
            for path in map(Path, listed):
                found += image_files(path) if _holds(path.is_dir) else [path]
        else:
            found += _of_argument(argument)
    if not found:
        raise DataError("there are no paths on standard input; give one on each line, or with --null after each NUL")
    return tuple(found)


def split_list(content: bytes, *, null: bool) -> list[str]:
    """The paths of a list. Names need not be text."""
    separator = b"\0" if null else b"\n"
    entries = [entry if null else entry.removesuffix(b"\r") for entry in content.split(separator)]
    return [os.fsdecode(entry) for entry in entries if entry]


def _of_argument(argument: str) -> list[Path]:
    """A path that is there is meant as it stands, also where its name looks like a pattern."""
    path = Path(argument)
    if _holds(path.is_dir):
        return list(_folder(path))
    if _holds(path.is_file):
        return [path]
    if _holds(path.exists):
        raise DataError(f"{printable(path)} is neither a file nor a folder")
    if not glob.has_magic(argument):
        raise DataError(f"{printable(path)} is not there")
    found = sorted(_once(_matches(argument)), key=lambda match: match.parts)
    if not found:
        raise DataError(f"no image matches {argument}: a pattern finds files with {_some_suffixes()} or the like")
    return found


def _matches(pattern: str) -> Iterator[Path]:
    for match in glob.iglob(pattern, recursive=True):  # noqa: PTH207  # Path.glob takes no absolute patterns
        path = Path(match)
        if path.suffix.lower() in SUFFIXES and path.is_file():
            yield path


def _once(matches: Iterator[Path]) -> Iterator[Path]:
    """Links that lead back up bring in the same folders again and again; the shortest way to a folder counts."""
    seen: set[tuple[str, str]] = set()
    for match in sorted(matches, key=lambda match: (len(match.parts), match.parts)):
        place = os.path.realpath(match.parent), match.name
        if place not in seen:
            seen.add(place)
            yield match


def _folder(folder: Path) -> tuple[Path, ...]:
    found = image_files(folder)
    if not found:
        raise DataError(f"{printable(folder)} holds no images: no file with {_some_suffixes()} or the like")
    return found


def _holds(question: Callable[[], bool]) -> bool:
    """No where there is no answer: the name is too long, or lies in a folder that may not be read."""
    try:
        return question()
    except (OSError, ValueError):
        return False


def _some_suffixes() -> str:
    return ", ".join((".png", ".jpg", ".webp"))
