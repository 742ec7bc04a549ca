"""What a training step sees: labeled ID images, and with them as many of other kinds as a method asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from salcli.compute.image_rows import DeviceImages

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from salcli.compute.augmentation import Augmentation
    from salcli.compute.image_rows import ImageRows
    from salcli.compute.numerics import Compute
    from salcli.stages.inputs import LabeledImages
    from salcli.training import Batch


class Batches:
    """This process's part of every batch, on the device, augmented: images, labels, then the others in their order."""

    def __init__(
        self,
        training: LabeledImages,
        compute: Compute,
        augment: Augmentation,
        others: Mapping[str, EndlessImages] | None = None,
    ) -> None:
        self._images = DeviceImages(training.images, compute.device, resident=True)
        self._labels = training.labels.to(compute.device)
        self._compute, self._augment = compute, augment
        self._others = list((others or {}).values())

    def __call__(self, order: Sequence[Tensor]) -> Iterator[Batch]:
        """One batch for each tensor of positions in the ID training set."""
        part_of = self._compute.processes.part
        own = [positions[part_of(len(positions))] for positions in order]
        others = [source.batches([len(positions) for positions in order]) for source in self._others]
        for positions, mine, *sources in zip(order, own, self._images.batches(own), *others, strict=True):
            n, part = len(positions), part_of(len(positions))
            images, *further = (self._augment(some, n, part) for some in sources)
            yield images, self._labels[mine.to(self._compute.device)], *further


class EndlessImages:
    """Draws images without replacement, and begins anew when all have been drawn."""

    def __init__(self, images: ImageRows, compute: Compute, generator: torch.Generator) -> None:
        self._images = DeviceImages(images, compute.device, resident=True)
        self._part_of = compute.processes.part
        self._generator = generator
        self._waiting = torch.empty(0, dtype=torch.int64)

    def draw(self, n: int) -> Tensor:
        """The positions of the next n images."""
        while len(self._waiting) < n:
            order = torch.randperm(len(self._images), generator=self._generator)
            self._waiting = torch.cat([self._waiting, order])
        drawn, self._waiting = self._waiting[:n], self._waiting[n:]
        return drawn

    def batches(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """This process's part of the next batches of these sizes."""
        return self._images.batches([self.draw(n)[self._part_of(n)] for n in sizes])

    def get_state(self) -> Tensor:
        """The positions that are drawn already and wait."""
        return self._waiting

    def set_state(self, state: Tensor) -> None:
        """Go on from there."""
        self._waiting = state
