"""Street View House Numbers as published: two MATLAB files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from salcli.data.image_set import Source, joined
from salcli.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

FILES = ("train_32x32.mat", "test_32x32.mat")


def load_svhn(root: Path) -> Source:
    """Digits of house numbers; the official test set comes last."""
    return joined(*(_part(root / name) for name in FILES))


def _part(path: Path) -> Source:
    from scipy.io import loadmat

    try:
        content = loadmat(str(path), variable_names=["X", "y"])
        pictures, digits = np.asarray(content["X"]), np.asarray(content["y"]).ravel()
    except Exception as error:  # scipy has no one error for a broken file
        raise _damaged(path, str(error) or type(error).__name__) from None
    if pictures.ndim != 4 or pictures.shape[2] != 3 or pictures.dtype != np.uint8:
        raise _damaged(path, "X is not height × width × 3 × n of uint8")
    if len(digits) != pictures.shape[3] or not np.isin(digits, np.arange(11)).all():
        raise _damaged(path, "y does not hold one digit for each image")
    labels = digits.astype(np.int64) % 10  # the files call the digit 0 «10»
    return Source(pictures.transpose(3, 2, 0, 1), labels, tuple("0123456789"))


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(f"{path} is damaged or not SVHN ({reason}); remove it, then: salcli data fetch svhn")
