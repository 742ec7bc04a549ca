"""The catalogue: records agree with the packages that read the same files, and sets are found by name."""

from pathlib import Path

import numpy as np
import pytest
from helpers.fake_data import lay_out, random_images, refusal

from salcli.data.catalogue import DATA_SETS, data_root, load_source, read_from
from salcli.data.fetching import fetch, stand_in, status
from salcli.errors import SalError


@pytest.mark.parametrize("name", [name for name, source in DATA_SETS.items() if source.is_embedded])
def test_embedded_sets_have_as_many_samples_as_it_says(name: str) -> None:
    source = DATA_SETS[name].read(Path())
    assert len(source) == DATA_SETS[name].n_images
    assert (source.labels is not None) == DATA_SETS[name].labeled
    if DATA_SETS[name].n_test:
        assert source.is_test is not None
        assert source.is_test.sum() == DATA_SETS[name].n_test


# --- where sets are looked for


def test_a_set_that_is_not_there_is_refused_with_both_remedies(tmp_path: Path) -> None:
    message = refusal("cifar100-first50", tmp_path / "nowhere")
    place = f"looked for cifar-100-python, cifar100/ and cifar100.npz in {tmp_path / 'nowhere'}"
    assert message.startswith(f"cifar100 is not there: {place}")
    assert "salcli data fetch cifar100, or put a folder of images or an .npz file there" in message
    message = refusal("openimage-o", tmp_path)
    assert "looked for benchmark_imglist/imagenet, images_largescale/openimage_o, openimage-o/ and" in message
    assert "`salcli data list` says how to get it, or put a folder" in message
    with pytest.raises(SalError, match="openimage-o: salcli cannot download it; `salcli data list` says how"):
        list(fetch(["openimage-o"], tmp_path))


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
    assert status("svhn", tmp_path) == "custom"
    (tmp_path / "svhn").mkdir()
    assert f"both {tmp_path / 'svhn'} and {tmp_path / 'svhn.npz'} stand for svhn; keep one" in refusal("svhn", tmp_path)


def test_the_root_is_the_option_then_the_environment_then_params_then_a_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SALCLI_DATA", "~/environment")
    assert data_root(Path("~/option"), "params") == tmp_path / "option"
    assert data_root(None, "params") == tmp_path / "environment"
    monkeypatch.delenv("SALCLI_DATA")
    assert data_root(None, "params", tmp_path) == tmp_path / "params"
    assert data_root(None, None, tmp_path) == tmp_path / "data" / "raw"
