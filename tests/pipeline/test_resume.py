"""A training run that was killed resumes from the last completed epoch, to the same bytes."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.compute import Watched
from helpers.quick import EXPERIMENT, SEED
from helpers.stages import params_of, written

from salcli.pipeline import prepare, train_id, train_ood
from salcli.store.formats import ResumePoint
from salcli.store.layout import Artifact, Experiment, Workspace

N_TRAIN = 462
Runner = Callable[..., Any]


def encoder(workspace: Workspace, params: Any, experiment: Any, progress: Any = None) -> None:
    train_ood.run_encoder(workspace, params, experiment, "knn-plus", progress)


def rival(name: str) -> Runner:
    return lambda *arguments: train_ood.run(*arguments, rival=name)


def of(*artifacts: Artifact) -> tuple[Artifact, ...]:
    return artifacts


CLASSIFIER = of(EXPERIMENT.classifier, EXPERIMENT.train_id("csv"))
STEP = {"epochs": 2, "batch_size": 138, "smallest_crop": 0.6, "projection": 8, "structure.steps": 5}
KNN_PLUS = {
    "epochs": 2, "batch_size": 231, "warmup_epochs": 0, "smallest_crop": 0.6, "projection": 8, "head.epochs": 2,
    "head.batch_size": 231,
}  # fmt: skip
# name: (stage, what it writes, params, samples in an epoch, epochs of the phase that is interrupted, epochs before)
RUNS: dict[str, tuple[Runner, tuple[Artifact, ...], dict[str, Any], int, int, float]] = {
    "train-id": (train_id.run, CLASSIFIER, {"train_id.epochs": 3, "train_id.augment": "flip-crop"}, 448, 3, 1.5),
    "train-id with dropout": (
        train_id.run, CLASSIFIER,
        {"train_id.epochs": 2, "model.backbone": "wrn-10-1", "model.drop_rate": 0.3}, 448, 2, 1.0,
    ),
    "SAL": (
        train_ood.run, of(EXPERIMENT.network("sal"), EXPERIMENT.curve("sal")),
        {"train_ood.epochs": 3, "train_ood.candidate_id": True, "train_ood.augment": "flip-crop"}, 448, 3, 1.5,
    ),
    "WOODS": (
        rival("woods"), of(EXPERIMENT.network("woods"), EXPERIMENT.curve("woods")),
        {"train_ood.epochs": 3, "methods.woods.tolerance": 1.0}, 448, 3, 1.5,
    ),
    "STEP": (
        rival("step"), of(EXPERIMENT.network("step"), EXPERIMENT.curve("step")),
        {f"methods.step.{key}": value for key, value in STEP.items()}, 1104, 2, 1.5,
    ),
    "KNN+, features": (
        encoder, of(EXPERIMENT.encoder("knn-plus"), EXPERIMENT.encoder_curve("knn-plus")),
        {f"methods.knn-plus.{key}": value for key, value in KNN_PLUS.items()}, 462, 2, 1.5,
    ),
    "KNN+, heads": (
        encoder, of(EXPERIMENT.encoder("knn-plus"), EXPERIMENT.encoder_curve("knn-plus")),
        {f"methods.knn-plus.{key}": value for key, value in KNN_PLUS.items()}, 462, 2, 3.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_an_interrupted_run_ends_with_the_bytes_of_an_uninterrupted_one(workspace: Workspace, name: str) -> None:
    run, artifacts, values, per_epoch, n_epochs, epochs_before = RUNS[name]
    params = params_of(workspace, values)
    run(workspace, params, EXPERIMENT)
    uninterrupted = written(workspace, *artifacts)
    with pytest.raises(KeyboardInterrupt):
        run(workspace, params, EXPERIMENT, Watched(stop_after=int(per_epoch * epochs_before)))
    watched = Watched()
    run(workspace, params, EXPERIMENT, watched)
    assert watched.notes[-1] == f"resumes an interrupted run after epoch {int(epochs_before - 1) % 2 + 1} of {n_epochs}"
    assert watched.skipped == per_epoch * int(epochs_before)
    assert written(workspace, *artifacts) == uninterrupted
    assert not list((workspace.root / ".salcli").rglob("*.pt"))


def interrupted(workspace: Workspace, values: dict[str, Any]) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_id.run(workspace, params_of(workspace, values), EXPERIMENT, Watched(stop_after=500))


@pytest.mark.parametrize(
    "changed",
    [{"train_id.lr": 0.05}, {"train_id.epochs": 5}, {"model.backbone": "wrn-10-1"}, {"numerics.deterministic": True}],
    ids=str,
)
def test_changed_params_start_from_the_beginning_and_say_so(workspace: Workspace, changed: dict[str, Any]) -> None:
    interrupted(workspace, {"train_id.epochs": 2})
    watched, params = Watched(stop_after=1), params_of(workspace, {"train_id.epochs": 2, **changed})
    with pytest.raises(KeyboardInterrupt):
        train_id.run(workspace, params, EXPERIMENT, watched)
    (note,) = watched.notes
    assert note.startswith("starts from the beginning: params or inputs have changed")
    assert watched.skipped == 0


def test_a_changed_input_starts_from_the_beginning(workspace: Workspace) -> None:
    interrupted(workspace, {"train_id.epochs": 2})
    other = params_of(workspace, {"data.id_shares.train": 0.3, "data.id_shares.test": 0.22})
    prepare.prepare_split(workspace, other.data, EXPERIMENT)
    watched = Watched()
    train_id.run(workspace, params_of(workspace, {"train_id.epochs": 2}), EXPERIMENT, watched)
    assert "inputs have changed" in watched.notes[0]


def test_other_heads_keep_the_features_that_an_unfinished_run_has_learnt(workspace: Workspace) -> None:
    values = {f"methods.knn-plus.{key}": value for key, value in KNN_PLUS.items()}
    with pytest.raises(KeyboardInterrupt):
        encoder(workspace, params_of(workspace, values), EXPERIMENT, Watched(stop_after=int(2.5 * N_TRAIN)))
    watched = Watched()
    encoder(workspace, params_of(workspace, {**values, "methods.knn-plus.head.lr": 0.1}), EXPERIMENT, watched)
    (note,) = watched.notes
    assert note == "resumes an interrupted run after epoch 2 of 2"


def test_a_damaged_state_starts_from_the_beginning(workspace: Workspace) -> None:
    state = workspace.root / EXPERIMENT.resume_state("train-id").path
    state.parent.mkdir(parents=True, exist_ok=True)
    state.write_bytes(b"PK\x03\x04 cut short")
    watched = Watched()
    train_id.run(workspace, params_of(workspace, {"train_id.epochs": 1}), EXPERIMENT, watched)
    assert watched.notes == ["starts from the beginning: the state of the stopped run cannot be read"]


def test_a_state_cannot_run_code(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (tmp_path / "boom").touch, ()

    torch.save({"config": "x", "state": Bomb()}, tmp_path / "state.pt")
    assert ResumePoint(tmp_path / "state.pt", {}, Watched()).load() is None
    assert not (tmp_path / "boom").exists()
    torch.load(tmp_path / "state.pt", weights_only=False)  # without the protection it would run
    assert (tmp_path / "boom").exists()


@pytest.mark.slow
def test_kill_minus_nine_in_the_middle_of_training(workspace: Workspace) -> None:
    command = [sys.executable, "-m", "salcli", "train-id", "--seed", str(SEED)]
    uninterrupted = written(workspace, *CLASSIFIER)
    for artifact in CLASSIFIER:
        (workspace.root / artifact.path).unlink()
    process = subprocess.Popen(command, cwd=workspace.root, stdout=subprocess.DEVNULL)
    state = workspace.root / Experiment(SEED).resume_state("train-id").path
    deadline = time.monotonic() + 120
    while not state.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was over before it could be killed"
    assert not (workspace.root / CLASSIFIER[0].path).exists()
    done = subprocess.run(command, cwd=workspace.root, capture_output=True, text=True, check=True)
    assert "resumes an interrupted run after epoch" in done.stdout
    assert written(workspace, *CLASSIFIER) == uninterrupted
    assert not state.exists()
