"""Readers of the published formats, and the small sets that come with scikit-learn or are made by salcli.

torchvision reads the same files, but unpickles CIFAR, needs torch and turns damage into tracebacks. Ours run no foreign
code, import nothing slow and name the file to replace. All functions of `root` look below the folder of all data sets.
"""

import gzip
import pickle
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from salcli.data.sets import Samples, joined, shown
from salcli.errors import SalError
from salcli.sal.seeding import generator

DIGITS = tuple("0123456789")
GARMENTS = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


@contextmanager
def _reading(path: Path, what: str, name: str) -> Iterator[None]:
    """Anything that goes wrong with a published file means that the file is not the published one."""
    try:
        yield
    except Exception as error:  # broken bytes may lead to any
        reason = str(error) or type(error).__name__
        raise SalError(
            f"{path} is damaged or not {what} ({reason}); remove it, then run: salcli data fetch {name}"
        ) from None


# --- CIFAR-10 and CIFAR-100: pickled batches, read without running what is in them

CIFAR10 = "cifar-10-batches-py"
CIFAR10_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
CIFAR100 = "cifar-100-python"


def cifar10(root: Path) -> Samples:
    """60,000 images of 10 classes; the last 10,000 are the official test set."""
    batches = [root / CIFAR10 / name for name in (*CIFAR10_BATCHES, "test_batch")]
    return _cifar("cifar10", root / CIFAR10 / "batches.meta", "label_names", batches, "labels")


def cifar100(root: Path) -> Samples:
    """60,000 images of 100 fine classes; the last 10,000 are the official test set."""
    batches = [root / CIFAR100 / name for name in ("train", "test")]
    return _cifar("cifar100", root / CIFAR100 / "meta", "fine_label_names", batches, "fine_labels")


def _cifar(name: str, meta: Path, names_key: str, batches: Sequence[Path], labels_key: str) -> Samples:
    """All batches, of which the last one is the test set."""
    with _reading(meta, "a file of CIFAR", name):
        class_names = tuple(str(class_name) for class_name in _unpickled(meta)[names_key])
    parts = []
    for path in batches:
        with _reading(path, "a file of CIFAR", name):
            content = _unpickled(path)
            images, labels = content["data"].reshape(-1, 3, 32, 32), np.array(content[labels_key], np.int64)
            if images.dtype != np.uint8 or labels.shape != (len(images),):
                raise ValueError(f"it does not hold {len(images)} images of bytes, and as many labels")
            if len(labels) and not 0 <= labels.min() <= labels.max() < len(class_names):
                raise ValueError(f"a label is not from 0 to {len(class_names) - 1}")
            parts.append((images, labels))
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    is_test = np.arange(len(images)) >= len(images) - len(parts[-1][0])
    return Samples(array=images, labels=labels, class_names=class_names, is_test=is_test)


def _unpickled(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        content = _ArraysOnly(file, encoding="latin1").load()
    return {key: part.array() if isinstance(part, _StoredArray) else part for key, part in content.items()}


class _ArraysOnly(pickle.Unpickler):
    """Admits numbers, text, lists, dicts and numpy arrays. Everything else in a pickle is code: refused, not run."""

    def find_class(self, module: str, name: str) -> Any:
        match (module.replace("numpy._core", "numpy.core"), name):
            case ("numpy.core.multiarray", "_reconstruct") | ("numpy", "ndarray"):
                return _StoredArray
            case ("numpy", "dtype"):
                return _StoredType
        raise SalError(f"it asks for {module}.{name}, which is not data")


class _StoredArray:
    """The pickle of an array. numpy would trust its description of the memory; here it is checked first."""

    def __init__(self, *_: object) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def array(self) -> NDArray[Any]:
        """The array, or numpy's ValueError where the parts do not fit."""
        _, shape, kind, is_fortran, content = self.state
        raw = content.encode("latin1") if isinstance(content, str) else content
        return np.frombuffer(raw, kind.dtype()).reshape(shape, order="F" if is_fortran else "C")


class _StoredType:
    """The pickle of a dtype: plain integers only."""

    def __init__(self, code: str, *_: object) -> None:
        self.code, self.order = code, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]

    def dtype(self) -> np.dtype[Any]:
        if not re.fullmatch("[iu][1248]", self.code):
            raise SalError(f"it holds an array of {self.code}")
        return np.dtype(self.order + self.code)


# --- SVHN: two MATLAB files

SVHN = ("train_32x32.mat", "test_32x32.mat")


