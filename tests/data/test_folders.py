"""Sets that users bring: folders of images, CSV lists, .npz files, and all that people leave in them."""

import os
import pickle
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from helpers.fake_data import Malicious, random_images, refusal
from helpers.users import nobody
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from salcli.data.catalogue import load_source
from salcli.data.duplicates import file_digests, first_of_each, not_in, pixel_digests
from salcli.data.folders import NAME, RESERVED, image_files, name_for, read_custom, read_from_custom
from salcli.errors import DataError
from salcli.progress import Silent


def lay(root: Path, *names: str) -> None:
    """Images of gray 0, 1, 2, … at the given paths."""
    for value, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(root / name)


def grays(root: Path, name: str = "cifar10") -> list[int]:
    """Which images are found, in which order."""
    return [np.asarray(Image.open(path))[0, 0, 0] for path in load_source(name, root).files]


# --- folders


def test_folders_are_classes_in_the_order_of_their_names(tmp_path: Path) -> None:
    odd = os.fsdecode(b"e\xff")  # not text
    lay(tmp_path / "cifar10", "dog/b.png", "cat/deep/er/2.png", "dog/a.PNG", "cat/1.bmp", f"{odd}/1.png")
    found = load_source("cifar10", tmp_path)
    assert found.class_names == ("cat", "dog", odd)
    np.testing.assert_array_equal(found.labels, [0, 0, 1, 1, 2])
    assert grays(tmp_path) == [3, 1, 2, 0, 4]
    assert found.is_test is None
    lay(tmp_path / "fashion-mnist", "b.png", "a.png")  # flat
    assert load_source("fashion-mnist", tmp_path).labels is None
    assert grays(tmp_path, "fashion-mnist") == [1, 0]


def test_train_and_test_are_an_official_split(tmp_path: Path) -> None:
    lay(tmp_path / "cifar10", "train/b/1.png", "train/a/1.png", "test/a/1.png", "test/b/1.png", "test/b/2.png")
    found = load_source("cifar10", tmp_path)
    assert found.class_names == ("a", "b")
    assert grays(tmp_path) == [1, 0, 2, 3, 4]
    np.testing.assert_array_equal(found.labels, [0, 1, 0, 1, 1])
    np.testing.assert_array_equal(found.is_test, [False, False, True, True, True])


def test_an_ood_set_takes_all_images_below_and_may_have_an_official_split(tmp_path: Path) -> None:
    lay(tmp_path / "textures", "b/1.png", "c.png", "a/x/1.png")
    (tmp_path / "textures" / "empty").mkdir()
    assert grays(tmp_path, "textures") == [2, 0, 1]
    lay(tmp_path / "isun", "train/1.png", "test/1.png", "test/2.png")
    source = load_source("isun", tmp_path)
    assert source.is_test is not None
    assert source.is_test.tolist() == [False, True, True]


def test_other_files_and_hidden_files_are_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "cifar10"
    lay(folder, "a/1.png", "b/1.png")
    for junk in (
        ".DS_Store", "README.txt", "a/.hidden.png", "a/._1.png", "a/labels.csv", "a/Thumbs.db", "b/note",
        ".git/x.png", "__MACOSX/a/1.png", "a/.cache/1.png",
    ):  # fmt: skip
        (folder / junk).parent.mkdir(exist_ok=True, parents=True)
        (folder / junk).write_bytes(b"junk")
    assert grays(tmp_path) == [0, 1]


