"""train-id: normalisation, given weights, numerics.

These tests run stages: they were part of test_compute.py, and follow the pipeline package, not the engine.
"""

import json
from typing import Any

import numpy as np
import pytest
import torch
from helpers.quick import SEED
from test_resume import params_with

from salcli.artifacts import layout
from salcli.artifacts.checkpoint import read_header, read_network
from salcli.artifacts.images import read_image_set
from salcli.artifacts.layout import Workspace
from salcli.artifacts.splits import read_id_split
from salcli.errors import ParamsError
from salcli.models.network import Classifier
from salcli.stages import network_spec, train_id


def test_prepared_images_are_mapped_not_read(workspace: Workspace) -> None:
    images = read_image_set(workspace.find(layout.prepared_set("digits-0-7"))).images
    assert isinstance(images, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        images[0] = 0


def test_deterministic_training_on_the_cpu_gives_the_same_weights(workspace: Workspace) -> None:
    weights = []
    for deterministic in (False, True):
        params = params_with(workspace, train_id__epochs=1, numerics__deterministic=deterministic)
        train_id.run(workspace, params, SEED)
        weights.append(read_network(workspace.find(layout.classifier(SEED)), Classifier).state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_given_mean_and_std_take_the_place_of_the_images_own(workspace: Workspace) -> None:
    params = params_with(workspace, train_id__epochs=1, model__mean=[0.25], model__std=[0.5])
    train_id.run(workspace, params, SEED)
    spec = read_header(workspace.find(layout.classifier(SEED))).spec
    assert (spec["mean"], spec["std"]) == ([0.25], [0.5])


def test_automatic_mean_and_std_are_those_of_the_training_images(workspace: Workspace, monkeypatch: Any) -> None:
    monkeypatch.setattr(network_spec, "IMAGES_FOR_STATISTICS", 100)  # several blocks
    train_id.run(workspace, params_with(workspace, train_id__epochs=1), SEED)
    spec = read_header(workspace.find(layout.classifier(SEED))).spec
    images = read_image_set(workspace.find(layout.prepared_set("digits-0-7"))).images
    pixels = images[read_id_split(workspace.find(layout.id_split(SEED))).train] / 255
    np.testing.assert_allclose(spec["mean"], [pixels.mean()], rtol=1e-12)
    np.testing.assert_allclose(spec["std"], [pixels.std(ddof=1)], rtol=1e-12)


def test_a_mean_for_another_number_of_channels_is_an_error(workspace: Workspace) -> None:
    with pytest.raises(ParamsError, match=r"model\.mean has 3 values, but the images have 1 channels"):
        train_id.run(workspace, params_with(workspace, model__mean=[0.1, 0.2, 0.3]), SEED)


def test_given_weights_replace_training(workspace: Workspace) -> None:
    trained = workspace.root / layout.classifier(SEED).name
    given = workspace.root / "given.safetensors"
    trained.rename(given)
    before = train_id_metrics(workspace)
    params = params_with(workspace, train_id__epochs=0, train_id__weights="given.safetensors")
    result = train_id.run(workspace, params, SEED)
    assert result.last_epoch is None
    assert (result.train_accuracy, result.test_accuracy) == before
    assert (workspace.root / layout.train_id_curve(SEED).name).read_text() == "epoch,loss,accuracy\n"


def train_id_metrics(workspace: Workspace) -> tuple[float, float]:
    content = json.loads((workspace.root / layout.train_id_metrics(SEED).name).read_text())
    return content["train_accuracy"], content["test_accuracy"]


def test_given_weights_are_where_training_starts(workspace: Workspace) -> None:
    trained = workspace.root / layout.classifier(SEED).name
    trained.rename(workspace.root / "given.safetensors")
    losses = [
        train_id.run(workspace, params_with(workspace, train_id__epochs=1, train_id__weights=weights), SEED)
        for weights in (None, "given.safetensors")
    ]
    assert losses[1].last_epoch.loss < losses[0].last_epoch.loss / 5
