"""Vectors for a detector: arrays and tensors in memory, or the rows of files, block by block."""

from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from salcli.data.folders import SUFFIXES
from salcli.data.sets import LARGEST_VALUE, shown, some_of
from salcli.data.vectors import (
    ANY,
    ARRAYS,
    BLOCK_VALUES,
    NUMBERS,
    SPLIT,
    TABLES,
    ArrayFile,
    Columns,
    TableFile,
    as_float32,
    beside_npy,
    cell_texts,
    check_columns,
    column_names,
    opened,
    several,
    unusable,
)
from salcli.detector.images import Decoded
from salcli.errors import SalError, printable

MOST_ROWS = 4096  # read at once
TRAINED = "of the training data; name others with --vector"
NOT_FINITE = f"NaN, infinite, or above {LARGEST_VALUE:g}"


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
            raise SalError(f"{self.described}, not images")
        try:
            array = np.asarray(samples)
        except (TypeError, ValueError):  # rows of different lengths
            raise SalError(f"{self.described}, as one array (n, D)") from None
        array = array.reshape(-1, self.dimensions) if array.size == 0 else np.atleast_2d(array)
        if array.ndim != 2 or array.dtype.kind not in NUMBERS:
            raise SalError(f"{self.described}, as one array (n, D) of numbers; got {shown(array)}")
        self._check(array.shape[1], "the array")
        converted = as_float32(array)
        bad = unusable(converted)
        if len(bad):
            raise SalError(
                f"{len(bad):,} of {len(array):,} vectors hold values that are {NOT_FINITE} "
                f"(rows {some_of(bad.tolist())}, counted from 0); leave them out"
            )
        return np.require(converted, requirements=["C", "W"])  # copies only what torch would warn about

    def check_file(self, path: Path) -> None:
        """Images, and what is no file of vectors, would fail later with a less helpful message."""
        if path.suffix.lower() in SUFFIXES:
            raise SalError(f"{printable(path)} is an image, but {self.described}")
        if path.suffix.lower() not in self.suffixes:
            raise SalError(f"{printable(path)} is no {', '.join(self.suffixes)} file, but {self.described}")

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
        n_rows = max(1, min(MOST_ROWS, BLOCK_VALUES // self.dimensions))
        for path in files:
            n, prefix = 0, f"{path}:" if len(files) > 1 else ""
            with opened(path) as file:
                vector, row_id = self._columns_in(file, asked)
                for rows in file.blocks(vector, several(row_id), n_rows, self.dimensions):
                    n_dimensions = [rows.array.shape[1]] if rows.lengths is None else rows.lengths[rows.lengths > 0]
                    if len(n_dimensions) and self.dimensions not in n_dimensions:
                        self._check(n_dimensions[0], printable(path))
                    array = as_float32(rows.array)
                    failed = {int(i): self._reason(i, rows.lengths) for i in unusable(array)}
                    good = np.setdiff1d(np.arange(len(array)), [*failed])
                    row_ids = cell_texts(rows.cells[row_id]) if row_id else ()
                    names = row_ids or tuple(f"{prefix}{row}" for row in range(n, n + len(array)))
                    yield Decoded(names, np.ascontiguousarray(array[good]), failed)
                    n += len(array)
            if n == 0:
                raise SalError(f"{printable(path)} holds no vectors; leave it out")

    def _check(self, n_dimensions: int, where: str) -> None:
        if n_dimensions != self.dimensions:
            raise SalError(
                f"{where} holds vectors of {n_dimensions:,} dimensions, but {self.described}; "
                "give vectors from the encoder of its training data"
            )

    def _reason(self, row: int, lengths: NDArray[np.int64] | None) -> str:
        """Why a row cannot be used."""
        if lengths is None or lengths[row] == self.dimensions:
            return f"it holds values that are {NOT_FINITE}"
        return f"it has {lengths[row]:,} dimensions, not {self.dimensions:,}" if lengths[row] else "it is missing"

    def _columns_in(self, file: ArrayFile | TableFile, asked: Columns) -> tuple[tuple[str, ...], str | None]:
        """The columns of the vectors and of the ids: as asked for, else as in the training data, else found.

        One array or one column of lists may have another name here, but none of several columns may be missing.
        """
        path, there, trained = file.path, file.names, self.columns
        columns = ANY
        if path.suffix.lower() != ".npy":  # it has no columns that could be named
            vector = asked.vector or (trained.vector if {*several(trained.vector)} & {*there} else None)
            check_columns(path, several(vector), there, "--vector" if asked.vector else TRAINED)
            check_columns(path, several(asked.row_id), there, "--row-id")
            row_id = asked.row_id or (trained.row_id if trained.row_id in there else None)
            show = tuple(name for name in trained.show if name in there)
            columns = replace(trained, vector=vector, row_id=row_id, show=show)
        label, row_id = column_names(path, there, columns)
        found = file.vector_columns(columns, {name for name in (label, row_id, SPLIT, *columns.show) if name})
        if isinstance(file, TableFile) and not columns.vector and found[0] not in file.lists:
            check_columns(path, several(trained.vector), there, TRAINED)  # these are other columns of numbers
        return found, row_id
