"""`salcli init` with images of one's own: what it finds, what it plans, and what it refuses."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_images import lay_out, options, picture, save
from test_cli import files, salcli
from test_init import refused

from salcli.data.splits import split_id
from salcli.errors import DataError
from salcli.params import load_params
from salcli.params_file import read_yaml
from salcli.planning.training_plan import _check_enough, image_size
from salcli.progress import Silent


def said(text: str) -> str:
    """In one line, without the table's columns."""
    return " ".join(text.split())


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return lay_out(tmp_path)


def init(folder: Path, *arguments: str) -> str:
    result = salcli("init", str(folder), *arguments)
    assert result.exit_code == 0, result.output + str(result.stderr)
    assert max(len(line) for line in result.stdout.splitlines() if not line.startswith(("made", "next"))) <= 100
    return said(result.stdout)


def denied(folder: Path, *arguments: str) -> str:
    """The message, once it is sure that nothing was written."""
    message = refused(salcli("init", str(folder), *arguments))
    assert message.startswith("error: ")
    assert "Traceback" not in message
    assert not folder.exists()
    return said(message)


# --- what it finds and plans


def test_two_folders_make_a_project(photos: Path, tmp_path: Path) -> None:
    shown = init(tmp_path / "d", *options(photos), "--test-ood", str(photos / "known-odd"))
    assert "labeled: 40 images 8×8 pixels, gray" in shown
    assert "a, b 20 images each" in shown
    assert "unlabeled: 24 images" in shown
    assert "known-odd: 8 images" in shown
    assert "small-cnn" in shown
    params, _ = load_params(tmp_path / "d" / "params.yaml")
    data = params.data
    assert data.own == {name: str(photos / name) for name in ("labeled", "unlabeled", "known-odd")}
    assert (data.id, data.ood, data.test_ood, data.pi) == ("labeled", ("unlabeled",), ("known-odd",), "unknown")
    assert (data.image_size, data.channels, data.on_bad_image) == (8, 1, "skip")
    assert data.id_shares.model_dump() == {"train": 0.6, "calibration": 0.2, "wild": 0, "test": 0.2}
    assert (params.rivals, params.seeds, params.model.backbone) == ((), (0,), "small-cnn")
    assert "data to fetch" not in shown


def test_what_the_user_sets_counts(photos: Path, tmp_path: Path) -> None:
    shown = init(tmp_path / "d", *options(photos), "--set", "data.image_size=16", "--set", "seeds=[3]")
    assert "16 × 16, 1 channel as you say" in shown
    params, _ = load_params(tmp_path / "d" / "params.yaml")
    assert (params.data.image_size, params.seeds) == (16, (3,))


def test_images_inside_of_the_project_move_with_it(tmp_path: Path) -> None:
    photos = lay_out(tmp_path / "d")
    init(tmp_path / "d", *options(photos))
    assert read_yaml(tmp_path / "d" / "params.yaml")["data"]["own"]["labeled"] == "photos/labeled"


def test_an_official_split_is_kept(tmp_path: Path) -> None:
    photos, rng = lay_out(tmp_path), np.random.default_rng(5)
    (photos / "labeled").rename(photos / "train")
    (photos / "labeled").mkdir()
    (photos / "train").rename(photos / "labeled" / "train")
    for kind in "ab":
        save(photos / "labeled" / "test" / kind / "1.png", picture(kind, rng))
    assert "test as given" in init(tmp_path / "d", *options(photos))
    shares = load_params(tmp_path / "d" / "params.yaml")[0].data.id_shares
    assert shares.model_dump() == {"train": 0.8, "calibration": 0.2, "wild": 0, "test": "official"}


def test_a_list_can_be_the_id_set(photos: Path, tmp_path: Path) -> None:
    lines = [f"{path.relative_to(tmp_path)},{path.parent.name}" for path in (photos / "labeled").rglob("*.png")]
    (tmp_path / "Mes étiquettes.csv").write_text("path,label\n" + "\n".join(lines))
    arguments = options(photos)
    arguments[1] = str(tmp_path / "Mes étiquettes.csv")
    assert "mes-etiquettes: 40 images" in init(tmp_path / "d", *arguments)


