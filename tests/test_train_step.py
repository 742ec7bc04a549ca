"""STEP as a stage: trained on ID and wild images, resumable, the same bytes each time, and in `evaluate`."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from conftest import OOD, REPOSITORY, SEED
from ruamel.yaml import YAML
from test_resume import Watched

from salcli.artifacts import layout
from salcli.artifacts.checkpoint import read_header, read_network
from salcli.artifacts.hdf5 import read_array
from salcli.artifacts.layout import Workspace
from salcli.errors import DataError
from salcli.models.step import StepNetwork
from salcli.params import Params, load_params
from salcli.params_file import read_yaml, with_overrides
from salcli.reporting.results import Results
from salcli.reporting.results_table import markdown
from salcli.stages import evaluate, prepare, train_id, train_ood
from salcli.stages.encoder_schedules import is_short_step
from salcli.stages.inputs import id_images, ood_test_images, wild_images
from salcli.stages.train_step import STEP, _together

if TYPE_CHECKING:
    from pathlib import Path

BATCH = 64
SHORT = {
    "epochs": 2, "batch_size": BATCH, "smallest_crop": 0.6, "projection": 16, "structure.steps": 20,
    "structure.batch_size": 32,
}  # fmt: skip
FEW_IMAGES = {"data.id_shares.train": 0.08, "data.id_shares.wild": 0.08, "data.id_shares.test": 0.76, "data.pi": 0.3}
VALUES = {
    **{f"train_rival.step.{key}": value for key, value in SHORT.items()}, **FEW_IMAGES,
    "train_id.epochs": 1, "rivals": [STEP], "evaluate.methods": [STEP, "msp"],
}  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an ID classifier, but without gradients and filter: STEP needs neither."""
    root = tmp_path_factory.mktemp("prepared")
    with (root / "params.yaml").open("w") as file:
        YAML().dump(with_overrides(read_yaml(REPOSITORY / "params.yaml"), VALUES), file)
    workspace, params = Workspace(root), load_params(root / "params.yaml")[0]
    for name in (params.data.id, OOD):
        prepare.prepare_set(workspace, params.data, name)
    prepare.prepare_split(workspace, params.data, SEED)
    prepare.prepare_wild(workspace, params.data, OOD, SEED)
    train_id.run(workspace, params, SEED)
    return root


@pytest.fixture
def own(prepared: Path, tmp_path: Path) -> Workspace:
    shutil.copytree(prepared, tmp_path / "own")
    return Workspace(tmp_path / "own")


def params_of(workspace: Workspace, **changes: Any) -> Params:
    """For STEP; a__b stands for a.b."""
    values = {f"train_rival.step.{name.replace('__', '.')}": value for name, value in changes.items()}
    return load_params(workspace.root / "params.yaml", values)[0]


def trained(workspace: Workspace, params: Params, progress: Any = None) -> list[bytes]:
    done = train_ood.run(workspace, params, OOD, SEED, progress, method=STEP)
    return [path.read_bytes() for path in done.written]


def network_of(workspace: Workspace) -> StepNetwork:
    return read_network(workspace.find(layout.trained_network(STEP, OOD, SEED)), StepNetwork)


def test_it_learns_from_id_training_images_then_wild_ones(own: Workspace) -> None:
    params = params_of(own)
    training, wild = id_images(own, params.data.id, "train", SEED), wild_images(own, params.data.id, OOD, SEED)
    together = _together(training, wild)
    expected = torch.cat([training.images.read(slice(None)), wild.read(slice(None))])
    assert torch.equal(together.images.read(slice(None)), expected)
    assert len(together.labels.unique()) == len(expected)


@pytest.mark.parametrize("epochs_before", [1.5, 2.5], ids=["second epoch", "projection"])
def test_an_interrupted_run_ends_with_the_bytes_of_an_undisturbed_one(own: Workspace, epochs_before: float) -> None:
    params = params_of(own)
    undisturbed = trained(own, params)
    n = len(wild_images(own, params.data.id, OOD, SEED)) + len(id_images(own, params.data.id, "train", SEED))
    per_epoch = n // BATCH * BATCH
    with pytest.raises(KeyboardInterrupt):
        trained(own, params, Watched(stop_after=int(epochs_before * per_epoch)))
    watched = Watched()
    assert trained(own, params, watched) == undisturbed
    assert watched.skipped == per_epoch * int(epochs_before)
    assert not list((own.root / ".salcli").rglob("*.pt"))


