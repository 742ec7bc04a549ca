"""Sets of samples: as they are on disk, and prepared for the pipeline."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from salcli.errors import SalError, printable

LARGEST_SIDE = 2048  # pixels that a network takes; larger pictures are resized
LARGEST_VALUE = 1e15  # of vectors and features: its square, summed over them, is a float32
Fit = Literal["resize", "crop"]


@dataclass(frozen=True)
class Samples:
    """A set: n images or vectors, as they are on disk or prepared for the pipeline.

    On disk these are image files that are not decoded yet, an array of images of any size, or vectors; a prepared set
    has uint8 images with C channels, or float32 vectors. OOD sets need no labels. `is_test` marks the samples that were
    published for testing; the others may go to training or to the wild data. Where it is None, samples are split at
    random. `array` may be a read-only map of a file. `fit` says how images of another size are brought to the requested
    one: `resize` the shorter side, then crop; or only `crop`, for sets that were published as larger crops.
    """

    array: NDArray[Any] = field(default_factory=lambda: np.empty(0))  # n, C, H, W or n, D; unused with `files`
    labels: NDArray[np.int64] | None = None  # n
    class_names: tuple[str, ...] = ()
    is_test: NDArray[np.bool_] | None = None  # n
    is_calibration: NDArray[np.bool_] | None = None  # n, of ID data that a calibration set was added to
    files: tuple[Path, ...] = ()  # n, or none
    fit: Fit = "resize"
    row_ids: tuple[str, ...] = ()  # n, or none
    shown: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # columns that people want to see, n cells each
    columns: str = ""  # which columns of a file hold what, for messages
    origin: NDArray[np.int64] | None = None  # n, 2: which of `origin_files`, and the row in it; None: images in folders
    origin_files: tuple[Path, ...] = ()  # that hold the samples, or list their files

    # What has one entry for each sample, besides the columns of `shown`
    PER_SAMPLE: ClassVar = ("files", "array", "labels", "is_test", "row_ids", "is_calibration", "origin")

    def __len__(self) -> int:
        return len(self.files or self.array)

    @property
    def is_vectors(self) -> bool:
        return self.array.ndim == 2

    @property
    def kind(self) -> str:
        """What the samples are called in messages."""
        return "vectors" if self.is_vectors else "images"

    def take(self, index: NDArray[np.int64]) -> Self:
        """Some of the samples, in the given order."""

        def some(cells: Any) -> Any:
            if isinstance(cells, tuple):
                return tuple(cells[i] for i in index) if cells else ()
            return cells if cells is None or not len(cells) else cells[index]

        shown = {name: some(cells) for name, cells in self.shown.items()}
        return replace(self, shown=shown, **{name: some(getattr(self, name)) for name in self.PER_SAMPLE})

    def from_file(self, path: Path) -> Self:
        """The same samples, which are all rows of this file."""
        row = np.arange(len(self))
        return replace(self, origin=np.stack([np.zeros_like(row), row], axis=1), origin_files=(path,))

    def unlabeled(self) -> Self:
        """The same samples, for use as OOD data."""
        return replace(self, labels=None, class_names=())


def joined(training: Samples, test: Samples) -> Samples:
    """The two parts of an official split as one set, test samples last. Both are files, or both are arrays."""
    is_test = np.repeat([False, True], [len(training), len(test)])
    return replace(_end_to_end([training, test]), is_test=is_test)


def concatenated(name: str, sources: Sequence[Samples], paths: Sequence[Path]) -> Samples:
    """One set from several paths: their classes are united, and row ids must differ.

    Rows without an id in a set where others have one are named after their file and number.
    """
    if len(sources) == 1:
        return sources[0]
    first = sources[0]
    for other, path in zip(sources[1:], paths[1:], strict=True):
        reason = _differs(first, other)
        if reason:
            raise SalError(f"{name}: {paths[0]} and {path} cannot be one set: {reason}")
    names = _class_order({class_name for source in sources for class_name in source.class_names})
    number = {class_name: k for k, class_name in enumerate(names)}
    parts = []
    for source, path in zip(sources, paths, strict=True):
        labels = source.labels
        if labels is not None:
            labels = np.array([number[class_name] for class_name in source.class_names], np.int64)[labels]
        ids = source.row_ids
        if not ids and any(other.row_ids for other in sources):
            ids = tuple(f"{path.name}:{row}" for row in range(len(source)))
        parts.append(replace(source, labels=labels, class_names=names, row_ids=ids))
    whole = _end_to_end(parts)
    check_unique(name, whole.row_ids)
    return whole


def with_calibration(name: str, labeled: Samples, added: str, calibration: Samples) -> Samples:
    """ID data, and behind them a calibration set of the same classes that comes from elsewhere."""
    if calibration.labels is None:
        raise SalError(f"{added}, the calibration set, has no labels; label it as {name} is labeled")
    unknown = [class_name for class_name in calibration.class_names if class_name not in labeled.class_names]
    if unknown:
        raise SalError(
            f"{added}, the calibration set, has classes that {name} does not have ({some_of(unknown)}); leave these "
            f"out, or call them as there: {some_of(labeled.class_names, 12)}"
        )
    number = np.array([labeled.class_names.index(class_name) for class_name in calibration.class_names], np.int64)
    is_test = None if labeled.is_test is None else np.zeros(len(calibration), np.bool_)
    names = labeled.class_names
    calibration = replace(calibration, labels=number[calibration.labels], class_names=names, is_test=is_test)
    if reason := _differs(labeled, calibration):
        raise SalError(f"{added} cannot be the calibration set of {name}: {reason}")
    if bool(labeled.row_ids) != bool(calibration.row_ids):
        labeled, calibration = replace(labeled, row_ids=()), replace(calibration, row_ids=())
    is_calibration = np.repeat([False, True], [len(labeled), len(calibration)])
    return replace(_end_to_end([labeled, calibration]), is_calibration=is_calibration)


def _differs(one: Samples, other: Samples) -> str:
    """Why two sources cannot be parts of one set; empty if they can."""
    if one.is_vectors != other.is_vectors:
        return f"one holds {one.kind}, the other {other.kind}"
    if bool(one.files) != bool(other.files):
        return "one holds image files, the other an array; give one kind of them"
    if one.array.shape[1:] != other.array.shape[1:]:
        sizes = [" × ".join(map(str, array.shape[1:])) for array in (one.array, other.array)]
        what = "vectors of {} and {} dimensions" if one.is_vectors else "images of {} and {} (channels, height, width)"
        return f"they hold {what.format(*sizes)}"
    if (one.labels is None) != (other.labels is None):
        return "only one of them has labels"
    if one.labels is not None and _are_numbers(one.class_names) != _are_numbers(other.class_names):
        return "labels are numbers in one and text in the other"
    if (one.is_test is None) != (other.is_test is None):
        return "only one of them says which samples are for testing; mark them in both, or in neither"
    if one.shown.keys() != other.shown.keys():
        return "they have different columns to show"
    return ""


def _end_to_end(parts: Sequence[Samples]) -> Samples:
    def chained(cells: list[Any]) -> Any:
        if isinstance(cells[0], tuple):
            return tuple(chain.from_iterable(cells))
        return None if any(one is None for one in cells) else np.concatenate(cells)

    shown = {name: chained([part.shown[name] for part in parts]) for name in parts[0].shown}
    origins: list[NDArray[np.int64] | None] = []
    origin_files: tuple[Path, ...] = ()
    for part in parts:
        origins.append(None if part.origin is None else part.origin + np.array([len(origin_files), 0]))
        origin_files += part.origin_files
    whole = {name: chained([getattr(part, name) for part in parts]) for name in Samples.PER_SAMPLE}
    return replace(parts[0], shown=shown, **whole | {"origin": chained(origins), "origin_files": origin_files})


def numbered(labels: Sequence[str]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The number of each label, and the names of all classes."""
    classes = _class_order(set(labels))
    number = {name: k for k, name in enumerate(classes)}
    return np.array([number[name] for name in labels], np.int64), classes


