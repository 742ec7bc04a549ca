"""Look at custom data before anything is written: sizes, channels, bad files, copies. Refuse what cannot work."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from salcli.data.catalogue import DATA_SETS
from salcli.data.decoding import Look, look
from salcli.data.duplicates import file_digests
from salcli.data.folders import SUFFIXES, files_below, name_for, read_custom
from salcli.data.samples import Source
from salcli.errors import DataError, printable
from salcli.pipeline.prepare import check_classes
from salcli.progress import Progress


@dataclass(frozen=True)
class CustomSet:
    """A custom data set: its name in params.yaml, its path, and its source without files that cannot be read."""

    name: str
    path: Path
    source: Source
    look: Look
    n_other_files: int  # with a suffix of no image format

    def shown(self, file: Path) -> str:
        """A file's path below that of the set."""
        top = self.path if self.path.is_dir() else self.path.parent
        return printable(file.relative_to(top) if file.is_relative_to(top) else file)


@dataclass(frozen=True)
class Copies:
    """Files of a set with the same bytes as an earlier one in it, or as one in another set."""

    of: CustomSet
    other: str  # the name of the set with the first copy
    paths: tuple[Path, ...]


@dataclass(frozen=True)
class CustomData:
    """All sets of a project."""

    id: CustomSet
    wild: CustomSet
    tests: tuple[CustomSet, ...]
    copies: tuple[Copies, ...]

    @property
    def sets(self) -> tuple[CustomSet, ...]:
        return self.id, self.wild, *self.tests

    def without_copies(self, one: CustomSet) -> Source:
        return without(one.source, {path for copies in self.copies if copies.of is one for path in copies.paths})


def look_at_data(
    project: Path, id_path: Path, wild_path: Path, test_paths: Sequence[Path], progress: Progress
) -> CustomData:
    """Read headers, decode small sets, compare bytes. Nothing is written."""
    for path in (id_path, wild_path, *test_paths):
        if _is_inside(project, path):
            raise DataError(
                f"the project folder {project} is inside {path}, so its output would be taken for data; "
                "name a folder outside"
            )
    if _is_inside(wild_path, id_path) and os.path.realpath(wild_path) != os.path.realpath(id_path):
        raise DataError(
            f"{wild_path}, the wild data, is inside {id_path}, where every folder is a class; move one of them"
        )
    taken: list[str] = [*DATA_SETS]
    sets = []
    for role, path in (("id", id_path), ("wild", wild_path), *(("odd", path) for path in test_paths)):
        name = name_for(path.absolute(), taken, role)
        taken.append(name)
        sets.append(_look_at_set(name, path, progress, is_id=role == "id"))
    labeled, wild, *tests = sets
    data = CustomData(labeled, wild, tuple(tests), tuple(_copies(sets, progress)))
    for one in (wild, *tests):
        if len(data.without_copies(one)) == 0:
            others = " and ".join(copies.other for copies in data.copies if copies.of is one)
            raise DataError(
                f"all {len(one.source)} images of {one.path} are also in {others} (same bytes); "
                + ("wild data must hold other images" if one is wild else "a test needs images that are not")
            )
    return data


def without(source: Source, files: Collection[Path]) -> Source:
    """The set without some of its files."""
    if not files:
        return source
    return source.take(np.array([i for i, path in enumerate(source.files) if path not in files], dtype=np.int64))


def _is_inside(path: Path, folder: Path) -> bool:
    return folder.is_dir() and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _look_at_set(name: str, path: Path, progress: Progress, *, is_id: bool) -> CustomSet:
    source = read_custom(name, path, labeled=is_id)
    if is_id:
        check_classes(name, source)
    with progress.task(f"look at {name}", len(source), "images") as task:
        found = look(source, task)
    if len(found.bad) == found.n_looked_at:
        file, reason = found.bad[0]
        raise DataError(f"no image of {path} can be read, for example {printable(file)}: {reason}")
    source = without(source, {file for file, _ in found.bad})
    if is_id:
        lost = [label for k, label in enumerate(source.class_names) if k not in np.asarray(source.labels)]
        if lost:
            raise DataError(f"{path}: no image of class {lost[0]} can be read; replace them, or remove the class")
    others = [file for file in files_below(path) if file.suffix.lower() not in SUFFIXES] if path.is_dir() else []
    return CustomSet(name, path, source, found, len(others))


def _copies(sets: list[CustomSet], progress: Progress) -> list[Copies]:
    """Copies within the ID data, of ID data in the wild data, and of either in test data."""
    files = [path for one in sets for path in one.source.files]
    with progress.task("compare files", len(files), "images") as task:
        digests = iter(file_digests(files, task))
    seen: dict[bytes, str] = {}
    found: list[Copies] = []
    for position, one in enumerate(sets):
        new: dict[bytes, str] = {}
        copies: dict[str, list[Path]] = {}
        for path in one.source.files:
            digest = next(digests)
            if digest in seen:
                copies.setdefault(seen[digest], []).append(path)
            elif digest in new and position == 0:  # what is twice in the wild stays twice in the wild data
                copies.setdefault(one.name, []).append(path)
            elif digest:
                new[digest] = one.name
        if position < 2:  # test sets are not compared with each other
            seen |= new
        found += [Copies(one, other, tuple(paths)) for other, paths in copies.items()]
    return found
