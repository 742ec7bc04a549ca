"""Folders of one's own images: classes, official splits, and all that people leave in them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from PIL import Image
from preparing import data_params, prepared, refused
from test_bad_input import nobody
from test_cli import files, salcli, write_params

from salcli.artifacts.images import read_image_set, read_made_with
from salcli.artifacts.layout import Workspace, prepared_set
from salcli.data.image_folder import image_files
from salcli.data.loading import load_source
from salcli.errors import DataError
from salcli.stages import prepare

SIZE = 8


def save(path: Path, value: int, size: int = SIZE) -> None:
    """An image of one gray, by which it can be told."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size, size, 3), value, np.uint8)).save(path)


def lay(root: Path, *names: str) -> None:
    """Images of gray 0, 1, 2, … in the given places."""
    for value, name in enumerate(names):
        save(root / name, value)


def grays(root: Path, name: str = "cifar10") -> list[int]:
    """Which images are found, in which order."""
    files_found = load_source(name, root).pictures
    assert isinstance(files_found, tuple)
    return [np.asarray(Image.open(path))[0, 0, 0] for path in files_found]


# --- layouts


def test_folders_are_classes_in_the_order_of_their_names(tmp_path: Path) -> None:
    lay(tmp_path / "root" / "cifar10", "dog/b.png", "cat/deep/er/2.png", "dog/a.PNG", "cat/1.bmp")
    found = prepared(tmp_path, data_params(tmp_path / "root", image_size=SIZE), "cifar10")
    assert found.class_names == ("cat", "dog")
    assert found.labels is not None
    assert found.labels.tolist() == [0, 0, 1, 1]
    assert found.images[:, 0, 0, 0].tolist() == [3, 1, 2, 0]
    assert found.is_test is None


def test_train_and_test_are_an_official_split(tmp_path: Path) -> None:
    lay(tmp_path / "root" / "cifar10", "train/b/1.png", "train/a/1.png", "test/a/1.png", "test/b/1.png", "test/b/2.png")
    found = prepared(tmp_path, data_params(tmp_path / "root", image_size=SIZE), "cifar10")
    assert found.class_names == ("a", "b")
    assert found.labels is not None
    assert found.is_test is not None
    assert found.images[:, 0, 0, 0].tolist() == [1, 0, 2, 3, 4]
    assert found.labels.tolist() == [0, 1, 0, 1, 1]
    assert found.is_test.tolist() == [False, False, True, True, True]


def test_a_flat_folder_has_no_labels_and_serves_as_ood_only(tmp_path: Path) -> None:
    lay(tmp_path / "fashion-mnist", "b.png", "a.png")
    source = load_source("fashion-mnist", tmp_path)
    assert source.labels is None
    assert grays(tmp_path, "fashion-mnist") == [1, 0]
    ood = data_params(tmp_path, ood=["fashion-mnist"], image_size=SIZE)
    assert len(prepared(tmp_path, ood, "fashion-mnist")) == 2
    shutil.rmtree(tmp_path / "workspace")
    message = refused(tmp_path, data_params(tmp_path, "fashion-mnist", image_size=SIZE), "fashion-mnist")
    assert message == (
        "fashion-mnist has no labels, so it cannot be the ID set; put its images into one folder a class, "
        "or `labels` into its .npz file"
    )


def test_an_ood_set_takes_all_images_below_and_may_have_an_official_split(tmp_path: Path) -> None:
    lay(tmp_path / "textures", "b/1.png", "c.png", "a/x/1.png")
    (tmp_path / "textures" / "empty").mkdir()
    assert grays(tmp_path, "textures") == [2, 0, 1]
    lay(tmp_path / "isun", "train/1.png", "test/1.png", "test/2.png")
    source = load_source("isun", tmp_path)
    assert source.is_test is not None
    assert source.is_test.tolist() == [False, True, True]