def _class_order(names: set[str]) -> tuple[str, ...]:
    """Alphabetical; numbers by value, so that they can be the class numbers of a trained network."""
    if _are_numbers(names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def _are_numbers(names: set[str] | tuple[str, ...]) -> bool:
    return all(name.isdecimal() for name in names)


def check_unique(where: str | Path, row_ids: Sequence[str]) -> None:
    """Row ids must tell rows apart."""
    repeated = [row_id for row_id, count in Counter(row_ids).items() if count > 1]
    if repeated:
        raise SalError(
            f"{where}: {len(repeated):,} row ids occur more than once ({some_of(repeated)}); "
            "make them unique, or name another column with data.columns.id"
        )


def check_same_shape(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """All sets of a project, by name, must have samples of one shape: (C, H, W) or (D,)."""
    if len(set(shapes.values())) <= 1:
        return
    described = [
        f"{name} has vectors of {shape[0]:,} dimensions" if len(shape) == 1
        else f"{name} has images of {' × '.join(map(str, shape))} (channels, height, width)"
        for name, shape in shapes.items()
    ]  # fmt: skip
    raise SalError(f"the sets of a project must agree, but {', '.join(described)}; make all of them in the same way")


def shown(array: NDArray[Any]) -> str:
    """Shape and dtype, for messages: 2 × 4 × 4 of float64."""
    return f"{' × '.join(map(str, array.shape)) or 'one'} of {array.dtype}"


def some_of(names: Sequence[object], most: int = 3) -> str:
    """The first names of a list, for messages: a, b, c, …"""
    return ", ".join(printable(str(name)) for name in names[:most]) + (", …" if len(names) > most else "")


def file_size(path: Path) -> int:
    """In bytes; 0 where the file cannot be found."""
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return 0