def test_what_is_odd_about_files_is_told_and_left_out(photos: Path, tmp_path: Path) -> None:
    (photos / "labeled" / "a" / "empty.png").write_bytes(b"")
    short = (photos / "labeled" / "b" / "0.png").read_bytes()[:60]
    (photos / "labeled" / "b" / "short.png").write_bytes(short)
    (photos / "labeled" / "notes.txt").write_text("x")
    (photos / "unlabeled" / "copy.png").write_bytes((photos / "labeled" / "a" / "3.png").read_bytes())
    (photos / "labeled" / "a" / "twin.png").write_bytes((photos / "labeled" / "a" / "4.png").read_bytes())
    shown = init(tmp_path / "d", *options(photos))
    assert "2 files of labeled, left out a/empty.png (it is empty), b/short.png (" in shown
    assert "1 files of labeled, left out their suffix is not" in shown
    assert "1 files of unlabeled, left out in labeled, too: copy.png" in shown
    assert "1 files of labeled, left out elsewhere in it: a/twin.png" in shown
    done = salcli("prepare", "--params", str(tmp_path / "d" / "params.yaml"))
    assert done.exit_code == 0, done.stderr
    assert "train 24 calibration 8 test 8" in said(done.stdout)
    assert "unlabeled: 1 images are in labeled as well" in said(done.stdout)


NAMES = ["with space", "quo\"te's", "ünï ☃", "new\nline", "$(touch x)", "[red]", os.fsdecode(b"no\xfftext")]


def test_names_are_only_names(tmp_path: Path) -> None:
    photos, rng = lay_out(tmp_path, n_labeled=0), np.random.default_rng(1)
    for name in NAMES:
        for i in range(6):
            save(photos / "labeled" / name / f"{name} {i}.png", picture("a", rng))
        save(photos / "unlabeled" / name / f"{name}.png", picture("odd", rng))
    (photos / "labeled" / NAMES[3] / f"bad {NAMES[3]}.png").write_bytes(b"")
    (photos / "unlabeled").rename(photos / NAMES[1])
    arguments = [*options(photos)[:3], str(photos / NAMES[1]), "--no-dvc"]
    shown = init(tmp_path / "d", *arguments)
    assert "[red]" in shown
    own = load_params(tmp_path / "d" / "params.yaml")[0].data.own
    assert own["quo-te-s"] == str(photos / NAMES[1])
    done = salcli("prepare", "--params", str(tmp_path / "d" / "params.yaml"))
    assert done.exit_code == 0, done.stderr
    assert "classes 7" in said(done.stdout)
    assert not Path("x").exists()


def test_links_in_circles_end(photos: Path, tmp_path: Path) -> None:
    (photos / "labeled" / "a" / "up").symlink_to(photos / "labeled")
    (photos / "unlabeled" / "self").symlink_to(".")
    (photos / "unlabeled" / "loop.png").symlink_to("loop.png")
    shown = init(tmp_path / "d", *options(photos))
    assert "labeled: 40 images" in shown
    assert "unlabeled: 24 images" in shown
    assert "1 files of unlabeled, left out loop.png (too many levels of symbolic links)" in shown


# --- what it refuses


def lone(photos: Path) -> None:
    for path in (photos / "labeled" / "b").iterdir():
        path.unlink()
    (photos / "labeled" / "b").rmdir()


def flat(photos: Path) -> None:
    for path in list((photos / "labeled").rglob("*.png")):
        path.rename(photos / "labeled" / f"{path.parent.name}{path.name}")
    for name in "ab":
        (photos / "labeled" / name).rmdir()


def few(photos: Path) -> None:
    for i in range(2, 20):
        (photos / "labeled" / "b" / f"{i}.png").unlink()


def emptied(photos: Path) -> None:
    for path in list((photos / "unlabeled").rglob("*.png")):
        path.unlink()


def identical(photos: Path) -> None:
    emptied(photos)
    for i in range(3):
        (photos / "unlabeled" / f"{i}.png").write_bytes((photos / "labeled" / "a" / f"{i}.png").read_bytes())


