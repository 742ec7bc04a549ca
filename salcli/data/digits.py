"""scikit-learn's handwritten digits: 1,797 real 8×8 images that come with the package."""

from __future__ import annotations

import numpy as np

from salcli.data.image_set import ImageSet

BRIGHTEST = 16  # of the package's own scale


def load_digits_0_7() -> ImageSet:
    """Digits 0 to 7, labeled."""
    images, digit = _all_digits()
    kept = digit <= 7
    return ImageSet(images[kept], digit[kept], tuple("01234567"))


def load_digits_8_9() -> ImageSet:
    """Digits 8 and 9: near OOD, same writers and same pen."""
    images, digit = _all_digits()
    return ImageSet(images[digit >= 8])


def _all_digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    bundle = load_digits()
    scaled = np.rint(bundle.images * (255 / BRIGHTEST)).astype(np.uint8)
    return scaled[:, None], bundle.target.astype(np.int64)
