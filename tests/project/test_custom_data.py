"""Custom data: what is found, what is planned, and what is refused before anything is written."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.custom_images import lay_out, picture, save

from salcli.data.vectors import ANY
from salcli.errors import SalError
from salcli.params.presets import preset
from salcli.params.schema import Params, load_params
from salcli.progress import Silent
from salcli.project.init import create
from salcli.project.network_choice import NetworkOptions
from salcli.project.planning import Plan, plan_project


def planned(folder: Path, photos: Path, **changes: Any) -> Plan:
    """The plan for photos/labeled and photos/unlabeled."""
    arguments: dict[str, Any] = {
        "assigned": {},
        "id_path": photos / "labeled",
        "wild_paths": [photos / "unlabeled"],
        "test_paths": [],
        "calibration_path": None,
        "columns": ANY,
        "options": NetworkOptions(),
    }
    return plan_project(folder, preset("default"), progress=Silent(), **{**arguments, **changes})


def params_of(folder: Path, photos: Path, **changes: Any) -> Params:
    """The params.yaml of a project that was created by the plan."""
    create(folder, preset("default"), planned(folder, photos, **changes).values, dvc=False, custom=True)
    return load_params(folder / "params.yaml")[0]


def denied(folder: Path, photos: Path, kind: type[SalError] = SalError, **changes: Any) -> str:
    with pytest.raises(kind) as error:
        planned(folder, photos, **changes)
    assert not folder.exists()
    return str(error.value)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return lay_out(tmp_path)


def test_two_folders_make_a_project(photos: Path, tmp_path: Path) -> None:
    plan = planned(tmp_path / "d", photos, test_paths=[photos / "known-odd"])
    assert [(one.name, len(one.source)) for one in plan.data.sets] == [
        ("labeled", 40), ("unlabeled", 24), ("known-odd", 8),
    ]  # fmt: skip
    assert (plan.data.id.look.smallest, plan.data.id.look.is_gray) == ((8, 8), True)
    params = params_of(tmp_path / "d", photos, test_paths=[photos / "known-odd"])
    data = params.data
    assert data.custom == {name: str(photos / name) for name in ("labeled", "unlabeled", "known-odd")}
    assert (data.id, data.ood, data.test_ood, data.pi) == ("labeled", ("unlabeled",), ("known-odd",), ("unknown",))
    assert (data.image_size, data.channels, data.on_bad_image) == (8, 1, "skip")
    assert data.id_shares.model_dump() == {"train": 0.6, "calibration": 0.2, "wild": 0, "test": 0.2}
    assert (params.rivals, params.seeds, params.model.backbone) == ((), (0,), "small-cnn")
    assert (params.incumbent, params.detector.method) == ("sal-plus", "auto")


def test_what_the_user_sets_overrides_the_plan_and_is_shown(tmp_path: Path) -> None:
    photos = lay_out(tmp_path / "d")
    assigned = {"data.image_size": 16, "train_id.epochs": 4}
    plan = planned(tmp_path / "d", photos, assigned=assigned)
    shown = {choice.what: f"{choice.chosen} {choice.why}" for choice in plan.choices}
    assert shown["images"] == "16 × 16, 1 channel as you set it"
    assert "train_id.epochs is 4, as you set it" in plan.notes
    params = params_of(tmp_path / "d", photos, assigned=assigned)
    assert (params.data.image_size, params.train_id.epochs) == (16, 4)
    assert params.data.custom["labeled"] == "photos/labeled", "images inside the project move with it"


def test_an_official_split_is_kept(tmp_path: Path) -> None:
    photos, rng = lay_out(tmp_path), np.random.default_rng(5)
    (photos / "labeled").rename(photos / "train")
    (photos / "labeled").mkdir()
    (photos / "train").rename(photos / "labeled" / "train")
    for kind in "ab":
        save(photos / "labeled" / "test" / kind / "1.png", picture(kind, rng))
    plan = planned(tmp_path / "d", photos)
    assert "test as given" in plan.choices[0].chosen
    shares = {key: plan.values[f"data.id_shares.{key}"] for key in ("train", "calibration", "wild", "test")}
    assert shares == {"train": 0.8, "calibration": 0.2, "wild": 0, "test": "official"}


def test_bad_files_and_copies_are_named_and_left_out(photos: Path, tmp_path: Path) -> None:
    (photos / "labeled" / "a" / "empty.png").write_bytes(b"")
    (photos / "labeled" / "b" / "short.png").write_bytes((photos / "labeled" / "b" / "0.png").read_bytes()[:60])
    (photos / "labeled" / "notes.txt").write_text("x")
    (photos / "unlabeled" / "copy.png").write_bytes((photos / "labeled" / "a" / "3.png").read_bytes())
    (photos / "labeled" / "a" / "twin.png").write_bytes((photos / "labeled" / "a" / "4.png").read_bytes())
    (photos / "unlabeled" / "loop.png").symlink_to("loop.png")
    os.mkfifo(photos / "unlabeled" / "day 0" / "pipe.png")  # opening it would wait forever
    plan = planned(tmp_path / "d", photos)
    bad = {one.shown(path): reason for one in plan.data.sets for path, reason in one.bad}
    assert {*bad} == {"a/empty.png", "b/short.png", "day 0/pipe.png", "loop.png"}
    assert plan.data.id.n_other_files == 1
    copies = [(one.of.name, one.other, one.names) for one in plan.data.copies]
    assert copies == [("labeled", "labeled", ["a/twin.png"]), ("unlabeled", "labeled", ["copy.png"])]
    assert len(plan.data.id.source) == 41
    assert len(plan.data.without_copies(plan.data.id)) == 40
    assert "24 and 8 images" in plan.choices[0].why
    around = planned(tmp_path / "d", photos, wild_paths=[photos]).data  # wild data around the labeled data lose them
    assert len(around.without_copies(around.wild)) == 32 + 0


def test_data_that_cannot_work_are_refused(tmp_path: Path) -> None:
    for i, (pattern, n_left, reason) in enumerate([
        ("labeled/b/*.png", 2, "every class needs at least 4 readable images, some each for training, cal"),
        ("labeled/b/*.png", 0, "class b has no images; add some, or remove its folder"),
        ("unlabeled/*/*.png", 0, "unlabeled holds no images"),
        ("unlabeled/*/*.png", 2, "unlabeled has 2 images that are not labeled data; wild data are a mixture of"),
    ]):  # fmt: skip
        photos = lay_out(tmp_path / str(i))
        for path in sorted(photos.glob(pattern))[n_left:]:
            path.unlink()
        assert reason in denied(tmp_path / "d", photos)
    (photos / "labeled" / "a").rename(photos / "labeled" / "train")
    (photos / "labeled" / "b").rename(photos / "labeled" / "val")
    assert "has the folders train, val, which look like" in denied(tmp_path / "d", photos)


def test_folders_inside_each_other_are_refused(photos: Path, tmp_path: Path) -> None:
    for name in ("labeled", "unlabeled"):
        message = denied(photos / name / "project", photos)
        assert "so its output would be taken for data; name a folder outside" in message
    message = denied(tmp_path / "d", photos, wild_paths=[photos / "labeled"])
    assert f"all 40 images of {photos / 'labeled'} are also in labeled" in message
    (photos / "unlabeled").rename(photos / "labeled" / "unlabeled")
    message = denied(tmp_path / "d", photos, wild_paths=[photos / "labeled" / "unlabeled"])
    assert "where every folder is a class" in message