def svhn(root: Path) -> Samples:
    """Digits of house numbers; the official test set comes last."""
    return joined(*(_svhn_part(root / name) for name in SVHN))


def _svhn_part(path: Path) -> Samples:
    from scipy.io import loadmat

    with _reading(path, "SVHN", "svhn"):
        content = loadmat(str(path), variable_names=["X", "y"])
        images, digits = np.asarray(content["X"]), np.asarray(content["y"]).ravel()
        if images.ndim != 4 or images.shape[2] != 3 or images.dtype != np.uint8:
            raise ValueError("X is not height × width × 3 × n of uint8")
        if len(digits) != images.shape[3] or not np.isin(digits, np.arange(11)).all():
            raise ValueError("y does not hold one digit for each image")
    labels = digits.astype(np.int64) % 10  # the files store the digit 0 as 10
    return Samples(array=images.transpose(3, 2, 0, 1), labels=labels, class_names=DIGITS)


# --- MNIST and Fashion-MNIST: idx files, gzipped or not

IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
IDX_UINT8 = 0x08  # the type code of idx


def mnist(root: Path) -> Samples:
    """Handwritten digits, 28 × 28, gray; the last 10,000 are the official test set."""
    return joined(*(_idx_part("mnist", root / "MNIST" / "raw", part, DIGITS) for part in ("train", "t10k")))


def fashion_mnist(root: Path) -> Samples:
    """Garments, 28 × 28, gray; the last 10,000 are the official test set."""
    folder = root / "FashionMNIST" / "raw"
    return joined(*(_idx_part("fashion-mnist", folder, part, GARMENTS) for part in ("train", "t10k")))


def _idx_part(name: str, folder: Path, part: str, class_names: tuple[str, ...]) -> Samples:
    images = _read_idx(name, folder / f"{part}-images-idx3-ubyte", n_axes=3)
    path = folder / f"{part}-labels-idx1-ubyte"
    labels = _read_idx(name, path, n_axes=1)
    with _reading(path, "the labels of the images", name):
        if len(images) != len(labels) or not np.isin(labels, np.arange(len(class_names))).all():
            raise ValueError(f"it should hold {len(images)} labels from 0 to {len(class_names) - 1}")
    return Samples(array=images[:, None], labels=labels.astype(np.int64), class_names=class_names)


def _read_idx(name: str, path: Path, n_axes: int) -> NDArray[np.uint8]:
    packed = path.with_name(f"{path.name}.gz")
    with _reading(path, "an idx file", name):
        content = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
        zeros, code, axes, *shape = struct.unpack_from(f">HBB{n_axes}I", content)
        if (zeros, code, axes) != (0, IDX_UINT8, n_axes):
            raise ValueError(f"it does not hold bytes along {n_axes} axes")
        return np.frombuffer(content, np.uint8, offset=4 + 4 * n_axes).reshape(shape)


# --- 300K Random Images: one .npy file

RANDOM_IMAGES = "300K_random_images.npy"


def random_images(root: Path) -> Samples:
    """300K Random Images, memory-mapped."""
    path = root / RANDOM_IMAGES
    with _reading(path, "a .npy file", "300k-random"):
        images = np.load(path, mmap_mode="r")
    return Samples(array=channels_first(path, images))


def channels_first(path: Path, images: NDArray[Any]) -> NDArray[Any]:
    """n × height × width [× 1 or 3] → n, C, H, W, without a copy."""
    n_channels = {3: 1, 4: images.shape[-1] if images.ndim else 0}.get(images.ndim)
    if images.dtype != np.uint8 or n_channels not in (1, 3) or 0 in images.shape[1:]:
        raise SalError(f"{path}: images must be n × height × width [× 1 or 3] of uint8, got {shown(images)}")
    if len(images) == 0:
        raise SalError(f"{path} holds no images")
    return images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)


def numbered_labels(
    path: Path, source: Samples, labels: NDArray[Any], names: NDArray[Any] | None, called: str = "labels"
) -> Samples:
    """The source with integers as labels: an index into the names, else the classes are called by their numbers.

    `called`: what the file calls the array of labels.
    """
    if labels.shape != (len(source),) or labels.dtype.kind not in "iu":
        raise SalError(f"{path}: `{called}` must be {len(source)} integers, got {shown(labels)}")
    if labels.min() < 0:
        raise SalError(f"{path}: `{called}` must not be negative, got {labels.min()}; leave unlabeled samples out")
    found, renumbered = np.unique(labels, return_inverse=True)
    if names is None:
        return replace(source, labels=renumbered.astype(np.int64), class_names=tuple(map(str, found)))
    if names.ndim != 1 or found[-1] >= len(names):
        raise SalError(f"{path}: labels run from {found[0]} to {found[-1]}, but `class_names` has {names.size} names")
    empty = sorted(set(range(len(names))) - set(found.tolist()))
    if empty:
        raise SalError(f"{path}: class {names[empty[0]]} has no samples; add some, or leave it out of `class_names`")
    return replace(source, labels=labels.astype(np.int64), class_names=tuple(map(str, names)))


