"""Gradient matrices on disk, in factored form: residual (n×K) and feature (n×D)."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from salcli.artifacts.hdf5 import Stored, about, creating, reading
from salcli.errors import BadArtifactError
from salcli.sal.gradients import Factors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import h5py

    from salcli.artifacts.layout import Found

KIND = "gradients"
CHUNK_BYTES = 2**23  # of factors that are in memory at a time


class GradientWriter:
    """Fills a gradient file batch by batch."""

    def __init__(self, file: h5py.File, n_samples: int, n_classes: int, n_features: int) -> None:
        self._file = file
        self._filled = 0
        file.create_dataset("residual", (n_samples, n_classes), np.float32)
        file.create_dataset("feature", (n_samples, n_features), np.float32)
        for name in ("label", "predicted", "index"):
            file.create_dataset(name, (n_samples,), np.int64)

    def append(self, factors: Factors, predicted: Tensor, index: np.ndarray) -> None:
        """Add samples: their gradients, the class the network predicts, and where they come from."""
        rows = slice(self._filled, self._filled + len(factors))
        self._file["residual"][rows] = factors.residual.numpy()
        self._file["feature"][rows] = factors.feature.numpy()
        self._file["label"][rows] = factors.label.numpy()
        self._file["predicted"][rows] = predicted.numpy()
        self._file["index"][rows] = index
        self._filled += len(factors)


@contextmanager
def writing_gradients(
    path: Path, n_samples: int, n_classes: int, n_features: int, network: str, made_with: Mapping[str, Any]
) -> Iterator[GradientWriter]:
    """A new gradient file; `network` is the fingerprint of the network that gives the gradients."""
    with creating(path, KIND, {"network": network, **made_with}) as file:
        yield GradientWriter(file, n_samples, n_classes, n_features)


@dataclass(frozen=True)
class GradientFile:
    """A source of gradients that streams from disk (see FactorSource)."""

    found: Found
    about: dict[str, Any]
    network: str  # fingerprint of the network that gave the gradients
    n_classes: int
    n_features: int
    predicted: Tensor
    stored_label: Tensor
    label_override: Tensor | None = None
    only_predicted_row: bool = False
    rows: Tensor | None = None  # the rows that belong to this source, rising; all where None

    @classmethod
    def open(cls, found: Found) -> GradientFile:
        """Check the file and read all but the factors."""
        with reading(found, KIND) as file:
            return cls(
                found=found,
                about=about(file),
                network=about(file)["network"],
                n_classes=file["residual"].shape[1],
                n_features=file["feature"].shape[1],
                predicted=torch.from_numpy(file["predicted"][:]),
                stored_label=torch.from_numpy(file["label"][:]),
            )

    @property
    def wild(self) -> str:
        """The fingerprint of the wild mixture that the gradients belong to."""
        if "wild" not in self.about:
            raise BadArtifactError(f"{self.found.path} holds no gradients of wild data; {self.found.cure}")
        return str(self.about["wild"])

    @cached_property
    def label(self) -> Tensor:
        """The labels in use, of this source's rows."""
        label = self._all_labels
        return label if self.rows is None else label[self.rows]

    @property
    def _all_labels(self) -> Tensor:
        return self.stored_label if self.label_override is None else self.label_override

    def __len__(self) -> int:
        return len(self.stored_label) if self.rows is None else len(self.rows)

    def relabelled(self, label: Tensor) -> GradientFile:
        """The same samples with gradients taken for other labels."""
        return replace(self, label_override=label)

    def predicted_row(self) -> GradientFile:
        """Only the label's own row of each gradient."""
        return replace(self, only_predicted_row=True)

    def of_class(self, k: int) -> GradientFile | Factors:
        """The samples whose label is k: read once and for all if they are few enough, as they are in most data."""
        of_class = torch.nonzero(self.label == k).flatten()
        rows = of_class if self.rows is None else self.rows[of_class]
        return self._read(rows) if 0 < len(rows) <= self._rows_per_chunk else replace(self, rows=rows)

    def between(self, rows: slice) -> GradientFile:
        """Neighbouring samples."""
        return replace(self, rows=(torch.arange(len(self)) if self.rows is None else self.rows)[rows])

    def chunks(self) -> Iterator[Factors]:
        """Some rows at a time; what is no row of ours is not read."""
        for start in range(0, len(self), self._rows_per_chunk):
            piece = slice(start, min(start + self._rows_per_chunk, len(self)))
            yield self._read(piece if self.rows is None else self.rows[piece])

    def dense(self, rows: slice) -> Tensor:
        """Dense gradients (rows × K·D) of a slice of the file."""
        return self._read(rows).dense()

    @cached_property
    def _columns(self) -> tuple[Stored, Stored]:
        """Where both factors lie."""
        with reading(self.found, KIND) as file:
            return Stored.of(self.found.path, file["residual"]), Stored.of(self.found.path, file["feature"])

    @property
    def _rows_per_chunk(self) -> int:
        return max(1, CHUNK_BYTES // (4 * (self.n_classes + self.n_features)))

    def _read(self, rows: slice | Tensor) -> Factors:
        chosen = rows.numpy() if isinstance(rows, Tensor) else rows
        # maps of the file, so that only these rows are read; new ones each time, or all that was ever read would count
        # as memory of this process
        residual, feature = (torch.from_numpy(np.array(column.open()[chosen])) for column in self._columns)
        factors = Factors(residual, feature, self.stored_label[rows])
        if self.label_override is not None:
            factors = factors.relabelled(self.label_override[rows])
        return factors.predicted_row() if self.only_predicted_row else factors
