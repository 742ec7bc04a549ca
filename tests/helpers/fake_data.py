"""Small data sets in the formats of the real ones, and short ways to read them, for tests without the web."""

import gzip
import os
import pickle
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from scipy.io import savemat

from salcli.data.catalogue import load_source
from salcli.data.decoding import Shape, decode
from salcli.data.sets import Samples
from salcli.errors import SalError
from salcli.progress import Silent

TEST_SHARE = 0.25  # of what a set with an official split has for each class


def lay_out(root: Path, names: Iterable[str], n_per_class: int = 24, seed: int = 0) -> None:
    """Write small files in the real format of each named set; what comes with salcli needs none.

    Sets with an official split get a fourth of n_per_class, but at least one image, for testing; sets without classes
    get ten times n_per_class images. Places365 is laid out as a custom folder: its list of names is long.
    """
    root.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(dict.fromkeys(names)):
        if name in WRITERS:
            WRITERS[name](root, Recipe(n_per_class, np.random.default_rng((seed, i)), 1000 * [*WRITERS].index(name)))


def decoded(source: Samples, size: int = 32, channels: int = 3, *, skip_bad: bool = False) -> NDArray[Any]:
    """The whole set: n, C, H, W."""
    return np.concatenate(
        [block.images for block in decode(source, Shape(channels, size), Silent(), skip_bad=skip_bad)]
    )


def refusal(name: str, root: Path) -> str:
    """The message with which a set is refused."""
    with pytest.raises(SalError) as caught:
        load_source(name, root)
    return str(caught.value)


def random_images(n: int, size: int = 32, seed: int = 0) -> NDArray[np.uint8]:
    """n, H, W, C."""
    return np.random.default_rng(seed).integers(0, 256, (n, size, size, 3), dtype=np.uint8)


class Malicious:
    """Leaves a folder where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.trace),)


@dataclass(frozen=True)
class Recipe:
    """How many images, what randomness, and what they look like: no set looks like another one."""

    n_per_class: int
    rng: np.random.Generator
    looks: int

    def labeled(self, n_classes: int, n: int, size: int = 32, channels: int = 3) -> tuple[NDArray[Any], NDArray[Any]]:
        """n images of each class, shuffled: each class has its colour and its stripes. n, H, W, C."""
        labels = self.rng.permutation(np.repeat(np.arange(n_classes), n))
        return np.stack([self.image(k, size, channels) for k in labels]), labels

    def image(self, k: int, size: int = 32, channels: int = 3) -> NDArray[np.uint8]:
        """H, W, C. The class decides colour, period and direction, so that a small network can learn it."""
        look = np.random.default_rng(self.looks + k)
        colour, slope = look.uniform(60, 195, channels), look.uniform(-1, 1, 2)
        rows, columns = np.mgrid[:size, :size]
        wave = np.sin((rows * slope[0] + columns * slope[1]) * (1 + k % 3) / 2 + self.rng.uniform(0, 1))
        noisy = colour + 50 * wave[..., None] + self.rng.normal(0, 10, (size, size, channels))
        return noisy.clip(0, 255).astype(np.uint8)

    @property
    def n_test(self) -> int:
        return max(1, round(self.n_per_class * TEST_SHARE))


def cifar10(root: Path, recipe: Recipe) -> None:
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    images, labels = recipe.labeled(10, recipe.n_per_class)
    for i, part in enumerate(np.array_split(np.arange(len(labels)), 5), start=1):
        write_batch(folder / f"data_batch_{i}", images[part], {"labels": labels[part].tolist()})
    images, labels = recipe.labeled(10, recipe.n_test)
    write_batch(folder / "test_batch", images, {"labels": labels.tolist()})
    dump(folder / "batches.meta", {"label_names": [f"thing {k}" for k in range(10)], "num_vis": 3072})


def cifar100(root: Path, recipe: Recipe) -> None:
    folder = root / "cifar-100-python"
    if folder.exists():  # cifar100 and its halves share a folder
        return
    folder.mkdir()
    for part, n in (("train", recipe.n_per_class), ("test", recipe.n_test)):
        images, labels = recipe.labeled(100, n)
        groups = {"fine_labels": labels.tolist(), "coarse_labels": (labels // 5).tolist()}
        write_batch(folder / part, images, groups)
    names = [f"fine {k:02}" for k in range(100)]
    dump(folder / "meta", {"fine_label_names": names, "coarse_label_names": [f"coarse {k}" for k in range(20)]})


def write_batch(path: Path, images: NDArray[Any], labels: dict[str, Any]) -> None:
    """n, H, W, C as CIFAR's rows of 3,072 bytes: first all red, then all green, then all blue."""
    rows = np.ascontiguousarray(images.transpose(0, 3, 1, 2)).reshape(len(images), -1)
    dump(path, {"data": rows, "batch_label": "a batch", "filenames": ["a.png"] * len(images), **labels})


