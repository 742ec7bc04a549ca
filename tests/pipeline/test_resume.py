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

Runner = Callable[..., Any]


def encoder(workspace: Workspace, params: Any, experiment: Any, progress: Any = None) -> None:
    train_ood.run_encoder(workspace, params, experiment, "knn-plus", progress)


def rival(name: str) -> Runner:
    return lambda *arguments: train_ood.run(*arguments, rival=name)


CLASSIFIER = (EXPERIMENT.classifier, EXPERIMENT.train_id("csv"))
ENCODER = (EXPERIMENT.encoder("knn-plus"), EXPERIMENT.encoder_curve("knn-plus"))
STEP = {"epochs": 2, "batch_size": 138, "smallest_crop": 0.6, "projection": 8, "structure.steps": 5}
KNN_PLUS = {
    f"methods.knn-plus.{key}": value
    for key, value in {"epochs": 2, "batch_size": 231, "warmup_epochs": 0, "smallest_crop": 0.6, "projection": 8,
                       "head.epochs": 2, "head.batch_size": 231}.items()
}  # fmt: skip
# name: (stage, what it writes, params, samples in an epoch, epochs of the phase that is interrupted, epochs before)
RUNS: dict[str, tuple[Runner, tuple[Artifact, ...], dict[str, Any], int, int, float]] = {
    "train-id": (train_id.run, CLASSIFIER, {"train_id.epochs": 3, "train_id.augment": "flip-crop"}, 448, 3, 1.5),
    "train-id with dropout": (
        train_id.run, CLASSIFIER,
        {"train_id.epochs": 2, "model.backbone": "wrn-10-1", "model.drop_rate": 0.3}, 448, 2, 1.0,
    ),
    "SAL": (
        train_ood.run, (EXPERIMENT.network("sal"), EXPERIMENT.curve("sal")),
        {"train_ood.epochs": 3, "train_ood.candidate_id": True, "train_ood.augment": "flip-crop"}, 448, 3, 1.5,
    ),
    "WOODS": (
        rival("woods"), (EXPERIMENT.network("woods"), EXPERIMENT.curve("woods")),
        {"train_ood.epochs": 3, "methods.woods.tolerance": 1.0}, 448, 3, 1.5,
    ),
    "STEP": (
        rival("step"), (EXPERIMENT.network("step"), EXPERIMENT.curve("step")),
        {f"methods.step.{key}": value for key, value in STEP.items()}, 1104, 2, 1.5,
    ),
    "KNN+, features": (encoder, ENCODER, KNN_PLUS, 462, 2, 1.5),
    "KNN+, heads": (encoder, ENCODER, KNN_PLUS, 462, 2, 3.5),
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


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"train_id.lr": 0.05}, "params or inputs have changed"),
        ({"model.backbone": "wrn-10-1"}, "params or inputs have changed"),
        ({"data.id_shares.train": 0.3, "data.id_shares.test": 0.22}, "params or inputs have changed"),
        ({}, "the state of the stopped run cannot be read"),
    ],
    ids=["rate", "network", "split", "damaged"],
)
def test_changed_params_and_inputs_and_a_damaged_state_start_from_the_beginning(
    workspace: Workspace, changed: dict[str, Any], cause: str
) -> None:
    before, after = (params_of(workspace, {"train_id.epochs": 2, **values}) for values in ({}, changed))
    with pytest.raises(KeyboardInterrupt):
        train_id.run(workspace, before, EXPERIMENT, Watched(stop_after=500))
    prepare.prepare_split(workspace, after.data, EXPERIMENT)
    if not changed:
        workspace.find(EXPERIMENT.resume_state("train-id")).path.write_bytes(b"PK\x03\x04 cut short")
    watched = Watched(stop_after=1)
    with pytest.raises(KeyboardInterrupt):
        train_id.run(workspace, after, EXPERIMENT, watched)
    (note,) = watched.notes
    assert note.startswith(f"starts from the beginning: {cause}")
    assert watched.skipped == 0


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
