"""Images of prepared sets, in an order of their own, read when they are needed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Up to this size images are copied to the device once and stay there; larger ones are read by other processes.
RESIDENT_BYTES = 2 << 30
N_WORKERS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class ImageRows:
    """Rows of one or more memory-mapped sets; `source` counts through the first set, then through the next."""

    sets: tuple[np.ndarray, ...]  # each n, C, H, W
    source: np.ndarray

    def __len__(self) -> int:
        return len(self.source)

    @property
    def n_bytes(self) -> int:
        """The size of all rows in memory."""
        first = self.sets[0]
        return len(self) * int(np.prod(first.shape[1:])) * first.dtype.itemsize

    def select(self, positions: np.ndarray | slice) -> ImageRows:
        """Some of the rows."""
        return ImageRows(self.sets, self.source[positions])

    def read(self, positions: np.ndarray | Sequence[int] | slice) -> Tensor:
        """A copy of some rows in memory."""
        wanted = self.source[positions]
        images = np.empty((len(wanted), *self.sets[0].shape[1:]), self.sets[0].dtype)
        start = 0
        for one in self.sets:
            inside = (wanted >= start) & (wanted < start + len(one))
            # a map of its own: with one for all reads, every image ever read would count as memory of this process
            images[inside] = _open(_place(one))[wanted[inside] - start]
            start += len(one)
        return torch.from_numpy(images)

    def __getitem__(self, position: int) -> Tensor:
        return self.read(slice(position, position + 1))[0]

    def __getitems__(self, positions: list[int]) -> Tensor:
        """How a DataLoader asks for a whole batch."""
        return self.read(positions)

    def __getstate__(self) -> dict[str, Any]:
        """Send other processes the places of the files, not the images in them."""
        return {"sets": [_place(one) for one in self.sets], "source": self.source}

    def __setstate__(self, state: dict[str, Any]) -> None:
        object.__setattr__(self, "sets", tuple(_open(place) for place in state["sets"]))
        object.__setattr__(self, "source", state["source"])


def _place(images: np.ndarray) -> Any:
    if isinstance(images, np.memmap) and images.filename is not None:
        return str(images.filename), images.dtype, images.offset, images.shape
    return images


def _open(place: Any) -> np.ndarray:
    if isinstance(place, np.ndarray):
        return place
    name, dtype, offset, shape = place
    return np.memmap(name, dtype=dtype, mode="r", offset=offset, shape=shape)


class DeviceImages:
    """The same rows, batch by batch, on the device."""

    def __init__(self, rows: ImageRows, device: torch.device, *, resident: bool) -> None:
        self._rows, self._device = rows, device
        is_small = rows.n_bytes <= RESIDENT_BYTES
        self._on_device = rows.read(slice(None)).to(device) if is_small and resident else None
        self._read_here = is_small

    def __len__(self) -> int:
        return len(self._rows)

    def batches(self, order: Sequence[Tensor]) -> Iterator[Tensor]:
        """For each tensor of positions, its images."""
        if self._on_device is not None:
            for positions in order:
                yield self._on_device[positions.to(self._device)]
            return
        if self._read_here:
            for positions in order:
                yield self._rows.read(positions.numpy()).to(self._device)
            return
        loader: DataLoader[Tensor] = DataLoader(
            self._rows,  # type: ignore[arg-type]  # has all that a Dataset needs
            batch_sampler=[positions.tolist() for positions in order],
            collate_fn=_as_it_is,  # type: ignore[arg-type]  # gets what __getitems__ gives
            num_workers=N_WORKERS,
            pin_memory=self._device.type == "cuda",
            generator=torch.Generator(),  # or it would draw from the stream that seeds everything else
        )
        for images in loader:
            yield images.to(self._device, non_blocking=True)


def _as_it_is(batch: Tensor) -> Tensor:
    return batch