def test_what_is_no_image_is_ignored(tmp_path: Path) -> None:
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
        (["a/1.png"], [], "cifar10 has one class only (a); ID data need at least two"),
        (["1.png"], [], "has no labels"),
        (["a/1.png", "b/1.png", "stray.png"], [], "has 1 images beside its classes (stray.png)"),
        (["train/a/1.png", "test/a/1.png", "test/b/1.png"], [], "must have the same classes, but only one has b"),
        (["train/a/1.png", "train/b/1.png"], [], "has train/, but no test/"),
    ],
)
def test_a_folder_that_makes_no_id_set_is_refused(
    tmp_path: Path, names: list[str], folders: list[str], reason: str
) -> None:
    root = tmp_path / "root"
    (root / "cifar10").mkdir(parents=True)
    lay(root / "cifar10", *names)
    for folder in folders:
        (root / "cifar10" / folder).mkdir(parents=True)
    assert reason in refused(tmp_path, data_params(root, image_size=SIZE), "cifar10")


def test_a_published_folder_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "LSUN" / "deep").mkdir(parents=True)
    message = refused(tmp_path, data_params(tmp_path, ood=["lsun-c"]), "lsun-c")
    assert message == f"{tmp_path / 'LSUN'} holds no images; get them again: salcli data fetch lsun-c"


# --- links


def test_links_to_files_and_folders_are_followed(tmp_path: Path) -> None:
    lay(tmp_path / "elsewhere", "pile/1.png", "2.png")
    lay(tmp_path / "root" / "cifar10", "a/0.png", "b/0.png")
    (tmp_path / "root" / "cifar10" / "c").symlink_to(tmp_path / "elsewhere" / "pile")
    (tmp_path / "root" / "cifar10" / "b" / "1.png").symlink_to(tmp_path / "elsewhere" / "2.png")
    source = load_source("cifar10", tmp_path / "root")
    assert source.class_names == ("a", "b", "c")
    assert grays(tmp_path / "root") == [0, 1, 1, 0]


def test_links_in_circles_end_and_bring_in_no_other_class(tmp_path: Path) -> None:
    folder = tmp_path / "cifar10"
    lay(folder, "a/1.png", "b/1.png")
    (folder / "a" / "up").symlink_to(folder)
    (folder / "a" / "self").symlink_to(folder / "a")
    (folder / "b" / "self").symlink_to(".")
    assert grays(tmp_path) == [0, 1]
    assert len(image_files(folder)) == 2


def test_a_link_to_nowhere_is_a_bad_image(tmp_path: Path) -> None:
    root = tmp_path / "root"
    lay(root / "cifar10", "a/1.png", "b/1.png")
    (root / "cifar10" / "b" / "2.png").symlink_to(tmp_path / "nowhere.png")
    message = refused(tmp_path, data_params(root, image_size=SIZE), "cifar10")
    assert f"{root / 'cifar10' / 'b' / '2.png'} cannot be decoded: no such file or directory" in message


def test_a_folder_that_may_not_be_read_is_named() -> None:
    with TemporaryDirectory() as root:  # pytest's own folders are closed to others
        Path(root).chmod(0o755)
        lay(Path(root, "cifar10"), "a/1.png", "b/1.png")
        Path(root, "cifar10", "b").chmod(0)
        with nobody(), pytest.raises(DataError, match=r"cifar10: .*/b cannot be read \(Permission denied\)"):
            load_source("cifar10", Path(root))


# --- bad images


@pytest.fixture
def with_bad_images(tmp_path: Path) -> Path:
    """Class a has 5 images, three of them bad; class b has 2 good ones."""
    root = tmp_path / "root"
    lay(root / "cifar10", "a/1.png", "a/2.png", "b/1.png", "b/2.png")
    (root / "cifar10" / "a" / "empty.png").write_bytes(b"")
    (root / "cifar10" / "a" / "foreign.jpg").write_bytes(b"<html>not found</html>")
    short = root / "cifar10" / "a" / "short.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)).save(short)
    short.write_bytes(short.read_bytes()[:150])
    return root


def test_a_bad_image_is_refused_with_its_name_a_reason_and_the_cure(with_bad_images: Path, tmp_path: Path) -> None:
    message = refused(tmp_path, data_params(with_bad_images, image_size=SIZE), "cifar10")
    assert message == (
        f"{with_bad_images / 'cifar10' / 'a' / 'empty.png'} cannot be decoded: it is empty; replace or remove it, or "
        "leave such files out with data.on_bad_image: skip"
    )


