"""Batches of samples on the device: rows of memory-mapped arrays, with labels, from one or more sources."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_convert

from salcli.engine.augmentation import Augmentation
from salcli.engine.device import Compute
from salcli.errors import BadArtifactError, SalError

# Rows up to this size are copied to the device once and stay there; larger ones are read by worker processes.
RESIDENT_BYTES = 2 << 30
N_WORKERS = min(8, os.cpu_count() or 1)
SMALLEST_SIDE = 4  # pixels: smaller images have no crops

Batch = tuple[Tensor, ...]
# Positions in the ID training set, one tensor per step → the batch of each step.
BatchSource = Callable[[Sequence[Tensor]], Iterator[Batch]]


@dataclass(frozen=True)
class Rows:
    """Samples of one or more arrays of the same sample shape, read when they are needed.

    `index` counts through the first array, then through the next, as if they were concatenated.
    """

    arrays: tuple[np.ndarray, ...]  # each n, *sample_shape; memory-mapped or not
    index: np.ndarray

    def __post_init__(self) -> None:
        n = sum(map(len, self.arrays))
        wrong = self.index[(self.index < 0) | (self.index >= n)]
        if len(wrong):
            raise BadArtifactError(
                f"{len(wrong)} rows, the first of them {wrong[0]}, are not among the {n} prepared samples; "
                "make splits and wild sets again: salcli prepare"
            )

    def __len__(self) -> int:
        return len(self.index)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """(C, H, W) of images, (D,) of vectors."""
        return self.arrays[0].shape[1:]

    @property
    def n_bytes(self) -> int:
        return len(self) * int(np.prod(self.sample_shape)) * self.arrays[0].dtype.itemsize

    def select(self, positions: np.ndarray | slice) -> "Rows":
        return Rows(self.arrays, self.index[positions])

    def read(self, positions: np.ndarray | Sequence[int] | slice) -> Tensor:
        """A copy of some rows in memory."""
        wanted = self.index[positions]
        samples = np.empty((len(wanted), *self.sample_shape), self.arrays[0].dtype)
        start = 0
        for array in self.arrays:
            inside = (wanted >= start) & (wanted < start + len(array))
            # a new map for each read: with a single one, every page ever read would count as memory of this process
            samples[inside] = _mapped(_location(array))[wanted[inside] - start]
            start += len(array)
        return torch.from_numpy(samples)

    def __getitem__(self, position: int) -> Tensor:
        return self.read(slice(position, position + 1))[0]

    def __getitems__(self, positions: list[int]) -> Tensor:
        """How a DataLoader asks for a whole batch."""
        return self.read(positions)

    def __getstate__(self) -> dict[str, Any]:
        """Worker processes get the location of a mapped file, not its content."""
        return {"arrays": [_location(array) for array in self.arrays], "index": self.index}

    def __setstate__(self, state: dict[str, Any]) -> None:
        object.__setattr__(self, "arrays", tuple(_mapped(location) for location in state["arrays"]))
        object.__setattr__(self, "index", state["index"])


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, one after the other."""
    arrays: list[np.ndarray] = []
    index = []
    for part in parts:
        starts = np.cumsum([0, *(len(array) for array in (*arrays, *part.arrays))])
        index.append(part.index + starts[len(arrays)])
        arrays += part.arrays
    return Rows(tuple(arrays), np.concatenate(index))


def _location(array: np.ndarray) -> Any:
    if isinstance(array, np.memmap) and array.filename is not None:
        return str(array.filename), array.dtype, array.offset, array.shape
    return array


def _mapped(location: Any) -> np.ndarray:
    if isinstance(location, np.ndarray):
        return location
    path, dtype, offset, shape = location
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape)


@dataclass(frozen=True)
class LabeledRows:
    """Part of the ID data; `rows.index` are positions in the whole ID data set."""

    rows: Rows
    labels: Tensor  # n
    n_classes: int
    class_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)


