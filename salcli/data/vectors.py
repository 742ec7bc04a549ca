"""Vectors that users bring, such as embeddings: .npz, .npy and Parquet files, as float32 rows with labels and ids.

`read_vectors` reads a whole set and refuses what cannot be used. Detectors read the same files with `opened`, block by
block, and say for each row whether it can be used.
"""

import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from salcli.data.readers import channels_first, numbered_labels
from salcli.data.sets import LARGEST_VALUE, Samples, check_unique, numbered, shown, some_of
from salcli.errors import SalError, did_you_mean, printable

ARRAYS, TABLES = (".npz", ".npy"), (".parquet", ".pq")
DIMENSIONS = range(2, 16_384 + 1)
# Names by which columns are found where params.yaml names none
LABEL_NAMES = ("label", "labels", "class", "y", "target", "category", "category_name", "intent", "topic")
ID_NAMES = ("id", "ids", "row_id", "uid", "key")
SPLIT, IS_TEST, CLASS_NAMES = "split", "is_test", "class_names"
PARTS = {"train": False, "test": True}  # of an official split
NUMBERS = "fiu"  # kinds of dtype
BLOCK_VALUES = 1 << 22
NPZ_LAYOUT = (
    "`images` (n × height × width [× 1 or 3], uint8) and, optionally, `labels`, `is_test`, `class_names`; or vectors: "
    "`x` (n × D numbers) and, optionally, `y`, `id`"
)
FIXES = {".npz": "write it with np.savez", ".npy": "write it with np.save", "Parquet": "write it again"}
LAYOUTS = {".npz": f"; it should hold {NPZ_LAYOUT}", ".npy": "; it should hold n × D numbers", "Parquet": ""}
NPY_MAGIC = b"\x93NUMPY"
# What numpy raises for broken .npy and .npz files
UNREADABLE = (
    OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError, MemoryError,
    OverflowError, AttributeError, TypeError,
)  # fmt: skip


@dataclass(frozen=True)
class Columns:
    """Which columns of a table, or arrays of an .npz file, hold what. None: found by name and type."""

    vector: str | tuple[str, ...] | None = None  # one column of lists, or several of numbers
    label: str | None = None
    row_id: str | None = None
    show: tuple[str, ...] = ()


ANY = Columns()

Cells = NDArray[Any] | list[Any]
Names = tuple[str, ...]


def read_vectors(path: Path, *, labeled: bool, columns: Columns = ANY) -> Samples:
    """A whole set of vectors. An array file may also hold images."""
    suffix = path.suffix.lower()
    named = ANY if suffix == ".npy" else columns  # it has no columns that could be named
    with opened(path, is_set=True) as file:
        if isinstance(file, ArrayFile):
            arrays = {name: file.cells(name) for name in file.names}
            if _are_images(arrays, named):
                return _images(path, arrays, labeled=labeled)
        label, row_id = column_names(path, file.names, named, labeled=labeled)
        if labeled and label is None and suffix != ".npy":
            label = _class_column(file, {row_id, *named.show, *file.marks})
        other = {name for name in (label, row_id, *named.show, *file.marks) if name in file.names}
        vector = file.vector_columns(named, other)
        array, cells = file.whole(vector, other, row_id)
    sources = {"labels": label, "ids": row_id, **{mark: mark for mark in file.marks}}
    found = {what: cells[name] for what, name in sources.items() if name and name in cells}
    to_show = {name: cells.get(name, [""] * len(array)) for name in columns.show}
    called = {what: name for what, name in sources.items() if name}
    source = _source(path, as_float32(array), found, to_show, called, labeled=labeled)
    return source if suffix == ".npy" else replace(source, columns=_described(vector, label if labeled else "", row_id))


def several(names: str | Names | None) -> Names:
    """One name or several, as a tuple."""
    return (names,) if isinstance(names, str) else names or ()