def test_another_projection_keeps_the_features(own: Workspace) -> None:
    networks = []
    for steps in (5, 20):
        trained(own, params_of(own, structure__steps=steps))
        networks.append(network_of(own).state_dict())
    changed = [name for name, tensor in networks[0].items() if not torch.equal(tensor, networks[1][name])]
    assert sorted(changed) == ["centres", "head.weight"]


def test_centres_are_the_means_of_projected_training_images(own: Workspace) -> None:
    trained(own, params_of(own))
    network, training = network_of(own), id_images(own, "digits-0-7", "train", SEED)
    with torch.no_grad():
        projected = network.head(network.features(training.images.read(slice(None))))
    expected = torch.stack([projected[training.labels == label].mean(0) for label in range(8)])
    torch.testing.assert_close(network.centres, expected, atol=1e-5, rtol=1e-4)


def test_views_are_learnt_to_be_found(own: Workspace) -> None:
    trained(own, params_of(own, epochs=6, batch_size=32, lr=0.003))
    curve = own.find(layout.training_curve(STEP, OOD, SEED)).path.read_text().splitlines()
    assert curve[0] == "epoch,loss,accuracy"
    rows = [[float(value) for value in line.split(",")] for line in curve[1:]]
    assert rows[-1][1] < 0.8 * rows[0][1]
    assert rows[-1][2] > 2 * rows[0][2]


def test_scores_are_minus_the_distance_to_the_nearest_centre_and_the_row_says_that_it_was_short(own: Workspace) -> None:
    params = params_of(own)
    trained(own, params)
    result = evaluate.run(own, params, OOD, SEED)
    network = network_of(own)
    scores = own.find(layout.evaluation_scores(OOD, SEED))
    for part, images in (
        ("id", id_images(own, params.data.id, "test", SEED).images),
        ("ood", ood_test_images(own, OOD, SEED)),
    ):
        with torch.no_grad():
            projected = network.head(network.features(images.read(slice(None))))
        nearest = torch.stack([(projected - centre).norm(dim=1) for centre in network.centres]).amin(0)
        stored = read_array(scores, evaluate.SCORES_KIND, f"{STEP}/{part}")
        np.testing.assert_allclose(stored, -nearest.numpy(), rtol=1e-3, atol=1e-5)
    assert result.short_schedules == {STEP}
    assert "STEP (short schedule)" in markdown(Results.from_evaluations([result]))


def test_the_authors_schedule_is_not_short() -> None:
    own = load_params(REPOSITORY / "params.yaml")[0].train_rival.step.model_dump()
    assert not is_short_step(own)
    assert is_short_step(own | {"epochs": 499})
    assert is_short_step(own | {"structure": own["structure"] | {"steps": 1499}})


def test_the_header_holds_all_that_it_was_made_with(own: Workspace) -> None:
    params = params_of(own)
    trained(own, params)
    about = read_header(own.find(layout.trained_network(STEP, OOD, SEED))).about
    assert about["method"] == STEP
    assert about["train_rival"] == params.train_rival.step.model_dump()


def test_points_have_no_views(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    params = load_params(REPOSITORY / "salcli" / "presets" / "toy.yaml", {"rivals": [STEP]})[0]
    for name in (params.data.id, params.data.ood[0]):
        prepare.prepare_set(workspace, params.data, name)
    prepare.prepare_split(workspace, params.data, SEED)
    prepare.prepare_wild(workspace, params.data, params.data.ood[0], SEED)
    train_id.run(workspace, params, SEED)
    with pytest.raises(DataError, match="leave it out of rivals"):
        train_ood.run(workspace, params, params.data.ood[0], SEED, method=STEP)