@pytest.mark.parametrize(
    ("names", "folders", "reason"),
    [
        (["a/1.png"], ["b"], "class b has no images; add some, or remove its folder"),
        (["a/1.txt.png", "c/1.png"], ["b/deep/er"], "class b has no images"),
        (["train/a/1.png", "train/b/1.png", "test/a/1.png"], ["test/b"], "class b has no images"),
        ([], ["a", "b"], "holds no images, neither in a, b nor"),
        ([], [], "holds no images; put some there"),
        (["a/1.png", "b/1.png", "stray.png"], [], "has 1 images beside its classes (stray.png)"),
        (["train/a/1.png", "test/a/1.png", "test/b/1.png"], [], "must have the same classes, but only one has b"),
        (["train/a/1.png", "train/b/1.png"], [], "has train/, but no test/"),
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
    lay(tmp_path / "elsewhere", "pile/1.png", "2.png")
    folder = tmp_path / "root" / "cifar10"
    lay(folder, "a/0.png", "b/0.png")
    (folder / "c").symlink_to(tmp_path / "elsewhere" / "pile")
    (folder / "b" / "1.png").symlink_to(tmp_path / "elsewhere" / "2.png")
    (folder / "a" / "up").symlink_to(folder)
    (folder / "a" / "self").symlink_to(folder / "a")
    (folder / "b" / "self").symlink_to(".")
    assert load_source("cifar10", tmp_path / "root").class_names == ("a", "b", "c")
    assert grays(tmp_path / "root") == [0, 1, 1, 0]
    assert len(image_files(folder)) == 4


def test_a_folder_that_may_not_be_read_is_named() -> None:
    with TemporaryDirectory() as root:  # pytest's own folders are closed to others
        Path(root).chmod(0o755)
        lay(Path(root, "cifar10"), "a/1.png", "b/1.png")
        Path(root, "cifar10", "b").chmod(0)
        with nobody(), pytest.raises(DataError, match=r"cifar10: .*/b cannot be read \(Permission denied\)"):
            load_source("cifar10", Path(root))


# --- custom sets


@given(st.text(max_size=20).filter(lambda name: "/" not in name and "\0" not in name), st.lists(st.text(max_size=3)))
def test_any_folder_gets_a_name_that_params_take(name: str, taken: list[str]) -> None:
    found = name_for(Path("somewhere") / name, taken, "wild")
    assert NAME.fullmatch(found)
    assert found not in {*taken, *RESERVED}


@pytest.mark.parametrize(
    ("path", "labeled", "reason"),
    [
        ("nowhere", False, "nowhere does not exist; put a folder of images there, or give another path for mine"),
        ("note.txt", True, "note.txt is a file; give a folder of images, a .csv with their paths, or an .npz file"),
        ("empty", False, "empty holds no images; put some there"),
        ("parts", True, "has the folders test, train, val, which look like parts of a split, not like classes"),
    ],
)
def test_a_custom_set_that_cannot_be_read_says_what_to_give(
    tmp_path: Path, path: str, labeled: bool, reason: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.txt").touch()
    lay(tmp_path / "parts", "test/1.png", "train/1.png", "val/1.png")
    with pytest.raises(DataError) as caught:
        read_custom("mine", tmp_path / path, labeled=labeled)
    assert reason in str(caught.value)


# --- lists


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode(errors="surrogateescape"))
    return path


def test_a_list_needs_no_header_and_counts_from_its_folder(tmp_path: Path) -> None:
    file = write(tmp_path / "list.csv", 'x/1.png,cat\n"x/with, comma\nand line.png", dog \n\n/elsewhere/2.png,cat\n')
    source = read_custom("mine", file, labeled=True)
    files = [tmp_path / "x/1.png", tmp_path / "x/with, comma\nand line.png", Path("/elsewhere/2.png")]
    assert source.files == tuple(files)
    assert source.class_names == ("cat", "dog")
    np.testing.assert_array_equal(source.labels, [0, 1, 0])
    assert source.is_test is None
    assert read_from_custom("mine", file) == [file, *files]
    assert read_from_custom("mine", tmp_path) == [tmp_path]
    wild = read_custom("mine", write(file, os.fsdecode(b"a.png\n\xff.png,what\n")), labeled=False)
    assert wild.labels is None
    assert wild.files == (tmp_path / "a.png", tmp_path / os.fsdecode(b"\xff.png"))


def test_a_list_with_a_header_has_its_columns_in_any_order_and_may_have_a_split(tmp_path: Path) -> None:
    text = "\ufeffLabel,note,PATH,split\n10,x,a.png,train\n9,,b.png,test\n"
    source = read_custom("mine", write(tmp_path / "list.csv", text), labeled=True)
    assert source.class_names == ("9", "10")  # numbers by their value
    np.testing.assert_array_equal(source.labels, [1, 0])
    np.testing.assert_array_equal(source.is_test, [False, True])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "lists no images"),
        ("path,label\n", "lists no images"),
        ("path,name\na.png,b\n", "has no column label"),
        ("a.png,b\nc.png\n", "line 2: there is no label"),
        ("a.png,b\n,c\n", "line 2: there is no path"),
        ('a.png,b\n"c.png,d\n', "line 2: unexpected end of data"),
        ("path,label,split\na.png,b,dev\n", "the column split must hold train or test, got 'dev'"),
    ],
)
def test_a_list_that_cannot_be_read_says_where(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(DataError) as caught:
        read_custom("mine", write(tmp_path / "list.csv", text), labeled=True)
    assert reason in str(caught.value)


# --- .npz files


def test_an_npz_may_have_an_official_split_and_names(tmp_path: Path) -> None:
    images, is_test = random_images(4)[..., 0], np.array([True, False, True, False])
    np.savez(tmp_path / "mnist.npz", images=images, labels=[1, 0, 1, 0], is_test=is_test, class_names=["ä", "b"])
    found = load_source("mnist", tmp_path)
    np.testing.assert_array_equal(found.array, images[:, None])
    assert found.class_names == ("ä", "b")
    np.testing.assert_array_equal(found.is_test, is_test)


def test_an_npz_of_keras_is_understood(tmp_path: Path) -> None:
    images = random_images(5)
    parts = {"x_train": images[:3], "y_train": [[1], [0], [1]], "x_test": images[3:], "y_test": [[0], [1]]}
    np.savez(tmp_path / "cifar10.npz", **parts)
    source = load_source("cifar10", tmp_path)
    np.testing.assert_array_equal(source.array, images.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(source.labels, [1, 0, 1, 0, 1])
    np.testing.assert_array_equal(source.is_test, [False, False, False, True, True])


TWO = np.zeros((2, 4, 4), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"pixels": np.zeros(3)}, "has no `images`, and no x_train, y_train, x_test, y_test; it has pixels"),
        ({"images": TWO.astype(float)}, "must be n × height × width [× 1 or 3] of uint8, got 2 × 4 × 4 of flo"),
        ({"images": np.zeros((2, 3, 4, 2), np.uint8)}, "got 2 × 3 × 4 × 2 of uint8"),
        ({"images": TWO[:0]}, "holds no images"),
        ({"images": TWO, "labels": [1]}, "`labels` must be 2 integers, got 1 of int64"),
        ({"images": TWO, "labels": [0, -1]}, "`labels` must not be negative, got -1"),
        ({"images": TWO, "labels": [0.5, 1]}, "`labels` must be 2 integers"),
        ({"images": TWO, "is_test": [0, 1]}, "`is_test` must be 2 booleans"),
        ({"images": TWO, "labels": [0, 2], "class_names": ["a", "b"]}, "labels run from 0 to 2, but `class_names` has"),
        ({"images": TWO, "labels": [0, 1], "class_names": ["a", "b", "c"]}, "class c has no images"),
        ({"images": np.array([None, {}])}, "cannot be read as .npz"),
    ],
)
def test_a_wrong_npz_is_refused(tmp_path: Path, arrays: dict[str, Any], reason: str) -> None:
    np.savez(tmp_path / "mnist.npz", **arrays)
    assert reason in refusal("mnist", tmp_path)