class DeviceRows:
    """Rows, batch by batch, on the device; with `resident` all of them stay there if they are small enough."""

    def __init__(self, rows: Rows, device: torch.device, *, resident: bool) -> None:
        self._rows, self._device = rows, device
        self._is_small = rows.n_bytes <= RESIDENT_BYTES
        self._on_device = rows.read(slice(None)).to(device) if self._is_small and resident else None

    def __len__(self) -> int:
        return len(self._rows)

    def batches(self, order: Sequence[Tensor]) -> Iterator[Tensor]:
        """One batch for each tensor of positions."""
        if self._on_device is not None:
            for positions in order:
                yield self._on_device[positions.to(self._device)]
            return
        if self._is_small:
            for positions in order:
                yield self._rows.read(positions.numpy()).to(self._device)
            return
        loader: DataLoader[Tensor] = DataLoader(
            self._rows,  # type: ignore[arg-type]  # has all that a Dataset needs
            batch_sampler=[positions.tolist() for positions in order],
            collate_fn=default_convert,  # unchanged: what __getitems__ returns is a batch already
            num_workers=N_WORKERS,
            pin_memory=self._device.type == "cuda",
            generator=torch.Generator(),  # else it would draw from torch's global stream, which dropout uses
        )
        for samples in loader:
            yield samples.to(self._device, non_blocking=True)


class EndlessRows:
    """Draws rows without replacement, and starts over when all have been drawn."""

    def __init__(self, rows: Rows, compute: Compute, generator: torch.Generator) -> None:
        if not len(rows):
            raise SalError("there are no samples to draw outliers from; check the wild data and the candidates")
        self._rows = DeviceRows(rows, compute.device, resident=True)
        self._part_of = compute.processes.part
        self._generator = generator
        self._queue = torch.empty(0, dtype=torch.int64)  # positions that are shuffled already and come next

    def batches(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """This process's part of the next batches of these sizes."""
        return self._rows.batches([self._draw(n)[self._part_of(n)] for n in sizes])

    def _draw(self, n: int) -> Tensor:
        while len(self._queue) < n:
            order = torch.randperm(len(self._rows), generator=self._generator)
            self._queue = torch.cat([self._queue, order])
        drawn, self._queue = self._queue[:n], self._queue[n:]
        return drawn

    def get_state(self) -> Tensor:
        return self._queue

    def set_state(self, state: Tensor) -> Self:
        self._queue = state
        return self


class Batches:
    """A BatchSource: samples, labels, then equally many samples of each other source, in their order.

    Each process gets its part of every batch, on the device and augmented.
    """

    def __init__(
        self,
        training: LabeledRows,
        compute: Compute,
        augment: Augmentation | None = None,
        others: Mapping[str, EndlessRows] | None = None,
    ) -> None:
        self._rows = DeviceRows(training.rows, compute.device, resident=True)
        self._labels = training.labels.to(compute.device)
        self._compute = compute
        self._augment = augment or Augmentation("none", torch.Generator())
        self._others = list((others or {}).values())

    def __call__(self, order: Sequence[Tensor]) -> Iterator[Batch]:
        part_of = self._compute.processes.part
        own = [positions[part_of(len(positions))] for positions in order]
        others = [source.batches([len(positions) for positions in order]) for source in self._others]
        for positions, mine, *sources in zip(order, own, self._rows.batches(own), *others, strict=True):
            n, part = len(positions), part_of(len(positions))
            samples, *further = (self._augment(source, n, part) for source in sources)
            yield samples, self._labels[mine.to(self._compute.device)], *further


def viewed(batches: BatchSource, views: Callable[[Tensor, Tensor], Batch]) -> BatchSource:
    """Replace each (images, labels) by the `views` of them that a contrastive method compares."""
    return lambda order: starmap(views, batches(order))


def check_views_exist(method: str, key: str, training: LabeledRows) -> None:
    """Vectors and points in the plane have no crops. `key` is where params.yaml names the method."""
    shape = training.rows.sample_shape
    if len(shape) != 3 or min(shape[1:]) < SMALLEST_SIDE or shape[0] == 2:
        raise SalError(
            f"{method} learns from crops and other views of images, but these samples have the shape "
            f"{' × '.join(map(str, shape))}; remove it from {key}, "
            f"or set data.image_size to {SMALLEST_SIDE} or more if they are images"
        )
