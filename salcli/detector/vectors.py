"""Vectors for a detector: arrays and tensors in memory, or the rows of files, block by block."""

from collections.abc import Collection, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from salcli.data.folders import SUFFIXES
from salcli.data.readers import UNREADABLE
from salcli.data.samples import LARGEST_VALUE, shown, some_of
from salcli.data.vectors import (
    ANY,
    ARRAYS,
    BLOCK_VALUES,
    NUMBERS,
    SPLIT,
    TABLES,
    Columns,
    beside_npy,
    cell_texts,
    column_names,
    list_lengths,
    mapped,
    vector_columns,
)
from salcli.detector.images import Decoded
from salcli.errors import DataError, did_you_mean, printable

MOST_ROWS = 4096  # read at once
TRAINED = "of the training data; name others with --vector"
NOT_FINITE = f"NaN, infinite, or above {LARGEST_VALUE:g}"

# Some rows, their ids if they have any, and which of them have no vector, with the reason
VectorBlock = tuple[NDArray[Any], tuple[str, ...], dict[int, str]]


@dataclass(frozen=True)
class VectorFormat:
    """How many dimensions the vectors have, and the columns in which the training data had them."""

    kind: ClassVar[str] = "vectors"
    name_column: ClassVar[str] = "id"  # of predictions
    dtype: ClassVar[str] = "float32"
    suffixes: ClassVar[tuple[str, ...]] = (*ARRAYS, *TABLES)

    dimensions: int
    columns: Columns = ANY

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return (self.dimensions,)

    @property
    def described(self) -> str:
        """For messages."""
        return f"this detector takes vectors of {self.dimensions:,} dimensions"

    def as_array(self, samples: Any) -> NDArray[np.float32]:
        """Vectors in memory as one array (n, D); a row that cannot be used is an error."""
        if isinstance(samples, torch.Tensor):
            samples = samples.detach().cpu().numpy()
        first = samples[0] if isinstance(samples, list | tuple) and samples else samples
        if isinstance(first, Image.Image):
            raise DataError(f"{self.described}, not images")
        try:
            array = np.asarray(samples)
        except (TypeError, ValueError):  # rows of different lengths
            raise DataError(f"{self.described}, as one array (n, D)") from None
        array = array.reshape(-1, self.dimensions) if array.size == 0 else np.atleast_2d(array)
        if array.ndim != 2 or array.dtype.kind not in NUMBERS:
            raise DataError(f"{self.described}, as one array (n, D) of numbers; got {shown(array)}")
        self._check(array.shape[1], "the array")
        converted, bad = _float32(array)
        if len(bad):
            raise DataError(
                f"{len(bad):,} of {len(array):,} vectors hold values that are {NOT_FINITE} "
                f"(rows {some_of(bad.tolist())}, counted from 0); leave them out"
            )
        return np.require(converted, requirements=["C", "W"])  # copies only what torch would warn about

    def check_file(self, path: Path) -> None:
        """Images, and what is no file of vectors, would fail later with a less helpful message."""
        if path.suffix.lower() in SUFFIXES:
            raise DataError(f"{printable(path)} is an image, but {self.described}")
        if path.suffix.lower() not in self.suffixes:
            raise DataError(f"{printable(path)} is no {', '.join(self.suffixes)} file, but {self.described}")

    def fitting(self, files: Iterable[Path]) -> list[Path]:
        """Files of vectors, without the labels and ids that lie beside a .npy file."""
        vectors = [path for path in files if path.suffix.lower() in self.suffixes]
        beside = {other for path in vectors if path.suffix.lower() == ".npy" for other in beside_npy(path).values()}
        return [path for path in vectors if path not in beside]

    def read(self, files: tuple[Path, ...], batch_size: int, asked: Columns = ANY) -> Generator[Decoded]:
        """All rows in order. One that cannot be used does not stop the rest.

        Rows without an id are named by their number, counted from 0, after the file if there are several. `asked` are
        the columns to read; else those that the training data had, else those that are found by name and type.
        """
        for path in files:
            n, prefix = 0, f"{path}:" if len(files) > 1 else ""
            for array, row_ids, missing in self._blocks(path, asked):
                converted, bad = _float32(array)
                failed = {int(i): f"it holds values that are {NOT_FINITE}" for i in bad} | missing
                good = np.setdiff1d(np.arange(len(array)), [*failed])
                names = row_ids or tuple(f"{prefix}{row}" for row in range(n, n + len(array)))
                yield Decoded(names, np.ascontiguousarray(converted[good]), failed)
                n += len(array)
            if n == 0:
                raise DataError(f"{printable(path)} holds no vectors; leave it out")

    def _check(self, n_dimensions: int, where: str) -> None:
        if n_dimensions != self.dimensions:
            raise DataError(
                f"{where} holds vectors of {n_dimensions:,} dimensions, but {self.described}; "
                "give vectors from the encoder of its training data"
            )

    def _blocks(self, path: Path, asked: Columns) -> Iterator[VectorBlock]:
        if path.suffix.lower() in TABLES:
            yield from self._of_table(path, asked)
            return
        try:
            array, row_ids = self._of_npz(path, asked) if path.suffix.lower() == ".npz" else _of_npy(path)
        except UNREADABLE as error:
            raise DataError(f"{printable(path)} cannot be read as {path.suffix} ({error})") from None
        if array.ndim != 2 or array.dtype.kind not in NUMBERS:
            raise DataError(f"{printable(path)}: vectors must be n × D numbers, got {shown(array)}")
        self._check(array.shape[1], printable(path))
        if row_ids and len(row_ids) != len(array):
            raise DataError(f"{printable(path)}: there are {len(array):,} vectors, but {len(row_ids):,} ids")
        step = _rows_at_once(self.dimensions)
        for start in range(0, len(array), step):
            yield np.asarray(array[start : start + step]), row_ids[start : start + step], {}

    def _of_npz(self, path: Path, asked: Columns) -> tuple[NDArray[Any], tuple[str, ...]]:
        """A compressed array can only be read as a whole. Nothing in it is unpickled."""
        with path.open("rb") as opened, np.load(opened) as file:
            columns = self._columns(path, file.files, asked)
            _, row_id = column_names(path, file.files, columns)
            row_ids = cell_texts(file[row_id]) if row_id else ()
            if isinstance(columns.vector, tuple):
                return np.stack([file[name] for name in columns.vector], axis=1), row_ids
            if columns.vector or "x" in file.files:
                return file[columns.vector or "x"], row_ids
            wide = {name: array for name, array in file.items() if array.ndim == 2 and array.dtype.kind in NUMBERS}
            if len(wide) != 1:
                which = " or ".join(wide) or some_of(file.files)
                raise DataError(f"{printable(path)}: which array holds the vectors, {which}? Name it with --vector")
            return next(iter(wide.values())), row_ids

    def _of_table(self, path: Path, asked: Columns) -> Iterator[VectorBlock]:
        try:
            from pyarrow import ArrowException, types
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise DataError(
                f"{printable(path)}: reading Parquet needs pyarrow, which is not installed; pip install "
                "'salcli[parquet]', or store the vectors as .npz"
            ) from None
        try:
            with ParquetFile(path) as file:
                schema = file.schema_arrow
                columns = self._columns(path, schema.names, asked)
                label, row_id = column_names(path, schema.names, columns)
                other = {name for name in (label, row_id, SPLIT, *columns.show) if name}
                vector = vector_columns(path, schema, types, columns, other)
                is_lists = hasattr(schema.field(vector[0]).type, "value_type")
                if not is_lists:
                    if columns.vector is None:  # other columns of numbers than those of the training data
                        check_columns(path, _several(self.columns.vector), schema.names, TRAINED)
                    self._check(len(vector), printable(path))
                read = {*vector, *([row_id] if row_id else ())}
                for batch in file.iter_batches(_rows_at_once(self.dimensions), columns=sorted(read)):
                    row_ids = cell_texts(batch.column(row_id).to_pylist()) if row_id else ()
                    if is_lists:
                        array, missing = self._of_lists(path, batch.column(vector[0]))
                        yield array, row_ids, missing
                    else:
                        cells = [batch.column(name).to_numpy(zero_copy_only=False) for name in vector]
                        yield np.stack(cells, axis=1), row_ids, {}
        except (ArrowException, OSError, ValueError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(f"{printable(path)} cannot be read as Parquet ({reason})") from None

    def _of_lists(self, path: Path, lists: Any) -> tuple[NDArray[Any], dict[int, str]]:
        """A column of lists as an array, with NaN where there is no vector of this dimension."""
        lengths = list_lengths(lists)
        fits = lengths == self.dimensions
        if not fits.any() and lengths.any():
            self._check(int(lengths[lengths > 0][0]), printable(path))
        values = lists.filter(fits).flatten().to_numpy(zero_copy_only=False)
        array = np.full((len(lists), self.dimensions), np.nan, np.result_type(values.dtype, np.float32))
        array[fits] = values.reshape(-1, self.dimensions)
        return array, {
            int(i): f"it has {lengths[i]:,} dimensions, not {self.dimensions:,}" if lengths[i] else "it is missing"
            for i in np.flatnonzero(~fits)
        }

    def _columns(self, path: Path, there: Collection[str], asked: Columns) -> Columns:
        """As asked for; else as in the training data; what is None will be found by name and type.

        One array or one column of lists may have another name here, but none of several columns may be missing.
        """
        trained, vector = self.columns, asked.vector
        if vector is None and any(name in there for name in _several(trained.vector)):
            vector = trained.vector
        check_columns(path, _several(vector), there, "--vector" if asked.vector else TRAINED)
        check_columns(path, _several(asked.row_id), there, "--row-id")
        row_id = asked.row_id or (trained.row_id if trained.row_id in there else None)
        return replace(
            trained, vector=vector, row_id=row_id, show=tuple(name for name in trained.show if name in there)
        )


def _several(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names or ()


def check_columns(path: Path, names: tuple[str, ...], there: Collection[str], option: str) -> None:
    for name in names:
        if name not in there:
            nearest = did_you_mean(name, there)
            raise DataError(
                f"{printable(path)} has no column {name}{nearest}; it has {some_of([*there], 12)} ({option})"
            )


def _of_npy(path: Path) -> tuple[NDArray[Any], tuple[str, ...]]:
    array, beside = mapped(path), beside_npy(path)
    return array, cell_texts(np.load(beside["ids"])) if "ids" in beside else ()


def _rows_at_once(n_dimensions: int) -> int:
    return max(1, min(MOST_ROWS, BLOCK_VALUES // n_dimensions))


def _float32(array: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The array, and its rows that hold a value that no score can be computed from."""
    with np.errstate(over="ignore", invalid="ignore"):
        converted = array.astype(np.float32, copy=False)
    return converted, np.flatnonzero(~(np.abs(converted) <= LARGEST_VALUE).all(axis=1))
