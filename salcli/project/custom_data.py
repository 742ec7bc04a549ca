"""Look at custom data before anything is written: sizes, classes, bad files, copies. Refuse what cannot work."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from salcli.data.catalogue import DATA_SETS
from salcli.data.decoding import Look, look
from salcli.data.duplicates import file_digests, sample_digests
from salcli.data.folders import SUFFIXES, files_below, name_for, read_custom
from salcli.data.sets import Samples, with_calibration
from salcli.data.vectors import Columns
from salcli.errors import SalError, printable
from salcli.pipeline.prepare import check_classes
from salcli.progress import Progress

ID, CALIBRATION, WILD, TEST = "id", "calibration", "wild", "odd"
LABELED = (ID, CALIBRATION)


@dataclass(frozen=True)
class CustomSet:
    """A custom data set: what it is for, its name in params.yaml, its paths, its source without files that are bad."""

    role: str
    name: str
    paths: tuple[Path, ...]
    source: Samples
    look: Look | None  # at the images; None for vectors
    n_other_files: int  # with a suffix of no image format

    @property
    def where(self) -> str:
        """Its paths, for messages."""
        return ", ".join(str(path) for path in self.paths)

    @property
    def bad(self) -> tuple[tuple[Path, str], ...]:
        """Files that cannot be read, with the reason."""
        return self.look.bad if self.look else ()

    @property
    def n_dimensions(self) -> int:
        """Of vectors."""
        return int(self.source.array.shape[1])

    def shown(self, file: Path) -> str:
        """A file's path below that of the set."""
        tops = [path if path.is_dir() else path.parent for path in self.paths]
        return printable(next((file.relative_to(top) for top in tops if file.is_relative_to(top)), file))

    def sample_name(self, index: int) -> str:
        """A sample by its file, its row id or its number."""
        source = self.source
        if source.files:
            return self.shown(source.files[index])
        return printable(source.row_ids[index]) if source.row_ids else f"row {index}"


@dataclass(frozen=True)
class Copies:
    """Samples of a set that equal an earlier one in it, or one in another set: the same bytes, or the same vector."""

    of: CustomSet
    other: str  # the name of the set with the first copy
    index: tuple[int, ...]

    @property
    def names(self) -> list[str]:
        return [self.of.sample_name(i) for i in self.index]


@dataclass(frozen=True)
class CustomData:
    """All sets of a project."""

    sets: tuple[CustomSet, ...]
    copies: tuple[Copies, ...]

    @property
    def id(self) -> CustomSet:
        return self.sets[0]

    @property
    def calibration(self) -> CustomSet | None:
        return self.sets[1] if self.sets[1].role == CALIBRATION else None

    @property
    def wild(self) -> CustomSet:
        return next(one for one in self.sets if one.role == WILD)

    @property
    def tests(self) -> tuple[CustomSet, ...]:
        return tuple(one for one in self.sets if one.role == TEST)

    @property
    def is_vectors(self) -> bool:
        return self.id.source.is_vectors

    @property
    def kind(self) -> str:
        """What the samples are called."""
        return self.id.source.kind

    def without_copies(self, one: CustomSet) -> Samples:
        copies = [i for copies in self.copies if copies.of is one for i in copies.index]
        return one.source.take(np.setdiff1d(np.arange(len(one.source)), copies)) if copies else one.source


def look_at_data(
    project: Path,
    id_path: Path,
    wild_paths: Sequence[Path],
    test_paths: Sequence[Path],
    calibration_path: Path | None,
    columns: Columns,
    progress: Progress,
) -> CustomData:
    """Read vectors, or headers of images; decode small sets; compare contents. Nothing is written."""
    calibration = [calibration_path] if calibration_path else []
    _check_paths(project, [id_path, *calibration], wild_paths, test_paths)
    roles = [(ID, (id_path,)), *((CALIBRATION, (path,)) for path in calibration), (WILD, tuple(wild_paths))]
    roles += [(TEST, (path,)) for path in test_paths]
    sets: list[CustomSet] = []
    for role, paths in roles:
        taken = [*DATA_SETS, *(one.name for one in sets)]
        # several paths have no name in common
        name = name_for(paths[0].absolute() if len(paths) == 1 else Path(role), taken, role)
        sets.append(_look_at_set(role, name, paths, columns, progress))
        _check_kinds(sets[0], sets[-1])
        if role == CALIBRATION:
            with_calibration(sets[0].name, sets[0].source, name, sets[-1].source)
    data = CustomData(tuple(sets), tuple(_copies(sets, progress)))
    for one in sets[1:]:
        if len(data.without_copies(one)) == 0:
            others = " and ".join(copies.other for copies in data.copies if copies.of is one)
            how, what = ("equal values", "vectors") if data.is_vectors else ("same bytes", "images")
            needs = {WILD: f"wild data must hold other {what}", CALIBRATION: f"calibration needs other {what}"}
            raise SalError(
                f"all {len(one.source)} {what} of {one.where} are also in {others} ({how}); "
                + needs.get(one.role, f"a test needs {what} that are not")
            )
    return data


