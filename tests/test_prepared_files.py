"""Prepared sets as files: maps of the disk, the same bytes each time, and room for them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import h5py
import numpy as np
import pytest
from fake_data import lay_out
from preparing import data_params, prepared, random_images
from test_cli import files

from salcli.artifacts.images import read_image_set, read_made_with, write_image_set
from salcli.artifacts.layout import Found, Workspace, prepared_set
from salcli.data.image_set import ImageSet
from salcli.errors import StorageError
from salcli.stages import prepare


@pytest.fixture
def laid_out(tmp_path: Path) -> Path:
    lay_out(tmp_path / "root", ["cifar10", "textures"], n_per_class=4)
    return tmp_path / "root"


def test_images_are_read_as_a_read_only_map_of_the_file(laid_out: Path, tmp_path: Path) -> None:
    found = prepared(tmp_path, data_params(laid_out), "cifar10")
    assert isinstance(found.images, np.memmap)
    assert not found.images.flags.writeable
    path = tmp_path / "workspace" / prepared_set("cifar10").name
    with h5py.File(path) as file:
        np.testing.assert_array_equal(found.images, file["images"])
        assert file["images"].chunks is None
    about = read_made_with(Found(path))
    assert (about["image_size"], about["channels"], about["n_skipped"]) == (32, 3, 0)


def test_a_file_that_cannot_be_mapped_is_read(tmp_path: Path) -> None:
    path, images = tmp_path / "set.h5", random_images(3).transpose(0, 3, 1, 2)
    for content in (images, images[:0]):
        write_image_set(path, ImageSet(content, is_test=np.ones(len(content), bool)), "some")
        with h5py.File(path, "r+") as file:
            del file["images"]
            file.create_dataset("images", data=content, chunks=(1, 3, 32, 32), maxshape=(None, 3, 32, 32))
        found = read_image_set(Found(path)).images
        assert not isinstance(found, np.memmap)
        assert not found.flags.writeable
        np.testing.assert_array_equal(found, content)


def test_a_set_without_images_is_stored_and_read(tmp_path: Path) -> None:
    write_image_set(tmp_path / "set.h5", ImageSet(np.zeros((0, 3, 4, 4), np.uint8)), "none")
    assert read_image_set(Found(tmp_path / "set.h5")).images.shape == (0, 3, 4, 4)


def test_many_long_class_names_are_stored(tmp_path: Path) -> None:
    """An attribute of HDF5 takes 64 kB and no more."""
    names = tuple(f"ein ziemlich langer Name für die Klasse {k}" for k in range(5_000))
    image_set = ImageSet(np.zeros((5_000, 1, 1, 1), np.uint8), np.arange(5_000), names)
    write_image_set(tmp_path / "set.h5", image_set, "many")
    assert read_image_set(Found(tmp_path / "set.h5")).class_names == names


def test_the_same_set_gives_the_same_bytes(laid_out: Path, tmp_path: Path) -> None:
    for place in ("one", "other"):
        prepare.prepare_set(Workspace(tmp_path / place), data_params(laid_out, on_bad_image="skip"), "textures")
        prepare.prepare_set(Workspace(tmp_path / place), data_params(laid_out), "cifar10")
    assert files(tmp_path / "one") == files(tmp_path / "other")
    assert len(files(tmp_path / "one")) == 2


def test_a_disk_without_room_is_noticed_before_anything_is_decoded(
    laid_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = dataclasses.make_dataclass("Usage", ["free"])
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(10_000_000))
    monkeypatch.setattr("salcli.data.decoding._from_array", None)
    with pytest.raises(
        StorageError, match=r"cifar10.h5 needs 0.04 GB, 0.01 GB are free; make room, or choose a smaller"
    ):
        prepared(tmp_path, data_params(laid_out, image_size=512), "cifar10")
    assert not files(tmp_path / "workspace")