def test_bad_images_can_be_left_out_and_are_counted(with_bad_images: Path, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "workspace")
    params = data_params(with_bad_images, image_size=SIZE, on_bad_image="skip")
    done = prepare.prepare_set(workspace, params, "cifar10")
    assert done.counts == {"images": 4, "classes": 2, "skipped": 3}
    assert done.note.startswith("cifar10 without cifar10/a/empty.png (it is empty), cifar10/a/foreign.jpg (it is no ")
    found = workspace.find(prepared_set("cifar10"))
    image_set = read_image_set(found)
    assert image_set.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    assert image_set.labels is not None
    assert image_set.labels.tolist() == [0, 0, 1, 1]
    about = read_made_with(found)
    assert about["n_skipped"] == 3
    assert about["skipped"] == ["cifar10/a/empty.png", "cifar10/a/foreign.jpg", "cifar10/a/short.png"]
    assert list(files(tmp_path / "workspace")) == ["data/prepared/cifar10.h5"]
    # as small as if the bad ones had never been there
    for name in ("empty.png", "foreign.jpg", "short.png"):
        (with_bad_images / "cifar10" / "a" / name).unlink()
    prepare.prepare_set(Workspace(tmp_path / "clean"), params, "cifar10")
    sizes = [(tmp_path / place / prepared_set("cifar10").name).stat().st_size for place in ("workspace", "clean")]
    assert abs(sizes[0] - sizes[1]) < 200


def test_a_class_or_set_of_bad_images_only_is_refused_also_where_they_are_skipped(
    with_bad_images: Path, tmp_path: Path
) -> None:
    params = data_params(with_bad_images, image_size=SIZE, on_bad_image="skip")
    for name in ("1.png", "2.png"):
        (with_bad_images / "cifar10" / "a" / name).unlink()
    message = refused(tmp_path, params, "cifar10")
    assert message.startswith("cifar10: no image of class a could be decoded; cifar10 without cifar10/a/empty.png")
    (with_bad_images / "textures").mkdir()
    (with_bad_images / "textures" / "1.jpg").write_bytes(b"?")
    assert "textures: no image could be decoded; textures without textures/1.jpg" in refused(
        tmp_path, params, "textures"
    )


def test_the_table_shows_what_was_skipped(
    with_bad_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"data.image_size": SIZE, "data.channels": 3, "data.root": "root", "data.id": "cifar10"}
    write_params(tmp_path, shape)
    monkeypatch.chdir(tmp_path)
    result = salcli("prepare", "id-set")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: root/cifar10/a/empty.png cannot be decoded: it is empty; replace")
    write_params(tmp_path, {**shape, "data.on_bad_image": "skip"})
    result = salcli("prepare", "id-set")
    assert result.exit_code == 0, result.output
    assert "images 4  classes 2  skipped 3" in result.output
    assert "cifar10/a/empty.png (it is empty)" in " ".join(result.output.split())


def test_names_that_are_no_text_are_kept_and_can_be_shown(tmp_path: Path) -> None:
    root = tmp_path / "root"
    lay(root / "cifar10", "a/1.png", os.fsdecode(b"b\xff/1.png"))
    params = data_params(root, image_size=SIZE, on_bad_image="skip")
    assert prepared(tmp_path, params, "cifar10").class_names == ("a", os.fsdecode(b"b\xff"))
    (root / "cifar10" / "a" / os.fsdecode(b"\xff.png")).write_bytes(b"")
    done = prepare.prepare_set(Workspace(tmp_path / "workspace"), params, "cifar10")
    assert done.note == "cifar10 without cifar10/a/\ufffd.png (it is empty)"
    with pytest.raises(DataError, match="a/\ufffd\\.png cannot be decoded: it is empty"):
        prepare.prepare_set(Workspace(tmp_path), data_params(root, image_size=SIZE), "cifar10")