# --- Places365: a sample of its validation images

PLACES = "val_256"
PLACES_LIST = "lists/places365.txt"


def places365(root: Path) -> Samples:
    """The images on our list; other files in the folder are ignored."""
    names = places365_names()
    present = {path.name for path in (root / PLACES).iterdir()}
    missing = [name for name in names if name not in present]
    if missing:
        raise SalError(
            f"{root / PLACES} lacks {len(missing):,} of the {len(names):,} images of places365 "
            f"({missing[0]}, …); get them again: salcli data fetch places365"
        )
    return Samples(files=tuple(root / PLACES / name for name in names))


def places365_names() -> list[str]:
    """The names of the 10,000 images. The protocol's own sample was never published, so this one is ours."""
    lines = files("salcli.data").joinpath(PLACES_LIST).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


# --- OpenOOD's lists: each line is a path and the number of a class, -1 of OOD images

OPENOOD_LISTS = "benchmark_imglist"


def openood(folder: Path, lists: Sequence[Path]) -> Samples:
    """The images on one list of OOD data, or on a training and a test list of ID data; paths count from the folder.

    A class is called as the folder of its training images.
    """
    parts = [_listed(folder, file) for file in lists]
    if len(parts) == 1:
        return Samples(files=parts[0][0])
    (files, labels), (_, test_labels) = parts
    names = dict(zip(labels.tolist(), (path.parent.name for path in files), strict=True))
    if names.keys() != set(range(len(names))) or not names.keys() >= set(test_labels.tolist()):
        raise SalError(f"{lists[0]} and {lists[1]} must number the same classes, from 0; get them again from OpenOOD")
    class_names = tuple(names[k] for k in range(len(names)))
    return joined(*(Samples(files=files, labels=labels, class_names=class_names) for files, labels in parts))


def _listed(folder: Path, file: Path) -> tuple[tuple[Path, ...], NDArray[np.int64]]:
    paths, numbers = [], []
    for i, line in enumerate(file.read_text(encoding="utf-8", errors="surrogateescape").splitlines(), start=1):
        path, _, number = line.strip().rpartition(" ")
        if not re.fullmatch(r"-1|[0-9]{1,6}", number) or not path or path.startswith("/"):
            raise SalError(f"{file}, line {i}: it should be a relative path and the number of a class, got {line!r}")
        paths.append(folder / path)
        numbers.append(int(number))
    if not paths:
        raise SalError(f"{file} lists no images; get it again from OpenOOD")
    return tuple(paths), np.array(numbers, np.int64)


# --- scikit-learn's handwritten digits: 1,797 real 8×8 images

BRIGHTEST = 16  # on scikit-learn's scale


def digits_0_7() -> Samples:
    images, digit = _all_digits()
    kept = digit <= 7
    return Samples(images[kept], digit[kept], DIGITS[:8])


def digits_8_9() -> Samples:
    """Near OOD: the same writers and the same pen."""
    images, digit = _all_digits()
    return Samples(images[digit >= 8])


def _all_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    from sklearn.datasets import load_digits

    bundle = load_digits()
    scaled = np.rint(bundle.images * (255 / BRIGHTEST)).astype(np.uint8)
    return scaled[:, None], bundle.target.astype(np.int64)


# --- 8×8 gray patches of the two photographs in scikit-learn: far OOD for digits

N_PATCHES = 2_000
PATCH_SIDES = (16, 96)  # pixels of the photograph
PATCH_SIZE = 8
# Patches of one photograph overlap, so wild patches come from its left part and test patches from its right part: no
# pixel is in both.
WILD_PART = 0.7
LUMA = np.array([0.299, 0.587, 0.114])


