"""train-id: normalisation, given weights, numerics."""

import json
from typing import Any

import numpy as np
import pytest
from helpers.quick import EXPERIMENT
from helpers.stages import params_of

from salcli.pipeline import network_spec, train_id
from salcli.pipeline.train_id import TrainedClassifier
from salcli.store.files import read_header
from salcli.store.formats import read_id_split, read_samples
from salcli.store.layout import Workspace, prepared_set


def run(workspace: Workspace, **values: Any) -> TrainedClassifier:
    """With one epoch; a__b stands for a.b."""
    overrides = {"train_id.epochs": 1, **{key.replace("__", "."): value for key, value in values.items()}}
    return train_id.run(workspace, params_of(workspace, overrides), EXPERIMENT)


def test_mean_and_std_are_given_or_those_of_the_training_images(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(workspace, model__mean=[0.25], model__std=[0.5])
    spec = read_header(workspace.find(EXPERIMENT.classifier)).spec
    assert (spec["mean"], spec["std"]) == ([0.25], [0.5])
    monkeypatch.setattr(network_spec, "ROWS_FOR_STATISTICS", 100)  # several blocks
    run(workspace)
    spec = read_header(workspace.find(EXPERIMENT.classifier)).spec
    images = read_samples(workspace.find(prepared_set("digits-0-7"))).array
    pixels = images[read_id_split(workspace.find(EXPERIMENT.split)).train] / 255
    np.testing.assert_allclose(spec["mean"], [pixels.mean()], rtol=1e-12)
    np.testing.assert_allclose(spec["std"], [pixels.std(ddof=1)], rtol=1e-12)


def test_given_weights_replace_training_or_are_where_it_starts(workspace: Workspace) -> None:
    (workspace.root / EXPERIMENT.classifier.path).rename(workspace.root / "given.safetensors")
    before = json.loads((workspace.root / EXPERIMENT.train_id("json").path).read_text())
    given = run(workspace, train_id__epochs=0, model__weights="given.safetensors")
    assert given.last_epoch is None
    assert {"train_accuracy": given.train_accuracy, "test_accuracy": given.test_accuracy} == before
    assert (workspace.root / EXPERIMENT.train_id("csv").path).read_text() == "epoch,loss,accuracy\n"
    assert given.class_check is not None
    assert not given.class_check.has_other_order
    trained, continued = run(workspace), run(workspace, model__weights="given.safetensors")
    assert trained.last_epoch is not None
    assert continued.last_epoch is not None
    assert continued.last_epoch.loss < trained.last_epoch.loss / 5
