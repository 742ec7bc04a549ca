"""A look at labeled, wild and known odd images, before anything is written. What cannot work is refused here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from salcli.data.catalogue import DATA_SETS
from salcli.data.decoding import printable
from salcli.data.duplicates import file_digests
from salcli.data.image_folder import SUFFIXES, files_below
from salcli.data.looking import Look, look
from salcli.data.own_sets import name_for, read_own
from salcli.errors import DataError
from salcli.stages.prepare import check_classes

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from salcli.data.image_set import Source
    from salcli.progress import Progress


@dataclass(frozen=True)
class OwnSet:
    """One set: its name in params.yaml, where it lies, and what is in it but for what was seen to be unreadable."""

    name: str
    place: Path
    source: Source
    look: Look
    n_other_files: int

    def shown(self, path: Path) -> str:
        """A file of it, in short."""
        top = self.place if self.place.is_dir() else self.place.parent
        return printable(path.relative_to(top) if path.is_relative_to(top) else path)


@dataclass(frozen=True)
class Copies:
    """Files of a set with the same bytes as one before them in it, or as one in another set."""

    own: OwnSet
    other: str  # the set's own name, or the other's
    paths: tuple[Path, ...]


@dataclass(frozen=True)
class OwnData:
    """All sets of a project."""

    id: OwnSet
    wild: OwnSet
    tests: tuple[OwnSet, ...]
    copies: tuple[Copies, ...]

    @property
    def sets(self) -> tuple[OwnSet, ...]:
        """In the order in which people think of them."""
        return self.id, self.wild, *self.tests

    def n_used(self, own: OwnSet) -> int:
        """Its images without copies."""
        return len(own.source) - sum(len(one.paths) for one in self.copies if one.own is own)


def look_at_data(
    project: Path, id_place: Path, wild_place: Path, test_places: Sequence[Path], progress: Progress
) -> OwnData:
    """Read headers and compare bytes; nothing is written."""
    for place in (id_place, wild_place, *test_places):
        if _is_inside(project, place):
            raise DataError(
                f"the project's folder, {project}, lies inside of {place}, and what it makes would be taken for data; "
                "name a folder outside"
            )
    if _is_inside(wild_place, id_place) and os.path.realpath(wild_place) != os.path.realpath(id_place):
        raise DataError(
            f"{wild_place}, the wild data, lies inside of {id_place}, where every folder is a class; move one of them"
        )
    taken: list[str] = [*DATA_SETS]
    sets = []
    for kind, place in (("id", id_place), ("wild", wild_place), *(("odd", place) for place in test_places)):
        name = name_for(place.absolute(), taken, kind)
        taken.append(name)
        sets.append(_look_at(name, place, progress, is_id=kind == "id"))
    labeled, wild, *tests = sets
    found = OwnData(labeled, wild, tuple(tests), tuple(_copies(sets, progress)))
    for own in (wild, *tests):
        if found.n_used(own) == 0:
            others = " and ".join(one.other for one in found.copies if one.own is own)
            raise DataError(
                f"all {len(own.source)} images of {own.place} are in {others}, too (same bytes); "
                + ("wild data must hold other images" if own is wild else "a test needs images that are not")
            )
    return found


def _is_inside(place: Path, folder: Path) -> bool:
    return folder.is_dir() and Path(os.path.realpath(place)).is_relative_to(os.path.realpath(folder))


def _look_at(name: str, place: Path, progress: Progress, *, is_id: bool) -> OwnSet:
    source = read_own(name, place, labeled=is_id)
    if is_id:
        check_classes(name, source)
    with progress.task(f"look at {name}", len(source), "images") as task:
        found = look(source, task)
    if len(found.bad) == found.n_looked_at:
        path, reason = found.bad[0]
        raise DataError(f"no image of {place} can be read, for example {printable(path)}: {reason}")
    n_other = 0
    source = without(source, {path for path, _ in found.bad})
    if is_id:
        lost = [name for k, name in enumerate(source.class_names) if k not in np.asarray(source.labels)]
        if lost:
            raise DataError(f"{place}: no image of class {lost[0]} can be read; replace them, or remove the class")
    if place.is_dir():
        n_other = sum(path.suffix.lower() not in SUFFIXES for path in files_below(place))
    return OwnSet(name, place, source, found, n_other)


def without(source: Source, files: Collection[Path]) -> Source:
    """The set without some files."""
    if not files or isinstance(source.pictures, np.ndarray):
        return source
    return source.take(np.array([i for i, path in enumerate(source.pictures) if path not in files], dtype=np.int64))


def _copies(sets: list[OwnSet], progress: Progress) -> list[Copies]:
    """Files that are there twice. Of the wild data those in the ID data, of test data those in either."""
    lists = [one.source.pictures if isinstance(one.source.pictures, tuple) else () for one in sets]
    files = [path for pictures in lists for path in pictures]
    with progress.task("compare files", len(files), "images") as task:
        digests = iter(file_digests(files, task))
    seen: dict[bytes, str] = {}
    found: list[Copies] = []
    for place, (own, pictures) in enumerate(zip(sets, lists, strict=True)):
        new: dict[bytes, str] = {}
        copies: dict[str, list[Path]] = {}
        for path in pictures:
            digest = next(digests)
            if digest in seen:
                copies.setdefault(seen[digest], []).append(path)
            elif digest in new and place == 0:  # twice in the wild data is twice in the wild
                copies.setdefault(own.name, []).append(path)
            elif digest:
                new[digest] = own.name
        if place < 2:  # of two test sets, each stands for itself
            seen |= new
        found += [Copies(own, other, tuple(paths)) for other, paths in copies.items()]
    return found