def photo_patches() -> Samples:
    """Squares of random size and position, averaged down to 8×8; the same on each call."""
    from sklearn.datasets import load_sample_images

    photos = [photo @ LUMA for photo in load_sample_images().images]
    rng = np.random.default_rng(20240116)
    for_wild = np.arange(N_PATCHES) < WILD_PART * N_PATCHES
    patches = [_patch(photos[i % len(photos)], rng, left=bool(for_wild[i])) for i in range(N_PATCHES)]
    return Samples(np.stack(patches)[:, None], is_test=~for_wild)


def _patch(photo: NDArray[Any], rng: np.random.Generator, *, left: bool) -> NDArray[np.uint8]:
    height, width = photo.shape
    border = int(width * WILD_PART)
    first, last = (0, border) if left else (border, width)
    side = int(rng.integers(PATCH_SIDES[0], PATCH_SIDES[1] + 1))
    top = int(rng.integers(0, height - side + 1))
    column = int(rng.integers(first, last - side + 1))
    return _shrink(photo[top : top + side, column : column + side])


def _shrink(square: NDArray[Any]) -> NDArray[np.uint8]:
    """Mean over 8×8 equal areas, also where the side is not a multiple of 8."""
    side = len(square)
    edges = np.arange(PATCH_SIZE + 1)[:, None] * side / PATCH_SIZE
    covered = np.clip(edges - np.arange(side)[None], 0, 1)  # share of each pixel left of each edge
    weight = np.diff(covered, axis=0) * PATCH_SIZE / side
    small: NDArray[np.uint8] = np.rint(weight @ square @ weight.T).astype(np.uint8)
    return small


# --- The paper's example in the plane (its Figure 2 and appendix): three Gaussians, and two kinds of outliers
#
# Each set holds what the paper states and, where it states nothing, parts of the same kind for calibration and test.
# With shares of 0.2 for training, 0.2 for calibration, 0.6 for the wild and the official test, a class has 1,000 points
# for training and 3,000 in the wild, and π = 0.1 puts 1,000 outliers beside them: the paper's sizes.

POINTS_SEED = 0
MEANS = np.array([[-2, 0], [2, 0], [0, 2 * np.sqrt(3)]])
VARIANCE = 0.25
CENTRE = np.array([0, 2 / np.sqrt(3)])
N_TRAINING, N_CALIBRATION, N_WILD, N_TEST = 1_000, 1_000, 3_000, 1_000  # of each class
N_OUTLIERS = 1_000  # in the wild, and as many for the test
RING_VARIANCE, N_RING_DRAWN = 7, 100_000
CLUSTER_MEAN, CLUSTER_VARIANCE = np.array([10, 2 / np.sqrt(3)]), 0.25

Points = NDArray[np.float64]  # n, 2


def gaussians_2d() -> Samples:
    """Three classes of points, each a Gaussian."""
    rng = generator(POINTS_SEED, "gaussians-2d")
    n_dealt = N_TRAINING + N_CALIBRATION + N_WILD
    classes = [_gaussian(rng, mean, VARIANCE, n_dealt + N_TEST) for mean in MEANS]
    return Samples(
        np.concatenate(classes).astype(np.float32),
        np.repeat(np.arange(len(MEANS)), n_dealt + N_TEST),
        ("left", "right", "top"),
        np.tile(np.arange(n_dealt + N_TEST) >= n_dealt, len(MEANS)),
    )


def ring_2d() -> Samples:
    """Scenario 1: of 100,000 points around the centre of the classes, the 1,000 that are farthest away."""
    rng = generator(POINTS_SEED, "ring-2d")
    return _outliers([_farthest(_gaussian(rng, CENTRE, RING_VARIANCE, N_RING_DRAWN)) for _ in range(2)])


def cluster_2d() -> Samples:
    """Scenario 2: a cluster to the right of all classes."""
    rng = generator(POINTS_SEED, "cluster-2d")
    return _outliers([_gaussian(rng, CLUSTER_MEAN, CLUSTER_VARIANCE, N_OUTLIERS) for _ in range(2)])


def _gaussian(rng: np.random.Generator, mean: Points, variance: float, n: int) -> Points:
    points: Points = mean + np.sqrt(variance) * rng.standard_normal((n, 2))
    return points


def _farthest(points: Points) -> Points:
    distance = np.linalg.norm(points - CENTRE, axis=1)
    return points[np.sort(np.argsort(distance)[-N_OUTLIERS:])]  # in the order drawn: the rank must say nothing


def _outliers(wild_and_test: list[Points]) -> Samples:
    points = np.concatenate(wild_and_test).astype(np.float32)
    return Samples(points, is_test=np.arange(2 * N_OUTLIERS) >= N_OUTLIERS)