def test_a_damaged_npz_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mnist.npz"
    np.savez_compressed(path, images=random_images(40), labels=np.arange(40) % 2)
    good = path.read_bytes()
    for content in (b"", b"PK", b"no zip", good[:-100], good[:100], good[:3000] + b"?" * 500 + good[3500:]):
        path.write_bytes(content)
        message = refusal("mnist", tmp_path)
        assert message.startswith(f"{path} cannot be read as .npz (")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images.npy", pickle.dumps(Malicious(tmp_path / "trace")))
    refusal("mnist", tmp_path)
    assert not (tmp_path / "trace").exists()


# --- duplicates


@given(st.lists(st.integers(0, 5), max_size=12), st.lists(st.integers(0, 5), max_size=12), st.booleans())
def test_known_images_and_copies_are_left_out_as_a_slow_search_does_it(
    known: list[int], values: list[int], once: bool
) -> None:
    slow = [i for i, value in enumerate(values) if value not in known and not (once and value in values[:i])]
    arrays = [np.array(some, np.uint8).reshape(-1, 1, 1, 1) for some in (known, values)]
    assert not_in(*arrays, each_once=once).tolist() == slow
    first = [i for i, value in enumerate(values) if value not in values[:i]]
    assert first_of_each(pixel_digests(arrays[1])).tolist() == first


def test_files_of_equal_bytes_have_equal_digests_and_unique_sizes_are_not_read(tmp_path: Path) -> None:
    contents = [b"same", b"same", b"diff", b"longer", b""]
    paths = [tmp_path / str(i) for i in range(5)]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    first, second, other, *unread = file_digests([*paths, tmp_path / "nowhere"], Silent())
    assert first == second != other != b""
    assert unread == [b""] * 3
