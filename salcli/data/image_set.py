"""Images: as they were found, and decoded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


@dataclass(frozen=True)
class ImageSet:
    """n images with C channels, uint8; or n points in the plane, float32, as «images» of 2 × 1 × 1.

    OOD sets need no labels. `is_test` is True for images that were published for testing, or come from the part
    that is kept for tests; all others may go to training or to the wild data. Without it, images are dealt at random.
    `images` may be a read-only map of a file.
    """

    images: NDArray[Any]  # n, C, H, W
    labels: NDArray[np.int64] | None = None  # n
    class_names: tuple[str, ...] = ()
    is_test: NDArray[np.bool_] | None = None  # n

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class Source:
    """A data set as it lies on disk: image files that are not decoded yet, or an array of any size.

    `fit` says how images of another size are brought to the size that is asked for: `resize` the shorter side, then
    crop; or `crop` only, for sets that were published as larger crops.
    """

    pictures: tuple[Path, ...] | NDArray[Any]  # files, or n, C, H, W
    labels: NDArray[np.int64] | None = None  # n
    class_names: tuple[str, ...] = ()
    is_test: NDArray[np.bool_] | None = None  # n
    fit: Literal["resize", "crop"] = "resize"

    def __len__(self) -> int:
        return len(self.pictures)

    @classmethod
    def of(cls, image_set: ImageSet) -> Self:
        """A set that is in memory."""
        return cls(image_set.images, image_set.labels, image_set.class_names, image_set.is_test)

    def take(self, chosen: NDArray[np.int64]) -> Self:
        """Some of the images, in the given order."""
        pictures = self.pictures
        return replace(
            self,
            pictures=pictures[chosen] if isinstance(pictures, np.ndarray) else tuple(pictures[i] for i in chosen),
            labels=None if self.labels is None else self.labels[chosen],
            is_test=None if self.is_test is None else self.is_test[chosen],
        )

    def unlabeled(self) -> Self:
        """The same images, for use as OOD data."""
        return replace(self, labels=None, class_names=())


def joined(training: Source, test: Source) -> Source:
    """Both parts of an official split, as one set that knows which is which."""
    both = [np.asarray(part.pictures) for part in (training, test)]
    labels = None
    if training.labels is not None and test.labels is not None:
        labels = np.concatenate([training.labels, test.labels])
    return replace(
        training,
        pictures=np.concatenate(both),
        labels=labels,
        is_test=np.arange(len(training) + len(test)) >= len(training),
    )
