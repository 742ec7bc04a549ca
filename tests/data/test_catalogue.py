"""The catalogue: records agree with the packages that read the same files, and sets are found by name."""

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import numpy as np
import pytest
from helpers.fake_data import WRITERS, lay_out, random_images, refusal
from helpers.web import Web, serving
from pytorch_ood.dataset.img import LSUNCrop, LSUNResize, TinyImageNetCrop, TinyImageNetResize, TinyImages300k
from torchvision import datasets

from salcli.data import catalogue
from salcli.data.catalogue import DATA_SETS, DataSet, data_root, data_set, load_source, read_from
from salcli.data.fetching import fetch, stand_in, status
from salcli.errors import DataError, UnknownNameError

WEB = [source for source in DATA_SETS.values() if not source.is_embedded]


def written(source: DataSet) -> list[tuple[str, str, str | None]]:
    return [(file.url, file.name, file.checksum) for file in source.files]


def test_every_set_of_the_paper_and_more_is_known() -> None:
    assert set(DATA_SETS) == {
        *("digits-0-7", "digits-8-9", "photo-patches", "gaussians-2d", "ring-2d", "cluster-2d"),
        *("cifar10", "cifar100", "cifar100-first50", "cifar100-last50", "fashion-mnist", "mnist"),
        *("svhn", "textures", "places365", "lsun-c", "lsun-r", "isun", "tin-crop", "tin-resize", "300k-random"),
    }
    with pytest.raises(UnknownNameError, match="did you mean cifar10"):
        data_set("cifar-10")


@pytest.mark.parametrize("source", WEB, ids=lambda source: source.name)
def test_a_record_is_complete(source: DataSet) -> None:
    assert all((source.title, source.n_images > 0, source.licence, source.provides, source.home.startswith("http")))
    assert source.facts().items() >= {"name": source.name, "n_bytes": source.n_bytes}.items()
    for file in source.files:
        assert file.url.endswith(f"/{file.name}")
        algorithm, _, digits = str(file.checksum).partition(":")
        assert (algorithm, len(bytes.fromhex(digits))) == ("md5", 16)


@pytest.mark.parametrize("name", [name for name, source in DATA_SETS.items() if source.is_embedded])
def test_embedded_sets_have_as_many_images_as_it_says(name: str) -> None:
    source = DATA_SETS[name].read(Path())
    assert source.array is not None
    assert len(source) == DATA_SETS[name].n_images
    height, width = source.array.shape[2:]
    assert DATA_SETS[name].size == ("point" if height == 1 else f"{height}×{width} gray")
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


# --- torchvision reads what was fetched: the real classes, on small files of the published form


def fetch_small(name: str, root: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch a set whose files are replaced by small ones on a server of our own."""
    with serving(Web(files)) as web:
        ours = tuple(
            replace(
                file, url=web.url(file.name), checksum=f"md5:{hashlib.md5(files[file.name]).hexdigest()}", mirrors=()
            )
            for file in DATA_SETS[name].files
        )
        monkeypatch.setattr(catalogue, "DATA_SETS", {name: replace(DATA_SETS[name], files=ours)})
        assert [done.outcome for done in fetch([name], root)] == ["fetched"]


@pytest.mark.parametrize(("name", "theirs"), [("mnist", datasets.MNIST), ("fashion-mnist", datasets.FashionMNIST)])
def test_torchvision_reads_the_fetched_mnist(
    name: str, theirs: type[datasets.MNIST], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(tmp_path / "web", ["fashion-mnist"], 2)  # the packed files of both have the same names
    files = {path.name: path.read_bytes() for path in (tmp_path / "web").rglob("*.gz")}
    fetch_small(name, tmp_path / "root", files, monkeypatch)
    ours = load_source(name, tmp_path / "root")
    assert ours.is_test is not None
    assert ours.labels is not None
    for is_test in (False, True):
        read = theirs(tmp_path / "root", train=not is_test)
        assert read.targets.tolist() == ours.labels[ours.is_test == is_test].tolist()
        np.testing.assert_array_equal(read.data.numpy(), np.asarray(ours.array)[ours.is_test == is_test][:, 0])


# --- where sets are looked for


@pytest.mark.parametrize("name", WRITERS)
def test_a_set_that_is_not_there_is_refused_with_both_remedies(tmp_path: Path, name: str) -> None:
    message = refusal(name, tmp_path / "nowhere")
    whole = DATA_SETS[name].part_of or name
    assert message.startswith(f"{whole} is not there: looked for {DATA_SETS[name].paths[0]}, ")
    assert f"{whole}/ and {whole}.npz in {tmp_path / 'nowhere'}" in message
    assert f"salcli data fetch {whole}, or put a folder of images or an .npz file there" in message


def test_a_custom_file_or_folder_wins_over_the_published_files(tmp_path: Path) -> None:
    assert read_from("cifar100-first50", tmp_path) == [tmp_path / "cifar-100-python"]
    lay_out(tmp_path, ["svhn"], 2)
    assert read_from("svhn", tmp_path) == [tmp_path / "train_32x32.mat", tmp_path / "test_32x32.mat"]
    np.savez(tmp_path / "svhn.npz", images=random_images(3), labels=[0, 1, 2])
    assert len(load_source("svhn", tmp_path)) == 3
    assert read_from("svhn", tmp_path) == [tmp_path / "svhn.npz"] == [stand_in("svhn", tmp_path)]
    lay_out(tmp_path / "aside", ["places365"], 1)
    (tmp_path / "aside" / "places365").rename(tmp_path / "svhn")
    with pytest.raises(DataError, match=r"both .*svhn and .*svhn.npz stand for svhn; keep one"):
        load_source("svhn", tmp_path)
    (tmp_path / "svhn.npz").unlink()
    assert len(load_source("svhn", tmp_path)) == 10
    assert status("svhn", tmp_path) == "custom"


def test_any_set_can_be_replaced_by_an_npz(tmp_path: Path) -> None:
    for name, record in DATA_SETS.items():
        np.savez(tmp_path / f"{name}.npz", images=random_images(4), labels=[3, 5, 5, 3])
        source = load_source(name, tmp_path)
        np.testing.assert_array_equal(source.array, random_images(4).transpose(0, 3, 1, 2))
        assert (source.labels is None) == (not record.labeled)
        if source.labels is not None:
            assert source.labels.tolist() == [0, 1, 1, 0]
            assert source.class_names == ("3", "5")


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


def test_the_catalogue_imports_nothing_slow() -> None:
    slow = {"PIL", "torch", "torchvision", "pytorch_ood", "sklearn", "scipy"}
    code = f"import sys, salcli.data.catalogue; print({slow} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
