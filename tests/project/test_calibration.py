"""A calibration set from the source of the wild data: how it is planned, kept apart, refused, and what it cures."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from helpers.cli import init, refused

from salcli.errors import ParamsError
from salcli.params.schema import Params, load_params
from salcli.pipeline import extract, prepare, train_id
from salcli.pipeline import filter as filter_stage
from salcli.store.formats import WILD_SET, read_digests, read_id_split, read_index
from salcli.store.layout import Experiment, Workspace, prepared_set

CLASSES, N_DIMENSIONS = np.array(["a", "b", "c"]), 12
WILD = Experiment(0, "wild")


def vectors(n: int, seed: int, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """n of each class, moved by a constant: the drift."""
    rng, labels = np.random.default_rng(seed), np.repeat(CLASSES, n)
    means = 4 * np.eye(N_DIMENSIONS)[np.repeat(np.arange(3), n)]
    return (means + rng.normal(size=means.shape) + shift).astype(np.float32), labels


def lay_vectors(root: Path, shift: float = 0.0) -> Path:
    """labeled.npz; wild.npz and new.npz, the calibration set, are drifted."""
    x, y = vectors(120, 1)
    np.savez(root / "labeled.npz", x=x, y=y)
    x, y = vectors(150, 2, shift)
    np.savez(root / "new.npz", x=x, y=y)
    inliers = vectors(200, 3, shift)[0]
    outliers = np.random.default_rng(4).normal(size=(60, N_DIMENSIONS)).astype(np.float32) + shift  # of no class
    np.savez(root / "wild.npz", x=np.concatenate([inliers, outliers]))
    return root


def planned(root: Path, *more: str) -> tuple[Workspace, Params]:
    paths = ["--id", str(root / "labeled.npz"), "--wild", str(root / "wild.npz"), "--set", "data.wild_holdout=0"]
    return Workspace(root / "d"), init(root / "d", "--no-dvc", *paths, *more)[1]


def all_prepared(workspace: Workspace, params: Params) -> list[str]:
    """The notes."""
    done = [prepare.prepare_set(workspace, params, name) for name in (params.data.id, *params.data.ood)]
    done.append(prepare.prepare_split(workspace, params.data, WILD))
    done.append(prepare.prepare_wild(workspace, params.data, WILD))
    return [one.note for one in done if one.note]


def test_with_calibration_data_from_the_same_source_drifted_id_data_are_no_outliers(tmp_path: Path) -> None:
    lay_vectors(tmp_path, shift=1)
    workspace, own = planned(tmp_path, "--calibration", str(tmp_path / "new.npz"))
    held_out = {"data.calibration": None, "data.id_shares.train": 0.5, "data.id_shares.calibration": 0.3}
    false_alarms = []
    for params in (load_params(workspace.root / "params.yaml", held_out)[0], own):
        all_prepared(workspace, params)
        for stage in (train_id.run, extract.run_id, extract.run_wild):
            stage(workspace, params, WILD)
        chosen = filter_stage.run(workspace, params, WILD).separation.candidates
        false_alarms.append((chosen < 600).sum() / 600)
        assert (chosen >= 600).sum() > 25, "of 60 outliers"
    assert false_alarms[0] > 0.09
    assert false_alarms[1] == pytest.approx(0.05, abs=0.03)


def test_no_sample_is_in_two_parts(tmp_path: Path) -> None:
    """By content: calibration data hold copies of ID data and of each other, wild data copies of calibration data."""
    lay_vectors(tmp_path)
    (x, y), (own, labels) = vectors(120, 1), vectors(150, 2)
    np.savez(tmp_path / "new.npz", x=np.concatenate([own, own[:1], x[:5]]), y=[*labels, labels[0], *y[:5]])
    np.savez(tmp_path / "wild.npz", x=np.concatenate([vectors(200, 3)[0], own[3:6], x[7:9]]))
    workspace, params = planned(tmp_path, "--calibration", str(tmp_path / "new.npz"))
    notes = all_prepared(workspace, params)
    assert [note.partition(",")[0] for note in notes] == [
        "new: 6 samples are also in labeled",
        "wild: 5 samples are also in labeled",
    ]
    split, wild = read_id_split(workspace.find(WILD.split)), read_index(workspace.find(WILD.wild), WILD_SET)
    digests = np.concatenate([read_digests(workspace.find(prepared_set(name))) for name in ("labeled", "wild")])
    parts = {**vars(split), "wild": wild}
    assert {part: len(index) for part, index in parts.items()} == {
        "train": 288, "calibration": 450, "wild": 600, "test": 72,
    }  # fmt: skip
    assert max(split.train.max(), split.test.max()) < 360 <= split.calibration.min()
    for one, other in combinations(parts.values(), 2):
        assert not np.isin(digests[one], digests[other]).any()


def test_what_cannot_be_a_calibration_set_is_refused(tmp_path: Path) -> None:
    lay_vectors(tmp_path)
    x, y = vectors(120, 1)
    bad = {
        "other": ({"x": x + 1, "y": [*y[1:], "zebra"]}, "has classes that labeled does not have (zebra); leave these"),
        "bare": ({"x": x + 1}, "bare, the calibration set, has no labels; label it as labeled is labeled"),
        "same": ({"x": x, "y": y}, "are also in labeled (equal values); calibration needs other vectors"),
    }  # fmt: skip
    paths = ["--id", str(tmp_path / "labeled.npz"), "--wild", str(tmp_path / "wild.npz")]
    for name, (arrays, message) in bad.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
        said = refused(
            "init", str(tmp_path / "d"), *paths, "--calibration", str(tmp_path / f"{name}.npz"), root=tmp_path
        )
        assert message in " ".join(said.split())
    workspace, _ = planned(tmp_path)
    for values, message in (
        ({"calibration": "wild"}, "must be a set of its own, but wild is ID, wild or test data"),
        ({"custom.new": "new.npz", "calibration": "new"}, "so id_shares.calibration must be 0"),
    ):
        with pytest.raises(ParamsError, match=message):
            load_params(workspace.root / "params.yaml", {f"data.{key}": value for key, value in values.items()})
