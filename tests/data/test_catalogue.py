"""The catalogue: records agree with the packages that read the same files, and sets are found by name."""

from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import numpy as np
import pytest
from helpers.fake_data import lay_out, random_images, refusal
from pytorch_ood.dataset.img import LSUNCrop, LSUNResize, TinyImageNetCrop, TinyImageNetResize, TinyImages300k
from torchvision import datasets

from salcli.data.catalogue import DATA_SETS, DataSet, data_root, load_source, read_from
from salcli.data.fetching import stand_in, status
from salcli.errors import DataError


def written(source: DataSet) -> list[tuple[str, str, str | None]]:
    return [(file.url, file.name, file.checksum) for file in source.files]


@pytest.mark.parametrize("name", [name for name, source in DATA_SETS.items() if source.is_embedded])
def test_embedded_sets_have_as_many_samples_as_it_says(name: str) -> None:
    source = DATA_SETS[name].read(Path())
    assert source.array is not None
    assert len(source) == DATA_SETS[name].n_images
    sides = source.array.shape[2:]
    assert DATA_SETS[name].size == (f"{sides[0]}×{sides[1]} gray" if sides else f"{source.array.shape[1]}-D vector")
    assert (source.labels is not None) == DATA_SETS[name].labeled
    if DATA_SETS[name].n_test:
        assert source.is_test is not None
        assert source.is_test.sum() == DATA_SETS[name].n_test


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        *(("cifar10", datasets.CIFAR10), ("cifar100", datasets.CIFAR100)),
        *(("lsun-c", LSUNCrop), ("lsun-r", LSUNResize)),
        *(("tin-crop", TinyImageNetCrop), ("tin-resize", TinyImageNetResize)),
    ],
)
def test_sets_in_one_archive_are_what_torchvision_and_pytorch_ood_read(name: str, theirs: Any) -> None:
    assert written(DATA_SETS[name]) == [(theirs.url, theirs.filename, f"md5:{theirs.tgz_md5}")]
    assert DATA_SETS[name].paths == (theirs.base_folder.partition("/")[0],)
    if name.startswith("cifar"):
        members = [name for name, _ in [*theirs.train_list, *theirs.test_list]] + [theirs.meta["filename"]]
        assert DATA_SETS[name].provides == tuple(f"{theirs.base_folder}/{member}" for member in members)


def test_other_sets_are_what_torchvision_and_pytorch_ood_read() -> None:
    svhn = [datasets.SVHN.split_list[part] for part in ("train", "test")]
    assert written(DATA_SETS["svhn"]) == [(url, name, f"md5:{md5}") for url, name, md5 in svhn]
    assert DATA_SETS["svhn"].provides == tuple(name for _, name, _ in svhn)
    [(url, _, checksum)] = written(DATA_SETS["textures"])
    assert (url, checksum) == (datasets.DTD._URL, f"md5:{datasets.DTD._MD5}")
    places = datasets.Places365
    files = [places._DEVKIT_META["standard"], places._IMAGES_META["val", True]]
    expected = [(urljoin(places._BASE_URL, name), name, f"md5:{md5}") for name, md5 in files]
    assert written(DATA_SETS["places365"]) == expected
    random = TinyImages300k
    assert written(DATA_SETS["300k-random"]) == [(random.url, random.filename, f"md5:{random.md5}")]
    assert DATA_SETS["300k-random"].provides == (random.filename,)


@pytest.mark.parametrize(("name", "theirs"), [("mnist", datasets.MNIST), ("fashion-mnist", datasets.FashionMNIST)])
def test_mnist_is_what_torchvision_reads(name: str, theirs: type[datasets.MNIST]) -> None:
    assert [(file.name, file.checksum) for file in DATA_SETS[name].files] == [
        (file, f"md5:{md5}") for file, md5 in theirs.resources
    ]
    for file in DATA_SETS[name].files:
        assert [file.url, *file.mirrors] == [f"{mirror}{file.name}" for mirror in theirs.mirrors]
    raw = f"{theirs.__name__}/raw"
    assert DATA_SETS[name].folder == raw
    assert DATA_SETS[name].provides == tuple(f"{raw}/{file.removesuffix('.gz')}" for file, _ in theirs.resources)


def test_torchvision_reads_the_same_mnist(tmp_path: Path) -> None:
    """The real class, on small files of the published form."""
    lay_out(tmp_path, ["mnist"], 2)
    ours = load_source("mnist", tmp_path)
    assert ours.is_test is not None
    assert ours.labels is not None
    for is_test in (False, True):
        read = datasets.MNIST(tmp_path, train=not is_test)
        assert read.targets.tolist() == ours.labels[ours.is_test == is_test].tolist()
        np.testing.assert_array_equal(read.data.numpy(), np.asarray(ours.array)[ours.is_test == is_test][:, 0])


# --- where sets are looked for


def test_a_set_that_is_not_there_is_refused_with_both_remedies(tmp_path: Path) -> None:
    message = refusal("cifar100-first50", tmp_path / "nowhere")
    place = f"looked for cifar-100-python, cifar100/ and cifar100.npz in {tmp_path / 'nowhere'}"
    assert message.startswith(f"cifar100 is not there: {place}")
    assert "salcli data fetch cifar100, or put a folder of images or an .npz file there" in message


def test_a_custom_file_or_folder_wins_over_the_published_files(tmp_path: Path) -> None:
    assert read_from("cifar100-first50", tmp_path) == [tmp_path / "cifar-100-python"]
    lay_out(tmp_path, ["svhn"], 2)
    assert read_from("svhn", tmp_path) == [tmp_path / "train_32x32.mat", tmp_path / "test_32x32.mat"]
    images, is_test = random_images(3), np.array([True, False, True])
    np.savez(tmp_path / "svhn.npz", images=images, labels=[0, 1, 0], is_test=is_test, class_names=["ä", "b"])
    source = load_source("svhn", tmp_path)
    np.testing.assert_array_equal(source.array, images.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(source.is_test, is_test)
    assert (source.class_names, np.asarray(source.labels).tolist()) == (("ä", "b"), [0, 1, 0])
    assert read_from("svhn", tmp_path) == [tmp_path / "svhn.npz"] == [stand_in("svhn", tmp_path)]
    lay_out(tmp_path / "aside", ["places365"], 1)
    (tmp_path / "aside" / "places365").rename(tmp_path / "svhn")
    with pytest.raises(DataError, match=r"both .*svhn and .*svhn.npz stand for svhn; keep one"):
        load_source("svhn", tmp_path)
    (tmp_path / "svhn.npz").unlink()
    assert len(load_source("svhn", tmp_path)) == 10
    assert status("svhn", tmp_path) == "custom"


def test_the_root_is_the_option_then_the_environment_then_params_then_a_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SALCLI_DATA", "~/environment")
    assert data_root(Path("~/option"), "params") == tmp_path / "option"
    assert data_root(None, "params") == tmp_path / "environment"
    monkeypatch.delenv("SALCLI_DATA")
    assert data_root(None, "params", tmp_path) == tmp_path / "params"
    assert data_root(None, "~/params", Path("workspace")) == tmp_path / "params"
    assert data_root(None, "/params", Path("workspace")) == Path("/params")
    assert data_root(None, None, tmp_path) == tmp_path / "data" / "raw"
