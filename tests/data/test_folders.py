"""Sets that users bring: folders of images, CSV lists, .npz files, and all that people leave in them."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.fake_data import random_images, refusal
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from salcli.data.catalogue import load_source
from salcli.data.duplicates import first_of_each, not_in, sample_digests
from salcli.data.folders import NAME, RESERVED, name_for, read_custom, read_from_custom
from salcli.errors import SalError


def lay(root: Path, *names: str) -> None:
    """Images of gray 0, 1, 2, … at the given paths."""
    for value, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(root / name)


def grays(root: Path, name: str = "cifar10") -> list[int]:
    """Which images are found, in which order."""
    return [np.asarray(Image.open(path))[0, 0, 0] for path in load_source(name, root).files]


# --- folders


def test_folders_are_classes_in_the_order_of_their_names_and_other_files_are_ignored(tmp_path: Path) -> None:
    odd = os.fsdecode(b"e\xff")  # not text
    lay(tmp_path / "cifar10", "dog/b.png", "cat/deep/er/2.png", "dog/a.PNG", "cat/1.bmp", f"{odd}/1.png")
    for junk in ("README.txt", "cat/.hidden.png", "dog/note", ".git/x.png", "__MACOSX/cat/1.png"):
        (tmp_path / "cifar10" / junk).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "cifar10" / junk).write_bytes(b"junk")
    found = load_source("cifar10", tmp_path)
    assert found.class_names == ("cat", "dog", odd)
    np.testing.assert_array_equal(found.labels, [0, 0, 1, 1, 2])
    assert grays(tmp_path) == [3, 1, 2, 0, 4]
    assert found.is_test is None
    lay(tmp_path / "fashion-mnist", "b.png", "a.png")  # flat
    assert load_source("fashion-mnist", tmp_path).labels is None
    assert grays(tmp_path, "fashion-mnist") == [1, 0]


def test_an_ood_set_takes_all_images_below_and_train_and_test_are_an_official_split(tmp_path: Path) -> None:
    lay(tmp_path / "textures", "b/1.png", "c.png", "a/x/1.png")
    (tmp_path / "textures" / "empty").mkdir()
    assert grays(tmp_path, "textures") == [2, 0, 1]
    lay(tmp_path / "isun", "train/1.png", "test/1.png", "test/2.png")
    source = load_source("isun", tmp_path)
    np.testing.assert_array_equal(source.is_test, [False, True, True])
    lay(tmp_path / "cifar10", "train/b/1.png", "train/a/1.png", "test/a/1.png", "test/b/1.png", "test/b/2.png")
    found = load_source("cifar10", tmp_path)
    assert (found.class_names, grays(tmp_path)) == (("a", "b"), [1, 0, 2, 3, 4])
    np.testing.assert_array_equal(found.labels, [0, 1, 0, 1, 1])
    np.testing.assert_array_equal(found.is_test, [False, False, True, True, True])


@pytest.mark.parametrize(
    ("names", "folders", "reason"),
    [
        (["a/1.png"], ["b"], "class b has no images; add some, or remove its folder"),
        ([], ["a", "b"], "holds no images, neither in a, b nor"),
        (["a/1.png", "b/1.png", "stray.png"], [], "has 1 images beside its classes (stray.png)"),
        (["train/a/1.png", "test/a/1.png", "test/b/1.png"], [], "must have the same classes, but only one has b"),
    ],
)
def test_a_folder_that_makes_no_id_set_is_refused(
    tmp_path: Path, names: list[str], folders: list[str], reason: str
) -> None:
    (tmp_path / "cifar10").mkdir()
    lay(tmp_path / "cifar10", *names)
    for folder in folders:
        (tmp_path / "cifar10" / folder).mkdir(parents=True)
    assert reason in refusal("cifar10", tmp_path)


def test_links_are_followed_but_in_circles_they_end_and_bring_in_no_other_class(tmp_path: Path) -> None:
    folder = tmp_path / "root" / "cifar10"
    lay(tmp_path, "elsewhere/0.png", "root/cifar10/a/1.png")
    (folder / "b").symlink_to(tmp_path / "elsewhere")
    (folder / "a" / "up").symlink_to(folder)
    assert load_source("cifar10", tmp_path / "root").class_names == ("a", "b")
    assert grays(tmp_path / "root") == [1, 0]


# --- custom sets


@given(st.text(max_size=20).filter(lambda name: "/" not in name and "\0" not in name), st.lists(st.text(max_size=3)))
def test_any_folder_gets_a_name_that_params_take(name: str, taken: list[str]) -> None:
    found = name_for(Path("somewhere") / name, taken, "wild")
    assert NAME.fullmatch(found)
    assert found not in {*taken, *RESERVED}


# --- lists


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode(errors="surrogateescape"))
    return path


def test_a_list_needs_no_header_and_counts_from_its_folder(tmp_path: Path) -> None:
    file = write(tmp_path / "list.csv", 'x/1.png,cat\n"x/with, comma\nand line.png", dog \n\n/elsewhere/2.png,cat\n')
    source = read_custom("mine", [file], labeled=True)
    files = [tmp_path / "x/1.png", tmp_path / "x/with, comma\nand line.png", Path("/elsewhere/2.png")]
    assert source.files == tuple(files)
    assert source.class_names == ("cat", "dog")
    np.testing.assert_array_equal(source.labels, [0, 1, 0])
    assert source.is_test is None
    assert read_from_custom([file]) == [file, *files]
    assert read_from_custom([tmp_path]) == [tmp_path]
    wild = read_custom("mine", [write(file, os.fsdecode(b"a.png\n\xff.png,what\n"))], labeled=False)
    assert wild.labels is None
    assert wild.files == (tmp_path / "a.png", tmp_path / os.fsdecode(b"\xff.png"))
    text = "\ufeffLabel,note,PATH,split\n10,x,a.png,train\n9,,b.png,test\n"  # with a header, in any order
    source = read_custom("mine", [write(file, text)], labeled=True)
    assert source.class_names == ("9", "10")  # numbers by their value
    np.testing.assert_array_equal(source.labels, [1, 0])
    np.testing.assert_array_equal(source.is_test, [False, True])


# --- what cannot be read


TWO = np.zeros((2, 4, 4), np.uint8)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("nowhere", None, "nowhere does not exist; put images or vectors there, or give another path for mine"),
        ("parts", None, "has the folders test, train, val, which look like parts of a split, not like classes"),
        ("a.csv", "a.png,b\nc.png\n", "line 2: there is no label"),
        ("a.npz", {"pixels": np.zeros(3)}, "holds neither images nor vectors, but pixels; `images` (n × height"),
        ("a.npz", {"images": TWO.astype(float)}, "n × height × width [× 1 or 3] of uint8, got 2 × 4 × 4 of flo"),
        ("a.npz", {"images": TWO, "labels": [1]}, "`labels` must be 2 integers, got 1 of int64"),
    ],
)
def test_a_custom_set_that_cannot_be_read_says_what_to_give(
    tmp_path: Path, name: str, content: str | dict[str, Any] | None, reason: str
) -> None:
    lay(tmp_path / "parts", "test/1.png", "train/1.png", "val/1.png")
    if isinstance(content, dict):
        np.savez(tmp_path / name, **content)
    elif content is not None:
        write(tmp_path / name, content)
    with pytest.raises(SalError) as caught:
        read_custom("mine", [tmp_path / name], labeled=True)
    assert reason in str(caught.value)


def test_a_damaged_npz_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mnist.npz"
    np.savez_compressed(path, images=random_images(40), labels=np.arange(40) % 2)
    good = path.read_bytes()
    for content in (b"", good[:100], good[:3000] + b"?" * 500 + good[3500:]):
        path.write_bytes(content)
        assert refusal("mnist", tmp_path).startswith(f"{path} cannot be read as .npz (")


# --- duplicates


@given(st.lists(st.integers(0, 5), max_size=12), st.lists(st.integers(0, 5), max_size=12), st.booleans())
def test_known_images_and_copies_are_left_out_as_a_slow_search_does_it(
    known: list[int], values: list[int], once: bool
) -> None:
    slow = [i for i, value in enumerate(values) if value not in known and not (once and value in values[:i])]
    first = [i for i, value in enumerate(values) if value not in values[:i]]
    for shape, dtype in (((-1, 1, 1, 1), np.uint8), ((-1, 1), np.float32)):
        digests = [sample_digests(np.array(some, dtype).reshape(shape)) for some in (known, values)]
        assert not_in(*digests, each_once=once).tolist() == slow
        assert first_of_each(digests[1]).tolist() == first