def column_names(
    path: Path, there: Collection[str], columns: Columns, *, labeled: bool = False
) -> tuple[str | None, str | None]:
    """The names of label and id, after a check that all columns of params.yaml are there."""
    vector, label = several(columns.vector), several(columns.label) if labeled else ()
    for key, names in {"vector": vector, "label": label, "id": several(columns.row_id), "show": columns.show}.items():
        check_columns(path, names, there, f"data.columns.{key}")
    lower = {name.lower(): name for name in there if name not in vector}
    found = [next((lower[name] for name in names if name in lower), None) for names in (LABEL_NAMES, ID_NAMES)]
    return columns.label if columns.label in there else found[0], columns.row_id or found[1]


def check_columns(path: Path, names: Collection[str], there: Collection[str], option: str) -> None:
    """All must be there; `option` is where they were named."""
    for name in names:
        if name not in there:
            nearest = did_you_mean(name, there)
            raise SalError(
                f"{printable(path)} has no column {name}{nearest}; it has {some_of([*there], 12)} ({option})"
            )


def _class_column(file: "ArrayFile | TableFile", other: Collection[str | None]) -> str | None:
    """The only column of text whose values recur, such as 20 topics in 2,000 rows."""
    texts = {name: file.cells(name) for name in file.texts if name not in other}
    found = [name for name, cells in texts.items() if 1 < len(set(cells)) <= len(cells) // 2]
    return found[0] if len(found) == 1 else None


def _described(vector: Names, label: str | None, row_id: str | None) -> str:
    named = vector[0] if len(vector) == 1 else f"{vector[0]} … {vector[-1]} ({len(vector)})"
    others = {"label": label, "id": row_id}
    return ", ".join([f"vector {named}", *(f"{what} {name}" for what, name in others.items() if name)])


# --- files


class RowBlock(NamedTuple):
    """Some consecutive rows of a file."""

    array: NDArray[Any]  # b, D
    cells: Mapping[str, Cells]  # of other columns
    lengths: NDArray[np.int64] | None = None  # of lists that are not all of D numbers; 0 where one is missing


class ArrayFile:
    """An .npz file, or a .npy file with its labels and ids. An array is read when it is needed; none is unpickled."""

    marks = (SPLIT, IS_TEST, CLASS_NAMES)

    def __init__(
        self, path: Path, names: Collection[str], read: Callable[[str], NDArray[Any]], *, is_set: bool
    ) -> None:
        self.path, self.names, self.cells, self._is_set = path, [*names], cache(read), is_set

    @property
    def texts(self) -> list[str]:
        return [name for name in self.names if self.cells(name).dtype.kind == "U" and self.cells(name).ndim == 1]

    def vector_columns(self, columns: Columns, other: Collection[str]) -> Names:
        """The names of the array of vectors, or of several arrays of numbers."""
        if columns.vector or "x" in self.names:
            return several(columns.vector or "x")
        wide = tuple(name for name in self.names if name not in other and _is_wide(self.cells(name)))
        if len(wide) != 1:
            which = " or ".join(wide) or some_of(self.names)
            advice = "Call it `x`, or name it with data.columns.vector" if self._is_set else "Name it with --vector"
            raise SalError(f"{printable(self.path)}: which array holds the vectors, {which}? {advice}")
        return wide

    def whole(
        self, vector: Names, other: Collection[str], row_id: str | None = None
    ) -> tuple[NDArray[Any], Mapping[str, Cells]]:
        """All vectors, and the cells of other columns."""
        array = self.cells(*vector) if len(vector) == 1 else np.stack([self.cells(name) for name in vector], axis=1)
        if not _is_wide(array):
            kinds = " (float16, float32, float64 or int)" if self._is_set else ""
            raise SalError(f"{printable(self.path)}: vectors must be n × D numbers{kinds}, got {shown(array)}")
        return array, {name: self.cells(name) for name in other}

    def blocks(self, vector: Names, other: Collection[str], n_rows: int, n_dimensions: int = 0) -> Iterator[RowBlock]:
        """The rows with ids or other cells. A compressed array can only be read as a whole."""
        array, cells = self.whole(vector, other)
        for ids in cells.values():
            if len(ids) != len(array):
                raise SalError(f"{printable(self.path)}: there are {len(array):,} vectors, but {len(ids):,} ids")
        for start in range(0, len(array), n_rows):
            rows = slice(start, start + n_rows)
            yield RowBlock(np.asarray(array[rows]), {name: ids[rows] for name, ids in cells.items()})


class TableFile:
    """A Parquet file."""

    marks = (SPLIT,)

    def __init__(self, path: Path, file: Any) -> None:
        from pyarrow import types

        def is_number(kind: Any) -> Any:
            return types.is_integer(kind) or types.is_floating(kind)

        def is_vector(kind: Any) -> Any:
            is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
            return is_list and is_number(kind.value_type)

        def is_text(kind: Any) -> Any:
            return types.is_string(kind) or types.is_large_string(kind) or types.is_dictionary(kind)

        self.path, self._file, self.names = path, file, file.schema_arrow.names
        self._types = {name: file.schema_arrow.field(name).type for name in self.names}
        self.numbers, self.lists, self.texts = (
            [name for name, kind in self._types.items() if fits(kind)] for fits in (is_number, is_vector, is_text)
        )

    def cells(self, name: str) -> list[Any]:
        """A whole column."""
        cells: list[Any] = self._file.read(columns=[name]).column(0).to_pylist()
        return cells

    def vector_columns(self, columns: Columns, other: Collection[str]) -> Names:
        """The column of lists, or the columns of numbers, that make up the vectors."""
        takes, rule = self.lists, "must hold lists of numbers"
        if isinstance(columns.vector, tuple):
            takes, rule = self.numbers, "of data.columns.vector must hold numbers"
        for name in several(columns.vector):
            if name not in takes:
                others = f"; these do: {some_of(takes, 12)}" if takes else ""
                raise SalError(f"{self.path}: column {name} {rule}, got {self._types[name]}{others}")
        if columns.vector:
            return several(columns.vector)
        lists, numbers = ([name for name in names if name not in other] for names in (self.lists, self.numbers))
        if len(lists) > 1:
            raise SalError(
                f"{self.path}: which column holds the vectors, {' or '.join(lists)}? Name it with --vector, or in "
                "data.columns.vector"
            )
        if not (lists or numbers):
            raise SalError(
                f"{self.path} has neither a column of lists of numbers nor columns of numbers ({some_of(self.names)})"
            )
        return tuple(lists or sorted(numbers))  # the same vectors whatever the order in the file

    def whole(
        self, vector: Names, other: Collection[str], row_id: str | None = None
    ) -> tuple[NDArray[np.float32], Mapping[str, Cells]]:
        """All vectors, and the cells of other columns. `row_id` names rows in messages."""
        start, array, cells = 0, np.empty((0, 2), np.float32), {name: list[Any]() for name in other}
        n_dimensions, odd = 0, dict[int, int]()  # dimensions of rows that differ from the first
        for rows in self.blocks(vector, other, 1024):
            n_dimensions = n_dimensions if start else rows.array.shape[1]
            if rows.lengths is not None:
                odd |= {start + int(i): int(rows.lengths[i]) for i in np.flatnonzero(rows.lengths != n_dimensions)}
            if not odd:
                if start == 0:
                    array = np.empty((self._file.metadata.num_rows, n_dimensions), np.float32)
                array[start : start + len(rows.array)] = as_float32(rows.array)
            for name in cells:
                cells[name] += rows.cells[name]
            start += len(rows.array)
        if odd:
            names = cells[row_id] if row_id in cells else range(start)
            counted = "" if row_id in cells else ", counted from 0"
            which = some_of([f"row {names[i]}: {length}" for i, length in odd.items()])
            raise SalError(
                f"{self.path}: all vectors must have the same dimension, but {len(odd):,} of {start:,} do not have "
                f"{n_dimensions}, as the first has ({which}{counted}); embed all rows with the same encoder, or leave "
                "them out"
            )
        return array, cells

    def blocks(self, vector: Names, other: Collection[str], n_rows: int, n_dimensions: int = 0) -> Iterator[RowBlock]:
        """The rows with ids or other cells. Without `n_dimensions`, lists should be as long as the first."""
        for batch in self._file.iter_batches(n_rows, columns=[*{*vector, *other}]):
            cells = {name: batch.column(name).to_pylist() for name in other}
            if vector[0] in self.lists:
                array, lengths = _of_lists(batch.column(vector[0]), n_dimensions)
                n_dimensions = array.shape[1]
                yield RowBlock(array, cells, lengths)
            else:
                numbers = [batch.column(name).to_numpy(zero_copy_only=False) for name in vector]
                yield RowBlock(np.stack(numbers, axis=1), cells)


def _of_lists(lists: Any, n_dimensions: int) -> tuple[NDArray[Any], NDArray[np.int64] | None]:
    """A column of lists as an array, with NaN where one has another length; then also all lengths."""
    from pyarrow.compute import fill_null, list_value_length

    lengths = fill_null(list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    n_dimensions = n_dimensions or int(lengths[0])
    fits = lengths == n_dimensions
    fitting = lists if fits.all() else lists.filter(fits)
    values = fitting.flatten().to_numpy(zero_copy_only=False).reshape(len(fitting), n_dimensions)
    if fits.all():
        return values, None
    array = np.full((len(lists), n_dimensions), np.nan, np.result_type(values.dtype, np.float32))
    array[fits] = values
    return array, lengths


def _is_wide(array: NDArray[Any]) -> bool:
    return array.ndim == 2 and array.dtype.kind in NUMBERS


def how_to_label(path: Path) -> str:
    """Where labels go in a file of vectors, for messages."""
    suffix, named = path.suffix.lower(), "name theirs with --label (data.columns.label in params.yaml)"
    if suffix == ".npy":
        return f"store them beside it as {printable(path.stem)}.labels.npy"
    if suffix == ".npz":
        return f"add them as an array `y`, or {named}"
    with opened(path) as file:
        there = some_of(file.names, 12)
    return f"add them as a column named {', '.join(LABEL_NAMES)}, or {named}; its columns: {there}"


@contextmanager
def opened(path: Path, *, is_set: bool = False) -> Iterator[ArrayFile | TableFile]:
    """The file, by its suffix. What goes wrong while it is open means that it is broken.

    `is_set`: it is a set of params.yaml, and messages advise accordingly.
    """
    suffix = path.suffix.lower()
    form: str = suffix
    broken: tuple[type[Exception], ...] = UNREADABLE
    if suffix in TABLES:
        try:
            from pyarrow import ArrowException
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise SalError(
                f"{printable(path)}: reading Parquet needs pyarrow, which is not installed; pip install "
                "'salcli[parquet]', or store the vectors as .npz"
            ) from None
        form, broken = "Parquet", (ArrowException, OSError, ValueError)
    try:
        if suffix in TABLES:
            with ParquetFile(path) as table:
                yield TableFile(path, table)
        elif suffix == ".npz":
            if not zipfile.is_zipfile(path):
                raise ValueError("it is not an .npz file, or only a part of one")
            with path.open("rb") as binary, np.load(binary) as arrays:
                yield ArrayFile(path, arrays.files, lambda name: _of_npz(path, arrays, name), is_set=is_set)
        else:
            files = {"x": path, **beside_npy(path)}
            yield ArrayFile(path, files, lambda name: _read_npy(files[name], mapped=name == "x"), is_set=is_set)
    except broken as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        layout = LAYOUTS[form] if is_set else ""
        raise SalError(f"{printable(path)} cannot be read as {form} ({reason}); {FIXES[form]}{layout}") from None


def _of_npz(path: Path, arrays: Any, name: str) -> NDArray[Any]:
    with _without_objects(path, f"the array `{name}`"):
        return np.asarray(arrays[name])


def _read_npy(path: Path, *, mapped: bool) -> NDArray[Any]:
    """Mapped, a file is read where it is used. One that claims more numbers than can be counted is an error."""
    with path.open("rb") as file:
        if file.read(len(NPY_MAGIC)) != NPY_MAGIC:
            raise ValueError(f"{printable(path.name)} is not a .npy file")
    with np.errstate(over="ignore"), _without_objects(path, "the array"):
        array: NDArray[Any] = np.load(path, mmap_mode="r" if mapped else None)
        return array


@contextmanager
def _without_objects(path: Path, what: str) -> Iterator[None]:
    """numpy would advise to unpickle an array of objects, which can run code."""
    try:
        yield
    except ValueError as error:
        if not any(words in str(error) for words in ("Object arrays", "Python objects")):
            raise
        raise SalError(
            f"{printable(path)}: {what} has values of mixed types (or Python objects, or rows of different lengths); "
            "store vectors as n × D numbers, and labels as integers or text"
        ) from None


def beside_npy(path: Path) -> dict[str, Path]:
    """The files that belong to a .npy file: STEM.labels.npy and STEM.ids.npy."""
    files = {what: path.with_name(f"{path.stem}.{what}.npy") for what in ("labels", "ids")}
    return {what: file for what, file in files.items() if file.is_file()}


# --- images in array files


def _are_images(arrays: Mapping[str, NDArray[Any]], columns: Columns) -> bool:
    if columns.vector:
        return False
    if "images" in arrays:
        return True
    if "x" in arrays:
        return arrays["x"].dtype == np.uint8 and arrays["x"].ndim in (3, 4)
    return not any(map(_is_wide, arrays.values()))


def _images(path: Path, arrays: Mapping[str, NDArray[Any]], *, labeled: bool) -> Samples:
    images, labels = (arrays.get(name, arrays.get(other)) for name, other in (("images", "x"), ("labels", "y")))
    if images is None:
        raise SalError(f"{path} holds neither images nor vectors, but {', '.join(arrays) or 'nothing'}; {NPZ_LAYOUT}")
    images = channels_first(path, images)
    marks = {IS_TEST: arrays[IS_TEST]} if IS_TEST in arrays else {}
    source = Samples(array=images, is_test=_is_test(path, marks, len(images)))
    if not labeled or labels is None:
        return source
    return numbered_labels(path, source, labels, arrays.get(CLASS_NAMES), "labels" if "labels" in arrays else "y")


# --- values


def as_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """The array itself, which may be a map of a file, where it is that already."""
    with np.errstate(over="ignore", invalid="ignore"):  # `unusable` finds these
        return array.astype(np.float32, copy=False)


def unusable(array: NDArray[np.float32]) -> NDArray[np.int64]:
    """The rows that hold a value that no score can be computed from."""
    return np.flatnonzero(~(np.abs(array) <= LARGEST_VALUE).all(axis=1))


def _source(
    path: Path,
    array: NDArray[np.float32],
    cells: Mapping[str, Cells],
    to_show: Mapping[str, Cells],
    called: Mapping[str, str],
    *,
    labeled: bool,
) -> Samples:
    """Check what was found in a file: vectors, and cells of labels, ids, split, is_test, class_names.

    `called`: what the file calls these.
    """
    n, n_dimensions = array.shape
    if n == 0:
        raise SalError(f"{path} holds no vectors; give a file with some")
    if n_dimensions not in DIMENSIONS:
        raise SalError(
            f"{path}: vectors must have from {DIMENSIONS[0]} to {DIMENSIONS[-1]:,} dimensions, got {n_dimensions:,}"
        )
    for name, column in {**cells, **to_show}.items():
        if name != CLASS_NAMES and (len(column) != n or np.ndim(column) != 1):
            raise SalError(
                f"{path}: there are {n} vectors, but `{called.get(name, name)}` is {shown(np.asarray(column))}; "
                "store one value for each vector"
            )
    row_ids = cell_texts(cells.get("ids"))
    no_id = [i for i, row_id in enumerate(row_ids) if not row_id]
    if no_id:
        raise SalError(f"{path}: {len(no_id):,} of {n:,} rows have no id (rows {some_of(no_id)}, counted from 0)")
    check_unique(path, row_ids)

    def rows(numbers: Sequence[int]) -> str:
        return some_of([row_ids[i] for i in numbers[:4]] if row_ids else numbers)

    _check_values(path, array, rows)
    source = Samples(
        array=array,
        is_test=_is_test(path, cells, n),
        row_ids=row_ids,
        shown={name: cell_texts(column) for name, column in to_show.items()},
    )
    if not labeled or "labels" not in cells:
        return source
    if CLASS_NAMES in cells:
        names = np.asarray(cells[CLASS_NAMES])
        return numbered_labels(path, source, np.asarray(cells["labels"]), names, called["labels"])
    labels, classes = numbered(_label_names(path, cells["labels"], rows))
    return replace(source, labels=labels, class_names=classes)


def _check_values(path: Path, array: NDArray[np.float32], rows: Callable[[Sequence[int]], str]) -> None:
    n, bad, all_equal = len(array), [], len(array) > 1
    step = max(1, BLOCK_VALUES // array.shape[1])
    for start in range(0, n, step):
        block = array[start : start + step]
        bad += (start + unusable(block)).tolist()
        all_equal = all_equal and bool((block == array[0]).all())
    if bad:
        raise SalError(
            f"{path}: {len(bad):,} of {n:,} vectors have values that are NaN, infinite or above {LARGEST_VALUE:g} "
            f"(rows {rows(bad)}); fix or remove them"
        )
    if all_equal:
        raise SalError(f"{path}: all {n:,} vectors are equal; a set needs different ones")


def _is_test(path: Path, cells: Mapping[str, Cells], n: int) -> NDArray[np.bool_] | None:
    if IS_TEST in cells:
        is_test = np.asarray(cells[IS_TEST])
        if is_test.shape != (n,) or is_test.dtype != np.bool_:
            raise SalError(f"{path}: `is_test` must be {n} booleans, got {shown(is_test)}")
        return is_test
    return None if SPLIT not in cells else for_testing(path, cell_texts(cells[SPLIT]))


def for_testing(path: Path, parts: Sequence[str]) -> NDArray[np.bool_]:
    """Of a column that holds train or test."""
    odd = sorted(set(parts) - set(PARTS))
    if odd:
        raise SalError(f"{path}: the column split must hold train or test, got {odd[0]!r}")
    return np.array([PARTS[part] for part in parts])


def cell_texts(cells: Cells | None) -> tuple[str, ...]:
    """Cells as text; a missing one is empty."""
    values = [] if cells is None else cells.tolist() if isinstance(cells, np.ndarray) else cells
    return tuple(_text(value) for value in values)


def _text(value: Any) -> str:
    if value is None or value != value:  # NaN
        return ""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _label_names(path: Path, labels: Cells, rows: Callable[[Sequence[int]], str]) -> list[str]:
    """Integers or text, in every row."""
    values = labels.tolist() if isinstance(labels, np.ndarray) else labels
    missing = [i for i, value in enumerate(values) if not _text(value).strip()]
    if missing:
        raise SalError(
            f"{path}: {len(missing):,} of {len(values):,} rows have no label (rows {rows(missing)}); "
            "label them, or leave them out"
        )
    names = []
    for value in values:
        if isinstance(value, float) and not value.is_integer():
            raise SalError(f"{path}: labels must be integers or text, got {value!r}; name the column of the classes")
        if isinstance(value, int | float) and value < 0:
            raise SalError(f"{path}: labels must not be negative, got {min(values)}; leave unlabeled vectors out")
        # a table with gaps may have stored integers as floats
        names.append(_text(int(value) if isinstance(value, float) else value).strip())
    return names