def broken(photos: Path) -> None:
    for path in (photos / "unlabeled").rglob("*.png"):
        path.write_bytes(b"<html>")


def broken_class(photos: Path) -> None:
    for path in (photos / "labeled" / "b").glob("*.png"):
        path.write_bytes(b"")


def gone(photos: Path) -> None:
    (photos / "labeled").rename(photos / "elsewhere")


def loop(photos: Path) -> None:
    emptied(photos)
    for path in sorted((photos / "unlabeled").iterdir()):
        path.rmdir()
    (photos / "unlabeled").rmdir()
    (photos / "unlabeled").symlink_to(photos / "unlabeled")


def parts(photos: Path) -> None:
    (photos / "labeled" / "a").rename(photos / "labeled" / "train")
    (photos / "labeled" / "b").rename(photos / "labeled" / "val")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (loop, "unlabeled"),
        (parts, "has the folders train, val, which look like parts, not like classes"),
        (flat, "labeled has no labels, so it cannot be the ID set; put its images into one folder a class"),
        (lone, "labeled has one class only (a); ID data need at least two"),
        (few, "every class needs at least 4 readable images, some for training, calibration and test each; b has 2"),
        (emptied, "unlabeled holds no images; put some there"),
        (identical, "unlabeled are in labeled, too (same bytes); wild data must hold other images"),
        (broken, "no image of"),
        (broken_class, "no image of class b can be read; replace them, or remove the class"),
        (gone, "labeled does not exist"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_data_that_cannot_work_are_refused(photos: Path, tmp_path: Path, spoil: Any, reason: str) -> None:
    spoil(photos)
    assert reason in denied(tmp_path / "d", *options(photos))


def test_wild_data_inside_of_the_labeled_ones_are_refused(photos: Path, tmp_path: Path) -> None:
    (photos / "unlabeled").rename(photos / "labeled" / "unlabeled")
    message = denied(tmp_path / "d", "--id", str(photos / "labeled"), "--wild", str(photos / "labeled" / "unlabeled"))
    assert "lies inside of" in message
    assert "where every folder is a class" in message


@pytest.mark.parametrize("inside_of", ["labeled", "unlabeled"])
def test_a_project_inside_of_its_data_is_refused(photos: Path, inside_of: str) -> None:
    message = denied(photos / inside_of / "project", *options(photos))
    assert "and what it makes would be taken for data; name a folder outside" in message


def test_a_list_that_says_train_of_all_gets_a_test_split(photos: Path, tmp_path: Path) -> None:
    lines = [f"{path},{path.parent.name},train" for path in (photos / "labeled").rglob("*.png")]
    (photos / "list.csv").write_text("\n".join(["path,label,split", *lines]))
    init(tmp_path / "d", "--id", str(photos / "list.csv"), *options(photos)[2:])
    assert load_params(tmp_path / "d" / "params.yaml")[0].data.id_shares.test == 0.2


def test_wild_data_that_are_the_labeled_ones_are_refused(photos: Path, tmp_path: Path) -> None:
    same = str(photos / "labeled")
    assert f"all 40 images of {same} are in labeled, too" in denied(tmp_path / "d", "--id", same, "--wild", same)


@pytest.mark.parametrize(
    ("assignment", "reason"),
    [
        ("train_id.epochs=abc", "train_id.epochs must be a valid integer, got 'abc'"),
        ("train_ood.epochs=null", "train_ood.epochs must be a valid integer, got None"),
        ("data=3", "data must be a section of keys and values, got 3"),
        ("train_id={}", "train_id.epochs is missing"),
        ("data.id_shares=x", "data.id_shares must be a section of keys and values, got 'x'"),
        ("data.channels=2", "--set data.channels=2: images have 1 channel (gray) or 3 (colour)"),
    ],
)
def test_a_wrong_value_is_refused_before_anything_is_planned_with_it(
    photos: Path, tmp_path: Path, assignment: str, reason: str
) -> None:
    assert reason in denied(tmp_path / "d", *options(photos), "--set", assignment)


def test_the_plan_shows_what_the_user_has_set(photos: Path, tmp_path: Path) -> None:
    assignments = [part for text in ("train_id.epochs=4", "train_ood.batch_size=16") for part in ("--set", text)]
    shown = init(tmp_path / "d", *options(photos), *assignments)
    assert "train-id 4 epochs, batch 32" in shown
    assert "epochs, batch 16 + 16" in shown


def test_a_pipe_is_left_out_and_nobody_waits_for_it(photos: Path, tmp_path: Path) -> None:
    os.mkfifo(photos / "unlabeled" / "day 0" / "pipe.png")
    shown = init(tmp_path / "d", *options(photos))
    assert "1 files of unlabeled, left out" in shown
    assert "day 0/pipe.png (it is no regular file)" in shown


def test_wild_data_around_the_labeled_ones_lose_those(photos: Path, tmp_path: Path) -> None:
    shown = init(tmp_path / "d", "--id", str(photos / "labeled"), "--wild", str(photos), "--no-dvc")
    assert "photos: 72 images" in shown
    assert "40 files of photos, left out in labeled, too: labeled/a/0.png" in shown


def test_a_place_that_yaml_cannot_hold_is_refused_with_a_way_out(photos: Path, tmp_path: Path) -> None:
    odd = photos.rename(tmp_path / os.fsdecode(b"\xff"))
    assert "is not valid UTF-8, so params.yaml cannot hold it" in denied(tmp_path / "d", *options(odd))
    (tmp_path / "link").symlink_to(odd)
    init(tmp_path / "d", *options(tmp_path / "link"))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--id", "x"], "--id needs --wild as well"),
        (["--model", "resnet18"], "--model needs --id and --wild as well"),
        (["--id", "x", "--wild", "y", "--preset", "cifar10"], "--preset cifar10 is for published data"),
        (["--id", "x", "--wild", "y", "--weights", "net.pt"], "--weights is about a network; name that with --model"),
        (["--id", "x", "--wild", "y", "--model", "m:n", "--mean", "a"], "--mean a: must be a number"),
    ],
)
def test_options_belong_together(tmp_path: Path, arguments: list[str], reason: str) -> None:
    assert reason in denied(tmp_path / "d", *arguments)


