"""Random views of images, for what learns by contrast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from salcli.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from salcli.stages.batches import Batches
    from salcli.stages.inputs import LabeledImages
    from salcli.training import Batch, BatchSource

SMALLEST_SIDE = 4  # pixels


def viewed(images: Batches, views: Callable[[Tensor, Tensor], Batch]) -> BatchSource:
    """Views of each batch of images."""

    def batches(order: Sequence[Tensor]) -> Iterator[Batch]:
        for batch in images(order):
            yield views(batch[0], batch[1])

    return batches


def check_views_exist(method: str, key: str, training: LabeledImages) -> None:
    """Points have none. `key` is where params.yaml names the method."""
    _, n_channels, height, width = training.images.sets[0].shape
    if min(height, width) < SMALLEST_SIDE or n_channels == 2:
        raise DataError(
            f"{method} learns from crops and other views of images, but these are points of {n_channels} × {height} × "
            f"{width} values; leave it out of {key}, or set data.image_size to {SMALLEST_SIDE} or more"
        )