def dump(path: Path, content: object) -> None:
    """Up to protocol 4, arrays are pickled as in the published files."""
    path.write_bytes(pickle.dumps(content, protocol=4))


def svhn(root: Path, recipe: Recipe) -> None:
    for part, n in (("train", recipe.n_per_class), ("test", recipe.n_test)):
        images, digits = recipe.labeled(10, n)
        digits = np.where(digits == 0, 10, digits).astype(np.uint8)
        savemat(root / f"{part}_32x32.mat", {"X": images.transpose(1, 2, 3, 0), "y": digits[:, None]})


def idx_set(folder: str, packed: bool) -> Callable[[Path, Recipe], None]:
    def write(root: Path, recipe: Recipe) -> None:
        raw = root / folder / "raw"
        raw.mkdir(parents=True)
        for prefix, n in (("train", recipe.n_per_class), ("t10k", recipe.n_test)):
            images, labels = recipe.labeled(10, n, 28, 1)
            write_idx(raw / f"{prefix}-images-idx3-ubyte", images[..., 0], packed=packed)
            write_idx(raw / f"{prefix}-labels-idx1-ubyte", labels, packed=packed)

    return write


def write_idx(path: Path, array: NDArray[Any], *, packed: bool = False) -> None:
    content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    if packed:
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(content))
    else:
        path.write_bytes(content)


def pictures(folder: str, suffix: str, size: int, n_folders: int = 1) -> Callable[[Path, Recipe], None]:
    def write(root: Path, recipe: Recipe) -> None:
        for i in range(10 * recipe.n_per_class):
            path = root / folder / f"part_{i % n_folders}" / f"image_{i:04}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(recipe.image(i % 7, size)).save(path)

    return write


def random_300k(root: Path, recipe: Recipe) -> None:
    images = [recipe.image(i) for i in range(10 * recipe.n_per_class)]
    np.save(root / "300K_random_images.npy", np.stack(images))


def imagenet(name: str, lists: str) -> Callable[[Path, Recipe], None]:
    """Training images in a folder for each class, test images in one; lists say which, and of which class they are."""

    def write(root: Path, recipe: Recipe) -> None:
        for part, n in (("train", recipe.n_per_class), ("test", recipe.n_test)):
            folders = [f"train/n{recipe.looks + k:08}" if part == "train" else "val" for k in range(10)]
            names = {f"imagenet_1k/{folders[k]}/{name}_{k}_{i}.JPEG": k for k in range(10) for i in range(n)}
            write_list(root, "images_largescale", f"{lists}/{part}_{lists}.txt", names, recipe)

    return write


def openood(folder: str, name: str) -> Callable[[Path, Recipe], None]:
    def write(root: Path, recipe: Recipe) -> None:
        top, _, own = folder.partition("/")
        names = {f"{own}/part_{i % 4}/image_{i:04}.jpg": -1 for i in range(10 * recipe.n_per_class)}
        write_list(root, top, f"imagenet/test_{name}.txt", names, recipe)

    return write


def write_list(root: Path, top: str, list_name: str, labels: dict[str, int], recipe: Recipe) -> None:
    """Images below `top`, and a list of OpenOOD's; one more image is not on it."""
    for path, k in {**labels, next(iter(labels)) + ".not-listed.png": 0}.items():
        (root / top / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(recipe.image(k, 48)).save(root / top / path, "png")
    file = root / "benchmark_imglist" / list_name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{path} {k}\n" for path, k in labels.items()), encoding="utf-8")


WRITERS: dict[str, Callable[[Path, Recipe], None]] = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "cifar100-first50": cifar100,
    "cifar100-last50": cifar100,
    "svhn": svhn,
    "fashion-mnist": idx_set("FashionMNIST", packed=True),
    "mnist": idx_set("MNIST", packed=False),
    "textures": pictures("dtd/dtd/images", ".jpg", 64, n_folders=4),
    "places365": pictures("places365", ".jpg", 48),
    "lsun-c": pictures("LSUN", ".png", 36),
    "lsun-r": pictures("LSUN_resize", ".png", 32),
    "isun": pictures("iSUN/iSUN_patches", ".jpeg", 32),
    "tin-crop": pictures("Imagenet", ".png", 36),
    "tin-resize": pictures("Imagenet_resize", ".png", 32),
    "300k-random": random_300k,
    "imagenet200": imagenet("imagenet200", "imagenet200"),
    "imagenet1k": imagenet("imagenet1k", "imagenet"),
    "ssb-hard": openood("images_largescale/ssb_hard", "ssb_hard"),
    "ninco": openood("images_largescale/ninco", "ninco"),
    "inaturalist": openood("images_largescale/inaturalist", "inaturalist"),
    "textures-openood": openood("images_classic/texture", "textures"),
    "openimage-o": openood("images_largescale/openimage_o", "openimage_o"),
}
