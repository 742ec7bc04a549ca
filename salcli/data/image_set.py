"""Decoded images in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class ImageSet:
    """n images with C channels. OOD sets have no labels.

    `region` says which images were published for training or test, or come from parts of a picture that
    do not overlap (True: may go to the wild data, False: may go to the OOD test set). Without it,
    images are dealt at random.
    """

    images: NDArray[np.uint8]  # n, C, H, W
    labels: NDArray[np.int64] | None = None  # n
    class_names: tuple[str, ...] = ()
    region: NDArray[np.bool_] | None = None  # n

    def __len__(self) -> int:
        return len(self.images)
