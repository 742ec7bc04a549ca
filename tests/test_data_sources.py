"""What is written down about data sets agrees with the packages that read them."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from dataclasses import replace
from pathlib import Path
from urllib.parse import urljoin

import numpy as np
import pytest
from PIL import Image
from pytorch_ood.dataset.img import LSUNCrop, LSUNResize, TinyImageNetCrop, TinyImageNetResize, TinyImages300k
from torchvision import datasets
from web import Web, serving

from salcli.data.catalogue import DATA_SETS
from salcli.errors import UnknownNameError
from salcli.fetching import registry
from salcli.fetching.data_source import DataSource
from salcli.fetching.fetch import fetch
from salcli.fetching.registry import SOURCES, data_source

WEB = [source for source in SOURCES.values() if not source.is_embedded]


def written(source: DataSource) -> list[tuple[str, str, str | None]]:
    return [(file.url, file.name, file.checksum) for file in source.files]


def test_every_set_of_the_paper_and_more_is_known() -> None:
    assert set(SOURCES) == {
        *("digits-0-7", "digits-8-9", "photo-patches", "gaussians-2d", "ring-2d", "cluster-2d"),
        *("cifar10", "cifar100", "cifar100-first50", "cifar100-last50", "fashion-mnist", "mnist"),
        *("svhn", "textures", "places365", "lsun-c", "lsun-r", "isun", "tin-crop", "tin-resize", "300k-random"),
    }
    with pytest.raises(UnknownNameError, match="did you mean cifar10"):
        data_source("cifar-10")


@pytest.mark.parametrize("source", WEB, ids=lambda source: source.name)
def test_an_entry_is_complete(source: DataSource) -> None:
    assert source.title
    assert source.n_images > 0
    assert source.licence
    assert source.home.startswith("http")
    assert source.provides
    for file in source.files:
        assert file.url.endswith(f"/{file.name}")
        assert file.checksum is not None
        algorithm, _, digits = file.checksum.partition(":")
        assert (algorithm, len(bytes.fromhex(digits))) == ("md5", 16)


@pytest.mark.parametrize("name", [name for name, source in SOURCES.items() if source.is_embedded])
def test_embedded_sets_have_as_many_images_as_it_says(name: str) -> None:
    source = DATA_SETS[name].load(Path())
    assert isinstance(source.pictures, np.ndarray)
    assert len(source) == SOURCES[name].n_images
    height, width = source.pictures.shape[2:]
    assert SOURCES[name].size == ("point" if height == 1 else f"{height}×{width} gray")
    if SOURCES[name].n_test:
        assert source.is_test is not None
        assert source.is_test.sum() == SOURCES[name].n_test


def test_every_set_of_the_catalogue_is_listed_and_has_its_role() -> None:
    assert set(SOURCES) == set(DATA_SETS)
    for name, entry in DATA_SETS.items():
        assert (SOURCES[name].role != "ood") == entry.labeled, name


@pytest.mark.parametrize(("name", "theirs"), [("cifar10", datasets.CIFAR10), ("cifar100", datasets.CIFAR100)])
def test_cifar_is_what_torchvision_reads(name: str, theirs: type[datasets.CIFAR10]) -> None:
    assert written(SOURCES[name]) == [(theirs.url, theirs.filename, f"md5:{theirs.tgz_md5}")]
    members = [name for name, _ in [*theirs.train_list, *theirs.test_list]] + [theirs.meta["filename"]]
    assert SOURCES[name].provides == tuple(f"{theirs.base_folder}/{member}" for member in members)


@pytest.mark.parametrize("half", ["cifar100-first50", "cifar100-last50"])
def test_the_halves_of_cifar100_share_its_files(half: str) -> None:
    assert SOURCES[half].files == SOURCES["cifar100"].files
    assert SOURCES[half].provides == SOURCES["cifar100"].provides
    assert SOURCES[half].n_images * 2 == SOURCES["cifar100"].n_images


def test_svhn_is_what_torchvision_reads() -> None:
    parts = [datasets.SVHN.split_list[part] for part in ("train", "test")]
    assert written(SOURCES["svhn"]) == [(url, name, f"md5:{md5}") for url, name, md5 in parts]
    assert SOURCES["svhn"].provides == tuple(name for _, name, _ in parts)


@pytest.mark.parametrize(("name", "theirs"), [("mnist", datasets.MNIST), ("fashion-mnist", datasets.FashionMNIST)])
def test_mnist_is_what_torchvision_reads(name: str, theirs: type[datasets.MNIST]) -> None:
    assert [(file.name, file.checksum) for file in SOURCES[name].files] == [
        (file, f"md5:{md5}") for file, md5 in theirs.resources
    ]
    for file in SOURCES[name].files:
        assert [file.url, *file.mirrors] == [f"{mirror}{file.name}" for mirror in theirs.mirrors]
    raw = f"{theirs.__name__}/raw"
    assert SOURCES[name].folder == raw
    assert SOURCES[name].provides == tuple(f"{raw}/{file.removesuffix('.gz')}" for file, _ in theirs.resources)


def test_textures_are_what_torchvision_reads() -> None:
    [(url, _, checksum)] = written(SOURCES["textures"])
    assert (url, checksum) == (datasets.DTD._URL, f"md5:{datasets.DTD._MD5}")
    assert SOURCES["textures"].folder == "dtd"


def test_places_is_what_torchvision_reads() -> None:
    theirs = datasets.Places365
    files = [theirs._DEVKIT_META["standard"], theirs._IMAGES_META["val", True]]
    assert written(SOURCES["places365"]) == [
        (urljoin(theirs._BASE_URL, name), name, f"md5:{md5}") for name, md5 in files
    ]


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("lsun-c", LSUNCrop),
        ("lsun-r", LSUNResize),
        ("tin-crop", TinyImageNetCrop),
        ("tin-resize", TinyImageNetResize),
    ],
)
def test_the_sets_of_odin_are_what_pytorch_ood_reads(name: str, theirs: type[TinyImageNetCrop]) -> None:
    assert written(SOURCES[name]) == [(theirs.url, theirs.filename, f"md5:{theirs.tgz_md5}")]
    assert SOURCES[name].provides == (theirs.base_folder.partition("/")[0],)


def test_300k_random_is_what_pytorch_ood_reads() -> None:
    theirs = TinyImages300k
    assert written(SOURCES["300k-random"]) == [(theirs.url, theirs.filename, f"md5:{theirs.md5}")]
    assert SOURCES["300k-random"].provides == (theirs.filename,)


# --- torchvision reads what was fetched: the real classes, on small files of the published form


def fetch_small(name: str, root: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch a set whose files are replaced by small ones on a server of our own."""
    with serving(Web(files)) as web:
        ours = tuple(
            replace(
                file, url=web.url(file.name), checksum=f"md5:{hashlib.md5(files[file.name]).hexdigest()}", mirrors=()
            )
            for file in SOURCES[name].files
        )
        monkeypatch.setattr(registry, "SOURCES", {name: replace(SOURCES[name], files=ours)})
        assert [done.outcome for done in fetch([name], root)] == ["fetched"]


