"""Vectors that users bring, such as embeddings: .npz, .npy and Parquet files, as float32 rows with labels and ids."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from salcli.data.readers import UNREADABLE, channels_first, numbered_labels
from salcli.data.samples import LARGEST_VALUE, Source, check_unique, numbered, shown, some_of
from salcli.errors import DataError, did_you_mean

ARRAYS, TABLES = (".npz", ".npy"), (".parquet", ".pq")
DIMENSIONS = range(2, 16_384 + 1)
# Names by which columns are found where params.yaml names none
LABEL_NAMES = ("label", "labels", "class", "y", "target", "category")
ID_NAMES = ("id", "ids", "row_id", "uid", "key")
SPLIT, IS_TEST, CLASS_NAMES = "split", "is_test", "class_names"
PARTS = {"train": False, "test": True}  # of an official split
NUMBERS = "fiu"  # kinds of dtype
BLOCK_VALUES = 1 << 22


@dataclass(frozen=True)
class Columns:
    """Which columns of a table, or arrays of an .npz file, hold what. None: found by name and type."""

    vector: str | tuple[str, ...] | None = None  # one column of lists, or several of numbers
    label: str | None = None
    row_id: str | None = None
    show: tuple[str, ...] = ()


ANY = Columns()


Cells = NDArray[Any] | list[Any]


def read_vectors(path: Path, *, labeled: bool, columns: Columns = ANY) -> Source:
    """A .npy or Parquet file. Images in a .npy file are read as well."""
    if path.suffix.lower() in TABLES:
        return _parquet(path, columns, labeled=labeled)
    try:
        array = mapped(path)
        beside = {what: np.load(file) for what, file in beside_npy(path).items()}
    except UNREADABLE as error:
        raise DataError(f"{path} cannot be read as .npy ({error}); it should hold n × D numbers") from None
    if array.dtype == np.uint8 and array.ndim in (3, 4):
        images = Source(array=channels_first(path, array))
        return numbered_labels(path, images, beside["labels"], None) if labeled and "labels" in beside else images
    to_show = {name: [""] * len(array) for name in columns.show}
    return _source(path, _converted(path, array), beside, to_show, labeled=labeled)


def mapped(path: Path) -> NDArray[Any]:
    """A .npy file, which is read where it is used. One that claims more numbers than can be counted is an error."""
    with np.errstate(over="ignore"):
        array: NDArray[Any] = np.load(path, mmap_mode="r")
        return array


def beside_npy(path: Path) -> dict[str, Path]:
    """The files that belong to a .npy file: STEM.labels.npy and STEM.ids.npy."""
    files = {what: path.with_name(f"{path.stem}.{what}.npy") for what in ("labels", "ids")}
    return {what: file for what, file in files.items() if file.is_file()}


def is_vector_arrays(arrays: Mapping[str, NDArray[Any]], columns: Columns) -> bool:
    """Whether an .npz file holds vectors rather than images."""
    if columns.vector:
        return True
    if "images" in arrays:
        return False
    if "x" in arrays:
        return not (arrays["x"].dtype == np.uint8 and arrays["x"].ndim in (3, 4))
    return any(array.ndim == 2 and array.dtype.kind in NUMBERS for array in arrays.values())


def from_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], *, labeled: bool, columns: Columns = ANY) -> Source:
    """The vectors of an .npz file."""
    label, row_id = column_names(path, arrays, columns, labeled=labeled)
    if columns.vector is None:
        wide = [name for name, one in arrays.items() if one.ndim == 2 and one.dtype.kind in NUMBERS and name != label]
        if "x" not in arrays and len(wide) != 1:
            raise DataError(
                f"{path}: which array holds the vectors, {' or '.join(wide)}? Call it `x`, or name it with "
                "data.columns.vector"
            )
        vector: tuple[str, ...] = ("x" if "x" in arrays else wide[0],)
    else:
        vector = (columns.vector,) if isinstance(columns.vector, str) else columns.vector
    array = arrays[vector[0]] if len(vector) == 1 else np.stack([arrays[name] for name in vector], axis=1)
    sources = {"labels": label, "ids": row_id, **{name: name for name in (SPLIT, IS_TEST, CLASS_NAMES)}}
    cells = {what: arrays[name] for what, name in sources.items() if name and name in arrays}
    to_show = {name: arrays[name] for name in columns.show}
    source = _source(path, _converted(path, array), cells, to_show, labeled=labeled)
    return replace(source, columns=_described(vector, label if labeled else None, row_id))


def _described(vector: tuple[str, ...], label: str | None, row_id: str | None) -> str:
    named = vector[0] if len(vector) == 1 else f"{vector[0]} … {vector[-1]} ({len(vector)})"
    others = {"label": label, "id": row_id}
    return ", ".join([f"vector {named}", *(f"{what} {name}" for what, name in others.items() if name)])


def column_names(
    path: Path, there: Collection[str], columns: Columns, *, labeled: bool = False
) -> tuple[str | None, str | None]:
    """The names of label and id, after a check that all columns of params.yaml are there."""
    vector = (columns.vector,) if isinstance(columns.vector, str) else columns.vector or ()
    label_too = (columns.label,) if columns.label and labeled else ()
    named = {
        "vector": vector,
        "label": label_too,
        "id": (columns.row_id,) if columns.row_id else (),
        "show": columns.show,
    }
    for key, names in named.items():
        for name in names:
            if name not in there:
                raise DataError(
                    f"{path} has no column {name}{did_you_mean(name, there)}; it has {some_of([*there], 12)} "
                    f"(data.columns.{key})"
                )
    lower = {name.lower(): name for name in there if name not in vector}
    found = [next((lower[name] for name in names if name in lower), None) for names in (LABEL_NAMES, ID_NAMES)]
    return columns.label if columns.label in there else found[0], columns.row_id or found[1]


# --- values


def _converted(path: Path, array: NDArray[Any]) -> NDArray[np.float32]:
    """All rows as float32: the array itself, which may be a map of a file, where it is that already."""
    if array.ndim != 2 or array.dtype.kind not in NUMBERS:
        raise DataError(f"{path}: vectors must be n × D numbers (float16, float32, float64 or int), got {shown(array)}")
    with np.errstate(over="ignore", invalid="ignore"):  # `_check_values` finds these
        return array.astype(np.float32, copy=False)


def _source(
    path: Path, array: NDArray[np.float32], cells: Mapping[str, Cells], to_show: Mapping[str, Cells], *, labeled: bool
) -> Source:
    """Check what was found in a file: vectors, and cells of labels, ids, split, is_test, class_names."""
    n, n_dimensions = array.shape
    if n == 0:
        raise DataError(f"{path} holds no vectors; give a file with some")
    if n_dimensions not in DIMENSIONS:
        raise DataError(
            f"{path}: vectors must have from {DIMENSIONS[0]} to {DIMENSIONS[-1]:,} dimensions, got {n_dimensions:,}"
        )
    for name, column in {**cells, **to_show}.items():
        if name != CLASS_NAMES and (len(column) != n or np.ndim(column) != 1):
            raise DataError(f"{path}: there are {n} vectors, but `{name}` is {shown(np.asarray(column))}")
    row_ids = cell_texts(cells.get("ids"))
    no_id = [i for i, row_id in enumerate(row_ids) if not row_id]
    if no_id:
        raise DataError(f"{path}: {len(no_id):,} of {n:,} rows have no id (rows {some_of(no_id)}, counted from 0)")
    check_unique(path, row_ids)

    def rows(numbers: Sequence[int]) -> str:
        return some_of([row_ids[i] for i in numbers[:4]] if row_ids else numbers)

    _check_values(path, array, rows)
    source = Source(
        array=array,
        is_test=_is_test(path, cells),
        row_ids=row_ids,
        shown={name: cell_texts(column) for name, column in to_show.items()},
    )
    if not labeled or "labels" not in cells:
        return source
    if CLASS_NAMES in cells:
        return numbered_labels(path, source, np.asarray(cells["labels"]), np.asarray(cells[CLASS_NAMES]))
    labels, classes = numbered(_label_names(path, cells["labels"], rows))
    return replace(source, labels=labels, class_names=classes)


def _check_values(path: Path, array: NDArray[np.float32], rows: Callable[[Sequence[int]], str]) -> None:
    n, bad, all_equal = len(array), [], len(array) > 1
    step = max(1, BLOCK_VALUES // array.shape[1])
    for start in range(0, n, step):
        block = array[start : start + step]
        bad += [start + int(i) for i in np.flatnonzero(~(np.abs(block) <= LARGEST_VALUE).all(axis=1))]
        all_equal = all_equal and bool((block == array[0]).all())
    if bad:
        raise DataError(
            f"{path}: {len(bad):,} of {n:,} vectors have values that are NaN, infinite or above {LARGEST_VALUE:g} "
            f"(rows {rows(bad)}); fix or remove them"
        )
    if all_equal:
        raise DataError(f"{path}: all {n:,} vectors are equal; a set needs different ones")


def _is_test(path: Path, cells: Mapping[str, Cells]) -> NDArray[np.bool_] | None:
    if IS_TEST in cells:
        is_test = np.asarray(cells[IS_TEST])
        if is_test.dtype != np.bool_:
            raise DataError(f"{path}: `is_test` must be {len(is_test)} booleans, got {shown(is_test)}")
        return is_test
    return None if SPLIT not in cells else for_testing(path, cell_texts(cells[SPLIT]))


def for_testing(path: Path, parts: Sequence[str]) -> NDArray[np.bool_]:
    """Of a column that holds train or test."""
    odd = sorted(set(parts) - set(PARTS))
    if odd:
        raise DataError(f"{path}: the column split must hold train or test, got {odd[0]!r}")
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
        raise DataError(
            f"{path}: {len(missing):,} of {len(values):,} rows have no label (rows {rows(missing)}); "
            "label them, or leave them out"
        )
    names = []
    for value in values:
        if isinstance(value, float) and not value.is_integer():
            raise DataError(f"{path}: labels must be integers or text, got {value!r}; name the column of the classes")
        if isinstance(value, int | float) and value < 0:
            raise DataError(f"{path}: labels must not be negative, got {min(values)}; leave unlabeled vectors out")
        # a table with gaps may have stored integers as floats
        names.append(_text(int(value) if isinstance(value, float) else value).strip())
    return names


# --- Parquet


def _parquet(path: Path, columns: Columns, *, labeled: bool) -> Source:
    try:
        from pyarrow import ArrowException, types
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(
            f"{path}: reading Parquet needs pyarrow, which is not installed; pip install 'salcli[parquet]', or store "
            "the vectors as .npz"
        ) from None
    try:
        with ParquetFile(path) as file:
            schema = file.schema_arrow
            label, row_id = column_names(path, schema.names, columns, labeled=labeled)
            other = {name for name in (label, row_id, *columns.show, SPLIT) if name and name in schema.names}
            vector = vector_columns(path, schema, types, columns, other)
            cells: dict[str, list[Any]] = {name: [] for name in other}
            array = np.empty((0, 2), np.float32)
            for start, block, batch in _batches(path, file, vector, sorted(other - {*vector})):
                if start == 0:
                    array = np.empty((file.metadata.num_rows, block.shape[1]), np.float32)
                array[start : start + len(block)] = _converted(path, block)
                for name in cells:
                    cells[name] += batch.column(name).to_pylist()
    except (ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as Parquet ({str(error).splitlines()[0]})") from None
    found = {what: cells[name] for what, name in (("labels", label), ("ids", row_id), (SPLIT, SPLIT)) if name in cells}
    to_show = {name: cells[name] for name in columns.show}
    source = _source(path, array, found, to_show, labeled=labeled)
    return replace(source, columns=_described(vector, label if labeled else None, row_id))


def vector_columns(path: Path, schema: Any, types: Any, columns: Columns, other: set[str]) -> tuple[str, ...]:
    """The columns that make up the vectors."""

    def is_number(kind: Any) -> bool:
        return bool(types.is_integer(kind) or types.is_floating(kind))

    def is_vector(kind: Any) -> bool:
        is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        return bool(is_list and is_number(kind.value_type))

    kinds = {name: schema.field(name).type for name in schema.names}
    if isinstance(columns.vector, tuple):
        wrong = [name for name in columns.vector if not is_number(kinds[name])]
        if wrong:
            raise DataError(
                f"{path}: column {wrong[0]} of data.columns.vector must hold numbers, got {kinds[wrong[0]]}"
            )
        return columns.vector
    if columns.vector:
        kind = kinds[columns.vector]
        if not is_vector(kind):
            raise DataError(f"{path}: column {columns.vector} must hold lists of numbers, got {kind}")
        return (columns.vector,)
    lists = [name for name, kind in kinds.items() if is_vector(kind) and name not in other]
    numbers = [name for name, kind in kinds.items() if is_number(kind) and name not in other]
    if len(lists) > 1:
        raise DataError(
            f"{path}: which column holds the vectors, {' or '.join(lists)}? Name it with --vector, or in "
            "data.columns.vector"
        )
    if not (lists or numbers):
        raise DataError(f"{path} has neither a column of lists of numbers nor columns of numbers ({some_of([*kinds])})")
    return tuple(lists or sorted(numbers))  # the same vectors whatever the order in the file


def _batches(path: Path, file: Any, vector: tuple[str, ...], other: list[str]) -> Iterator[tuple[int, Any, Any]]:
    """The number of the first row, the vectors as an array, and the record batch."""
    is_lists = len(vector) == 1 and hasattr(file.schema_arrow.field(vector[0]).type, "value_type")
    n_dimensions, start = 0 if is_lists else len(vector), 0
    for batch in file.iter_batches(batch_size=1024, columns=[*vector, *other]):
        if is_lists:
            lists = batch.column(vector[0])
            lengths = list_lengths(lists)
            n_dimensions = n_dimensions or int(lengths[0])
            odd = np.flatnonzero(lengths != n_dimensions)
            if len(odd):
                raise DataError(
                    f"{path}: all vectors must have the same dimension, but row {start + odd[0]} (counted from 0) has "
                    f"{lengths[odd[0]]}, and those before it have {n_dimensions}"
                )
            block = lists.flatten().to_numpy(zero_copy_only=False).reshape(len(batch), n_dimensions)
        else:
            block = np.stack([batch.column(name).to_numpy(zero_copy_only=False) for name in vector], axis=1)
        yield start, block, batch
        start += len(batch)


def list_lengths(lists: Any) -> NDArray[np.int64]:
    """Of each list; 0 where it is missing."""
    from pyarrow.compute import fill_null, list_value_length

    lengths: NDArray[np.int64] = fill_null(list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int64)
