"""CIFAR-10 and CIFAR-100 as they are published: pickled batches, read without running what is in them."""

from __future__ import annotations

import pickle
import re
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from salcli.data.image_set import Source, joined
from salcli.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

CIFAR10 = "cifar-10-batches-py"
CIFAR100 = "cifar-100-python"


def load_cifar10(root: Path) -> Source:
    """60,000 images of 10 classes; the last 10,000 are the official test set."""
    folder = root / CIFAR10
    names = _class_names(folder / "batches.meta", "label_names")
    training = [_batch(folder / f"data_batch_{i}", "labels", names) for i in range(1, 6)]
    whole = Source(
        np.concatenate([np.asarray(part.pictures) for part in training]),
        np.concatenate([part.labels for part in training if part.labels is not None]),
        names,
    )
    return joined(whole, _batch(folder / "test_batch", "labels", names))


def load_cifar100(root: Path) -> Source:
    """60,000 images of 100 fine classes; the last 10,000 are the official test set."""
    folder = root / CIFAR100
    names = _class_names(folder / "meta", "fine_label_names")
    return joined(*(_batch(folder / part, "fine_labels", names) for part in ("train", "test")))


def _batch(path: Path, label_key: str, class_names: tuple[str, ...]) -> Source:
    content = _read(path)
    images, labels = content.get("data"), np.asarray(content.get(label_key, ()))
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != 3072:
        raise _damaged(path, "its data are not rows of 3,072 bytes")
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu":
        raise _damaged(path, f"it has {len(images)} images, but not as many labels")
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(class_names):
        raise _damaged(path, f"a label is not from 0 to {len(class_names) - 1}")
    return Source(images.reshape(-1, 3, 32, 32), labels.astype(np.int64), class_names)


def _class_names(path: Path, key: str) -> tuple[str, ...]:
    names = _read(path).get(key)
    if not isinstance(names, list) or not names:
        raise _damaged(path, f"it has no {key}")
    return tuple(str(name) for name in names)


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = _ArraysOnly(file, encoding="latin1").load()
            if not isinstance(content, dict):
                raise DataError("it is no batch")
            return {key: part.array() if isinstance(part, _StoredArray) else part for key, part in content.items()}
    except Exception as error:  # broken bytes may lead to any
        raise _damaged(path, error) from None


def _damaged(path: Path, reason: object) -> DataError:
    return DataError(
        f"{path} is damaged or not ours ({reason}); remove it and get it again with `salcli data fetch`, "
        "or put a folder of images or an .npz file in its place"
    )


class _ArraysOnly(pickle.Unpickler):
    """Admits numbers, text, lists, dicts and numpy arrays. Everything else in a pickle is code: refused, not run."""

    def find_class(self, module: str, name: str) -> Any:
        """The few names that an array's pickle needs, each with a harmless stand-in of ours."""
        match (module.replace("numpy._core", "numpy.core"), name):
            case ("numpy.core.multiarray", "_reconstruct") | ("numpy", "ndarray"):
                return _StoredArray
            case ("numpy.core.numeric", "_frombuffer"):  # from protocol 5 on
                return _buffered_array
            case ("numpy", "dtype"):
                return _StoredType
            case ("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
                return _as_bytes
        raise DataError(f"it asks for {module}.{name}, which is not data")

    def persistent_load(self, pid: Any) -> NoReturn:
        """Nothing lies outside of the file."""
        raise DataError("it refers to something outside, which is not data")


class _StoredArray:
    """An array's pickle. numpy itself would trust what it says of its memory; here it is checked first."""

    def __init__(self, *_: object) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def array(self) -> np.ndarray:
        """The array, or a ValueError of numpy where the parts do not fit."""
        _, shape, kind, is_fortran, content = self.state
        raw = content.encode("latin1") if isinstance(content, str) else content
        return np.frombuffer(raw, kind.dtype()).reshape(shape, order="F" if is_fortran else "C")


def _buffered_array(content: bytes, kind: _StoredType, shape: tuple[int, ...], order: str) -> _StoredArray:
    stored = _StoredArray()
    stored.state = (1, shape, kind, order == "F", content)
    return stored


class _StoredType:
    """The pickle of a dtype: plain numbers only."""

    def __init__(self, code: str, *_: object) -> None:
        self.code, self.order = code, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]

    def dtype(self) -> np.dtype[Any]:
        """The dtype, or a DataError where it is not one of plain numbers."""
        if not re.fullmatch("[iu][1248]", self.code):
            raise DataError(f"it holds an array of {self.code}")
        return np.dtype(self.order + self.code)


def _as_bytes(text: str, _encoding: str) -> bytes:
    return text.encode("latin1")