def test_a_folder_that_is_in_use_is_left_alone(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "params.yaml").write_text("mine")
    assert "already holds params.yaml" in refused(salcli("init", str(tmp_path / "d"), *options(photos)))
    assert files(tmp_path / "d") == {"params.yaml": b"mine"}


# --- the rules behind it


@pytest.mark.parametrize(("side", "size"), [(3, 8), (8, 8), (27, 16), (31, 28), (32, 32), (200, 128), (4000, 224)])
def test_the_size_is_the_largest_usual_one_that_most_images_have(side: int, size: int) -> None:
    assert image_size(side) == size


def accepted(check: Callable[..., object], *arguments: object) -> bool:
    try:
        check(*arguments)
    except DataError:
        return False
    return True


@pytest.mark.parametrize("test", [0.2, "official"])
@pytest.mark.parametrize("calibration", [0.1, 0.2])
def test_enough_is_what_the_split_itself_takes(test: float | str, calibration: float) -> None:
    train = round(1 - calibration - (0 if test == "official" else 0.2), 2)
    shares: dict[str, float | str] = {"train": train, "calibration": calibration, "wild": 0, "test": test}
    for n in range(1, 25):
        labels = np.array([0] * n + [1] * 30)
        is_test = None
        if test == "official":
            labels, is_test = np.append(labels, [0, 1]), np.arange(n + 32) >= n + 30
        dealt = labels if is_test is None else labels[~is_test]
        enough = accepted(_check_enough, ("a", "b"), dealt, shares)
        assert enough == accepted(split_id, labels, shares, 0, is_test), n


def test_looking_at_many_files_looks_at_some(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from salcli.data import looking
    from salcli.data.own_sets import read_own

    monkeypatch.setattr(looking, "MOST_LOOKED_AT", 10)
    monkeypatch.setattr(looking, "MOST_DECODED", 0)
    found = looking.look(read_own("labeled", photos / "labeled", labeled=True), Silent())
    assert (found.n_looked_at, found.was_decoded, found.is_gray, found.median_side) == (10, False, True, 8)
