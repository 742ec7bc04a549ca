"""A stopped training resumes from the last completed epoch, to the same bytes. tests/store/test_faults.py kills it."""

from collections.abc import Callable
from typing import Any

import pytest
from helpers.compute import Watched
from helpers.quick import EXPERIMENT
from helpers.stages import params_of, written

from salcli.pipeline import prepare, train_id, train_ood
from salcli.store.layout import Artifact, Workspace

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
    "train-id": (train_id.run, CLASSIFIER, {"train_id.epochs": 2, "train_id.augment": "flip-crop"}, 448, 2, 1.5),
    "train-id with dropout": (
        train_id.run, CLASSIFIER,
        {"train_id.epochs": 2, "model.backbone": "wrn-10-1", "model.drop_rate": 0.3}, 448, 2, 1.0,
    ),
    "SAL": (
        train_ood.run, (EXPERIMENT.network("sal"), EXPERIMENT.curve("sal")),
        {"train_ood.epochs": 2, "train_ood.candidate_id": True,
         "train_ood.augment": "flip-crop"}, 448, 2, 1.5,
    ),
    "WOODS": (
        rival("woods"), (EXPERIMENT.network("woods"), EXPERIMENT.curve("woods")),
        {"train_ood.epochs": 2, "methods.woods.tolerance": 1.0}, 448, 2, 1.5,
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
    "changed",
    [{"train_id.lr": 0.05}, {"data.id_shares.train": 0.3, "data.id_shares.test": 0.22}],
    ids=["params", "split"],
)
def test_changed_params_and_inputs_start_from_the_beginning(workspace: Workspace, changed: dict[str, Any]) -> None:
    before, after = (params_of(workspace, {"train_id.epochs": 2, **values}) for values in ({}, changed))
    with pytest.raises(KeyboardInterrupt):
        train_id.run(workspace, before, EXPERIMENT, Watched(stop_after=500))
    prepare.prepare_split(workspace, after.data, EXPERIMENT)
    watched = Watched(stop_after=1)
    with pytest.raises(KeyboardInterrupt):
        train_id.run(workspace, after, EXPERIMENT, watched)
    (note,) = watched.notes
    assert note.startswith("starts from the beginning: params or inputs have changed")
    assert watched.skipped == 0