def _check_paths(
    project: Path, labeled: Sequence[Path], wild_paths: Sequence[Path], test_paths: Sequence[Path]
) -> None:
    for path in (*labeled, *wild_paths, *test_paths):
        if _is_inside(project, path):
            raise SalError(
                f"the project folder {project} is inside {path}, so its output would be taken for data; "
                "name a folder outside"
            )
    for option, paths in (("--wild", wild_paths), ("--test-ood", test_paths)):
        seen: set[str] = set()
        for path in paths:
            if os.path.realpath(path) in seen:
                raise SalError(f"{option} {path} is given twice; name each path once")
            seen.add(os.path.realpath(path))
    for path, classes in product(wild_paths, labeled):
        if _is_inside(path, classes) and os.path.realpath(path) != os.path.realpath(classes):
            raise SalError(
                f"{path}, the wild data, is inside {classes}, where every folder is a class; move one of them"
            )


def _is_inside(path: Path, folder: Path) -> bool:
    return folder.is_dir() and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _check_kinds(labeled: CustomSet, other: CustomSet) -> None:
    if labeled.source.is_vectors != other.source.is_vectors:
        raise SalError(
            f"{labeled.where} holds {labeled.source.kind}, {other.where} holds {other.source.kind}; "
            "a project is about one kind: give images everywhere, or vectors from the same encoder everywhere"
        )
    if labeled.source.is_vectors and labeled.n_dimensions != other.n_dimensions:
        raise SalError(
            f"the vectors of {labeled.where} have {labeled.n_dimensions} dimensions, those of {other.where} "
            f"{other.n_dimensions}; all must come from the same encoder"
        )


def _look_at_set(role: str, name: str, paths: tuple[Path, ...], columns: Columns, progress: Progress) -> CustomSet:
    source = read_custom(name, paths, labeled=role in LABELED, columns=columns)
    if role == ID:
        check_classes(name, source, paths)
    if source.is_vectors:
        return CustomSet(role, name, paths, source, None, 0)
    with progress.task(f"look at {name}", len(source), "images") as task:
        found = look(source, task)
    where = ", ".join(str(path) for path in paths)
    if len(found.bad) == found.n_looked_at:
        file, reason = found.bad[0]
        hint = "; a CSV lists images, other data are vectors in .parquet, .npz or .npy (docs/embeddings.md)"
        is_list = any(path.suffix.lower() == ".csv" for path in paths)
        raise SalError(
            f"no image of {where} can be read, for example {printable(file)}: {reason}{hint if is_list else ''}"
        )
    bad = {file for file, _ in found.bad}
    source = source.take(np.flatnonzero([file not in bad for file in source.files])) if bad else source
    if role == ID:
        lost = [label for k, label in enumerate(source.class_names) if k not in np.asarray(source.labels)]
        if lost:
            raise SalError(f"{where}: no image of class {lost[0]} can be read; replace them, or remove the class")
    below = [file for path in paths if path.is_dir() for file in files_below(path)]
    n_others = sum(file.suffix.lower() not in SUFFIXES for file in below)
    return CustomSet(role, name, paths, source, found, n_others)


def _copies(sets: list[CustomSet], progress: Progress) -> list[Copies]:
    """Copies within the labeled data, of these in the wild data, and of either in test data."""
    files = [path for one in sets for path in one.source.files]
    n_samples = sum(len(one.source) for one in sets)
    with progress.task(f"compare {sets[0].source.kind}", n_samples, "samples") as task:
        of_files = iter(file_digests(files, task))
        digests = [
            [next(of_files) for _ in one.source.files]
            if one.source.files
            else [digest.tobytes() for digest in sample_digests(one.source.array, task)]
            for one in sets
        ]
    seen: dict[bytes, str] = {}
    found: list[Copies] = []
    for one, own_digests in zip(sets, digests, strict=True):
        new: dict[bytes, str] = {}
        copies: dict[str, list[int]] = {}
        for i, digest in enumerate(own_digests):
            if digest in seen:
                copies.setdefault(seen[digest], []).append(i)
            elif digest in new and one.role in LABELED:  # what is twice in the wild stays twice in the wild data
                copies.setdefault(one.name, []).append(i)
            elif digest:
                new[digest] = one.name
        if one.role != TEST:  # test sets are not compared with each other
            seen |= new
        found += [Copies(one, other, tuple(index)) for other, index in copies.items()]
    return found
