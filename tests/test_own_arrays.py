"""One's own .npz file in place of a published set."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_data import lay_out
from preparing import Malicious, data_params, prepared, random_images, refused

from salcli.data.catalogue import DATA_SETS
from salcli.data.loading import load_source
from salcli.errors import DataError


def test_ones_own_file_or_folder_wins_over_the_published_files(tmp_path: Path) -> None:
    lay_out(tmp_path, ["svhn"], 2)
    np.savez(tmp_path / "svhn.npz", images=random_images(3), labels=[0, 1, 2])
    assert len(load_source("svhn", tmp_path)) == 3
    lay_out(tmp_path / "aside", ["places365"], 1)
    (tmp_path / "aside" / "places365").rename(tmp_path / "svhn")
    with pytest.raises(DataError, match=r"both .*svhn and .*svhn.npz stand for svhn; keep one"):
        load_source("svhn", tmp_path)
    (tmp_path / "svhn.npz").unlink()
    assert len(load_source("svhn", tmp_path)) == 10


def test_every_name_can_be_an_npz_of_ones_own(tmp_path: Path) -> None:
    for name, entry in DATA_SETS.items():
        np.savez(tmp_path / f"{name}.npz", images=random_images(4), labels=[3, 5, 5, 3])
        source = load_source(name, tmp_path)
        np.testing.assert_array_equal(source.pictures, random_images(4).transpose(0, 3, 1, 2))
        assert (source.labels is None) == (not entry.labeled)
        if source.labels is not None:
            assert source.labels.tolist() == [0, 1, 1, 0]
            assert source.class_names == ("3", "5")


def test_an_npz_may_have_an_official_split_and_names(tmp_path: Path) -> None:
    images, is_test = random_images(4)[..., 0], np.array([True, False, True, False])
    np.savez(tmp_path / "mnist.npz", images=images, labels=[1, 0, 1, 0], is_test=is_test, class_names=["ä", "b"])
    found = prepared(tmp_path, data_params(tmp_path, "mnist", channels=1), "mnist")
    np.testing.assert_array_equal(found.images, images[:, None])
    assert found.class_names == ("ä", "b")
    assert found.is_test is not None
    assert found.is_test.tolist() == is_test.tolist()


def test_an_npz_of_keras_is_understood(tmp_path: Path) -> None:
    images = random_images(5)
    parts = {"x_train": images[:3], "y_train": [[1], [0], [1]], "x_test": images[3:], "y_test": [[0], [1]]}
    np.savez(tmp_path / "cifar10.npz", **parts)
    source = load_source("cifar10", tmp_path)
    np.testing.assert_array_equal(source.pictures, images.transpose(0, 3, 1, 2))
    assert source.labels is not None
    assert source.is_test is not None
    assert source.labels.tolist() == [1, 0, 1, 0, 1]
    assert source.is_test.tolist() == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"pixels": np.zeros(3)}, "has no `images`, and no x_train, y_train, x_test, y_test; it has pixels"),
        (
            {"images": np.zeros((2, 4, 4))},
            "images must be n × height × width [× 1 or 3] of uint8, got 2 × 4 × 4 of flo",
        ),
        ({"images": np.zeros((2, 3, 4, 4), np.uint8)[..., :2]}, "got 2 × 3 × 4 × 2 of uint8"),
        ({"images": np.zeros((0, 4, 4), np.uint8)}, "holds no images"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": [1]}, "`labels` must be 2 integers, got 1 of int64"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": [0, -1]}, "`labels` must not be negative, got -1"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": [0.5, 1]}, "`labels` must be 2 integers"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "is_test": [0, 1]}, "`is_test` must be 2 booleans"),
        (
            {"images": np.zeros((2, 4, 4), np.uint8), "labels": [0, 2], "class_names": ["a", "b"]},
            "labels run from 0 to 2, but `class_names` has 2 names",
        ),
        (
            {"images": np.zeros((2, 4, 4), np.uint8), "labels": [0, 1], "class_names": ["a", "b", "c"]},
            "class c has no images",
        ),
        ({"images": np.array([None, {}])}, "cannot be read as .npz"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": [1, 1]}, "has one class only (1)"),
        ({"images": np.zeros((2, 4, 4), np.uint8)}, "has no labels, so it cannot be the ID set"),
    ],
)
def test_a_wrong_npz_is_refused(tmp_path: Path, arrays: dict[str, Any], reason: str) -> None:
    np.savez(tmp_path / "mnist.npz", **arrays)
    assert reason in refused(tmp_path, data_params(tmp_path, "mnist"), "mnist")


def test_a_damaged_npz_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mnist.npz"
    np.savez_compressed(path, images=random_images(40), labels=np.arange(40) % 2)
    good = path.read_bytes()
    for content in (b"", b"PK", b"no zip", good[:-100], good[:100], good[:3000] + b"?" * 500 + good[3500:]):
        path.write_bytes(content)
        message = refused(tmp_path, data_params(tmp_path, "mnist"), "mnist")
        assert message.startswith(f"{path} cannot be read as .npz (")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images.npy", pickle.dumps(Malicious(tmp_path / "trace")))
    refused(tmp_path, data_params(tmp_path, "mnist"), "mnist")
    assert not (tmp_path / "trace").exists()
