"""prepare: what is read, counted, refused and written."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import files
from helpers.custom_images import SIZE, lay_out, picture, save
from helpers.fake_data import lay_out as lay_out_sets
from helpers.preparing import data_params, prepared, refused
from helpers.quick import REPOSITORY
from PIL import Image

from salcli.errors import DataError, StorageError
from salcli.params.schema import DataParams, Params, load_params
from salcli.pipeline import prepare
from salcli.pipeline.inputs import known_truth, ood_test_samples, wild_samples
from salcli.store.files import read_header
from salcli.store.formats import read_file_names, read_id_split, read_samples, read_wild_set
from salcli.store.layout import Experiment, Workspace, prepared_set, unseen_set

CUSTOM = {
    "data.id": "labeled", "data.ood": ["unlabeled"], "data.test_ood": ["known-odd"], "data.pi": ["unknown"],
    "data.id_shares": {"train": 0.6, "calibration": 0.2, "wild": 0, "test": 0.2}, "data.on_bad_image": "skip",
}  # fmt: skip
SHARES = {"train": 0.4, "calibration": 0.2, "wild": 0.2, "test": 0.2}
WILD = Experiment(0, "unlabeled")
MIXED = Experiment(0, "known-odd", 0.5)


def custom_params(photos: Path, **changes: Any) -> Params:
    paths = {name: str(photos / name) for name in ("labeled", "unlabeled", "known-odd")}
    more = {f"data.{key}": value for key, value in changes.items()}
    return load_params(REPOSITORY / "params.yaml", {**CUSTOM, "data.custom": paths, **more})[0]


def all_prepared(root: Path, data: DataParams, seed: int = 0) -> Workspace:
    workspace = Workspace(root)
    for name in (data.id, *data.ood):
        prepare.prepare_set(workspace, data, name)
    for name in data.test_ood:
        prepare.prepare_set(workspace, data, name, artifact=unseen_set(name))
    prepare.prepare_split(workspace, data, Experiment(seed))
    return workspace


def lay(root: Path, *names: str) -> None:
    """Images of gray 0, 1, 2, … at the given paths."""
    for value, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((SIZE, SIZE, 3), value, np.uint8)).save(root / name)


# --- sets


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["a/1.png"], "cifar10 has one class only (a); ID data need at least two, a folder for each"),
        (
            ["1.png"],
            "cifar10 has no labels, so it cannot be the ID set; put its images into one folder a class, "
            "or `labels` into its .npz file",
        ),
    ],
)
def test_a_set_without_classes_serves_as_ood_only(tmp_path: Path, names: list[str], reason: str) -> None:
    lay(tmp_path / "root" / "cifar10", *names)
    assert refused(tmp_path, data_params(tmp_path / "root", image_size=SIZE), "cifar10") == reason
    ood = data_params(tmp_path / "root", "svhn", ood=["cifar10"], image_size=SIZE)
    assert len(prepared(tmp_path, ood, "cifar10")) == 1


def test_the_plane_is_split_into_the_sizes_of_the_paper(tmp_path: Path) -> None:
    params = data_params(
        tmp_path, "gaussians-2d", ["ring-2d", "cluster-2d"], image_size=1, channels=2, pi=[0.1],
        id_shares={"train": 0.2, "calibration": 0.2, "wild": 0.6, "test": "official"},
    )  # fmt: skip
    workspace = Workspace(tmp_path)
    for name in (params.id, *params.ood):
        prepare.prepare_set(workspace, params, name)
    assert prepare.prepare_split(workspace, params, Experiment(0)).counts == {
        "train": 3_000, "calibration": 3_000, "wild": 9_000, "test": 3_000,
    }  # fmt: skip
    for ood in params.ood:
        counts = prepare.prepare_wild(workspace, params, Experiment(0, ood, 0.1)).counts
        assert counts == {"wild": 10_000, "of it OOD": 1_000, "OOD test": 1_000}


@pytest.fixture
def svhn(tmp_path: Path) -> Path:
    lay_out_sets(tmp_path / "workspace" / "pile", ["svhn"], 2)
    return tmp_path / "workspace" / "pile"


def test_the_environment_variable_wins_over_the_root(
    svhn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SALCLI_DATA", str(svhn))
    assert len(prepared(tmp_path, data_params(tmp_path), "svhn")) == 30


def test_the_root_is_relative_to_the_workspace_or_to_home(
    svhn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(prepared(tmp_path, data_params(Path("pile")), "svhn")) == 30
    monkeypatch.setenv("HOME", str(tmp_path / "workspace"))
    assert len(prepared(tmp_path, data_params(Path("~/pile")), "svhn")) == 30


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


def test_bad_images_can_be_left_out_and_are_counted(with_bad_images: Path, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "workspace")
    params = data_params(with_bad_images, image_size=SIZE, on_bad_image="skip")
    done = prepare.prepare_set(workspace, params, "cifar10")
    assert done.counts == {"images": 4, "classes": 2, "skipped": 3}
    assert done.note.startswith("cifar10 without cifar10/a/empty.png (it is empty), cifar10/a/foreign.jpg (it is not ")
    found = workspace.find(prepared_set("cifar10"))
    samples = read_samples(found)
    assert samples.array[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    assert samples.labels is not None
    assert samples.labels.tolist() == [0, 0, 1, 1]
    about = read_header(found).about
    assert about["n_skipped"] == 3
    assert about["skipped"] == ["cifar10/a/empty.png", "cifar10/a/foreign.jpg", "cifar10/a/short.png"]
    assert list(files(tmp_path / "workspace")) == ["data/prepared/cifar10.h5"]
    # as small as if the bad ones had never been there
    for name in ("empty.png", "foreign.jpg", "short.png"):
        (with_bad_images / "cifar10" / "a" / name).unlink()
    prepare.prepare_set(Workspace(tmp_path / "clean"), params, "cifar10")
    sizes = [(tmp_path / place / prepared_set("cifar10").path).stat().st_size for place in ("workspace", "clean")]
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


# --- custom sets


def test_the_names_of_files_are_kept_with_their_images(tmp_path: Path) -> None:
    photos = lay_out(tmp_path)
    odd_name = os.fsdecode(b'caf\xe9 "1"\n.png')
    save(photos / "labeled" / "b" / odd_name, picture("b", np.random.default_rng(9)))
    workspace = all_prepared(tmp_path / "w", custom_params(photos).data)
    names = read_file_names(workspace.find(prepared_set("labeled")))
    assert len(names) == len(read_samples(workspace.find(prepared_set("labeled")))) == 41
    assert names[0] == "a/0.png"
    assert f"b/{odd_name}" in names


@pytest.mark.parametrize("seed", [0, 1])
def test_no_picture_is_in_two_parts_whatever_is_copied_where(tmp_path: Path, seed: int) -> None:
    """The slow truth: the pixels themselves, of every part."""
    photos = lay_out(tmp_path)
    first = (photos / "labeled" / "a" / "0.png").read_bytes()
    for copy in ("labeled/a/copy.png", "labeled/b/copy.png", "unlabeled/copy.png", "known-odd/copy.png"):
        (photos / copy).write_bytes(first)
    (photos / "known-odd" / "wild.png").write_bytes((photos / "unlabeled" / "day 0" / "3.png").read_bytes())
    params = custom_params(photos)
    workspace, experiment = all_prepared(tmp_path / "w", params.data, seed), Experiment(seed, "unlabeled")
    mixed = prepare.prepare_wild(workspace, params.data, experiment)
    assert mixed.counts == {"wild": 24, "OOD test": 0}
    assert mixed.note == "unlabeled: 1 images are also in labeled, pixel by pixel, and are left out"

    id_images = read_samples(workspace.find(prepared_set("labeled"))).array
    wild_images = read_samples(workspace.find(prepared_set("unlabeled"))).array
    split, wild = read_id_split(workspace.find(experiment.split)), read_wild_set(workspace.find(experiment.wild))
    unseen = ood_test_samples(workspace, params, experiment, "known-odd")
    parts = {part: {id_images[i].tobytes() for i in index} for part, index in vars(split).items()}
    assert parts.pop("wild") == set()
    parts["wild"] = {wild_images[i - len(id_images)].tobytes() for i in wild.source}
    parts["OOD test"] = {image.numpy().tobytes() for image in unseen.read(slice(None))}
    assert {name: len(part) for name, part in parts.items()} == {
        "train": 24, "calibration": 8, "test": 8, "wild": 24, "OOD test": 8,
    }  # fmt: skip
    assert len(set.union(*parts.values())) == sum(len(part) for part in parts.values())
    assert len(wild.ood_test) == 0
    assert known_truth(workspace, 24, experiment) is None


def test_wild_data_that_are_all_id_data_are_refused(tmp_path: Path) -> None:
    photos = lay_out(tmp_path)
    paths = {"labeled": "labeled", "unlabeled": "labeled/a", "known-odd": "known-odd"}
    data = custom_params(photos, custom={name: str(photos / path) for name, path in paths.items()}).data
    workspace = all_prepared(tmp_path / "w", data)
    with pytest.raises(DataError, match="all wild images are ID images, too"):
        prepare.prepare_wild(workspace, data, WILD)


def test_a_test_set_that_was_seen_is_refused(tmp_path: Path) -> None:
    photos = lay_out(tmp_path)
    paths = {"labeled": "labeled", "unlabeled": "unlabeled", "known-odd": "unlabeled/day 1"}
    params = custom_params(photos, custom={name: str(photos / path) for name, path in paths.items()})
    workspace = all_prepared(tmp_path / "w", params.data)
    prepare.prepare_wild(workspace, params.data, WILD)
    with pytest.raises(DataError, match="all 8 images of known-odd are also in the ID data or in the wild data"):
        ood_test_samples(workspace, params, WILD, "known-odd")


def test_copies_in_a_custom_set_are_never_wild_and_test_at_once(tmp_path: Path) -> None:
    photos = lay_out(tmp_path)
    for path in sorted((photos / "known-odd").glob("*.png")):
        (photos / "known-odd" / f"copy of {path.name}").write_bytes(path.read_bytes())
    params = custom_params(photos, pi=[0.5], id_shares=SHARES, ood=["known-odd"], test_ood=["known-odd"])
    workspace = all_prepared(tmp_path / "w", params.data)
    mixed = prepare.prepare_wild(workspace, params.data, MIXED)
    assert mixed.counts == {"wild": 12, "of it OOD": 6, "OOD test": 2}
    truth = known_truth(workspace, 12, MIXED)
    assert truth is not None
    assert int(truth.sum()) == 6
    wild = {image.numpy().tobytes() for image in wild_samples(workspace, params, MIXED).read(slice(None))}
    for unseen in ("", "known-odd"):  # of its own experiment, and as the unseen set of another one
        test = ood_test_samples(workspace, params, MIXED, unseen)
        assert not wild & {image.numpy().tobytes() for image in test.read(slice(None))}


# --- files


@pytest.fixture
def laid_out(tmp_path: Path) -> Path:
    lay_out_sets(tmp_path / "root", ["cifar10", "textures"], n_per_class=4)
    return tmp_path / "root"


def test_the_same_set_gives_the_same_bytes(laid_out: Path, tmp_path: Path) -> None:
    for name in ("one", "other"):
        prepare.prepare_set(Workspace(tmp_path / name), data_params(laid_out, on_bad_image="skip"), "textures")
        prepare.prepare_set(Workspace(tmp_path / name), data_params(laid_out), "cifar10")
    assert files(tmp_path / "one") == files(tmp_path / "other")
    assert len(files(tmp_path / "one")) == 2


def test_images_are_a_read_only_map_of_the_file(laid_out: Path, tmp_path: Path) -> None:
    array = prepared(tmp_path, data_params(laid_out), "cifar10").array
    assert isinstance(array, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0


def test_a_full_disk_is_noticed_before_anything_is_decoded(
    laid_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = dataclasses.make_dataclass("Usage", ["free"])
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(10_000_000))
    monkeypatch.setattr("salcli.data.decoding.fit_array", None)
    with pytest.raises(StorageError, match=r"cifar10.h5 needs 0.04 GB, 0.01 GB are free; make room, or choose"):
        prepared(tmp_path, data_params(laid_out, image_size=512), "cifar10")
    assert not files(tmp_path / "workspace")
