"""Sets of samples: as found on disk (`Source`), and prepared for the pipeline (`Samples`)."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

Fit = Literal["resize", "crop"]


@dataclass(frozen=True)
class Samples:
    """A prepared set: n uint8 images with C channels, or n float32 points in the plane as "images" of 2 × 1 × 1.

    OOD sets need no labels. `is_test` marks the samples that were published for testing; the others may go to training
    or to the wild data. Where it is None, samples are split at random. `array` may be a read-only map of a file.
    """

    array: NDArray[Any]  # n, C, H, W
    labels: NDArray[np.int64] | None = None  # n
    class_names: tuple[str, ...] = ()
    is_test: NDArray[np.bool_] | None = None  # n

    def __len__(self) -> int:
        return len(self.array)


@dataclass(frozen=True)
class Source:
    """A set as it is on disk: image files that are not decoded yet, or an array whose images may have any size.

    Either `files` or `array` is given. `fit` says how images of another size are brought to the requested one: `resize`
    the shorter side, then crop; or only `crop`, for sets that were published as larger crops.
    """

    files: tuple[Path, ...] = ()
    array: NDArray[Any] | None = None  # n, C, H, W
    labels: NDArray[np.int64] | None = None  # n
    class_names: tuple[str, ...] = ()
    is_test: NDArray[np.bool_] | None = None  # n
    fit: Fit = "resize"

    def __len__(self) -> int:
        return len(self.files) if self.array is None else len(self.array)

    @classmethod
    def of(cls, samples: Samples) -> Self:
        return cls((), samples.array, samples.labels, samples.class_names, samples.is_test)

    def take(self, index: NDArray[np.int64]) -> Self:
        """Some of the samples, in the given order."""
        return replace(
            self,
            files=tuple(self.files[i] for i in index) if self.array is None else (),
            array=None if self.array is None else self.array[index],
            labels=None if self.labels is None else self.labels[index],
            is_test=None if self.is_test is None else self.is_test[index],
        )

    def unlabeled(self) -> Self:
        """The same samples, for use as OOD data."""
        return replace(self, labels=None, class_names=())


def joined(training: Source, test: Source) -> Source:
    """The two parts of an official split as one set, test samples last. Both are files, or both are arrays."""
    labels = array = None
    if training.labels is not None and test.labels is not None:
        labels = np.concatenate([training.labels, test.labels])
    if training.array is not None and test.array is not None:
        array = np.concatenate([training.array, test.array])
    is_test = np.repeat([False, True], [len(training), len(test)])
    return replace(training, files=training.files + test.files, array=array, labels=labels, is_test=is_test)


def file_size(path: Path) -> int:
    """In bytes; 0 where the file cannot be found."""
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return 0