def idx(array: np.ndarray) -> bytes:
    """MNIST's file format: 0, 0, type, dimensions, sizes, values."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes())


@pytest.mark.parametrize(("name", "theirs"), [("mnist", datasets.MNIST), ("fashion-mnist", datasets.FashionMNIST)])
def test_torchvision_reads_the_fetched_mnist(
    name: str, theirs: type[datasets.MNIST], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels = np.arange(2 * 28 * 28).reshape(2, 28, 28) % 256, np.array([3, 7])
    files = {
        "train-images-idx3-ubyte.gz": idx(images),
        "train-labels-idx1-ubyte.gz": idx(labels),
        "t10k-images-idx3-ubyte.gz": idx(images[1:]),
        "t10k-labels-idx1-ubyte.gz": idx(labels[1:]),
    }
    fetch_small(name, tmp_path, files, monkeypatch)
    read = theirs(tmp_path, train=True)
    assert read.targets.tolist() == [3, 7]
    assert read.data.numpy().tolist() == images.tolist()
    assert theirs(tmp_path, train=False).targets.tolist() == [7]


def test_torchvision_reads_the_fetched_textures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture, archive = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (8, 8), (255, 0, 0)).save(picture, "JPEG")
    members = {"dtd/labels/train1.txt": b"banded/banded_1.jpg\n", "dtd/images/banded/banded_1.jpg": picture.getvalue()}
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    fetch_small("textures", tmp_path, {"dtd-r1.0.1.tar.gz": archive.getvalue()}, monkeypatch)
    read = datasets.DTD(tmp_path, split="train")
    assert read.classes == ["banded"]
    assert read[0][0].size == (8, 8)
    assert (tmp_path / "dtd" / "dtd" / "images" / "banded" / "banded_1.jpg").is_file()
