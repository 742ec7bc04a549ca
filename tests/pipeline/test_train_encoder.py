"""KNN+, CSI and STEP with tiny schedules: what they learn, and how they score."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.quick import OOD
from helpers.stages import params_of, prepare_sets
from torch import Tensor
from torch.nn.functional import normalize

from salcli.detector import stage as detector
from salcli.errors import ParamsError
from salcli.methods.base import built_in
from salcli.methods.contrastive import RotationClassifier
from salcli.methods.rival_step import StepNetwork
from salcli.params.presets import default_text
from salcli.params.reading import edited
from salcli.params.schema import load_params
from salcli.pipeline import evaluate, extract, prepare, train_id, train_ood
from salcli.pipeline.loading import id_samples, ood_test_samples
from salcli.store.files import read_arrays
from salcli.store.formats import read_network
from salcli.store.layout import TEST_SCORES, Experiment, Workspace

ENCODERS = ["csi", "knn-plus"]
FEW_IMAGES = {"train": 0.08, "calibration": 0.08, "wild": 0.08, "test": 0.76}
SMALL = Experiment(0, OOD, 0.3)
CONTRAST = {
    "epochs": 2, "batch_size": 38, "warmup_epochs": 1, "smallest_crop": 0.6, "projection": 16, "head.epochs": 2,
    "head.batch_size": 38,
}  # fmt: skip
STEP = {
    "epochs": 2, "batch_size": 64, "smallest_crop": 0.6, "projection": 16, "structure.steps": 20,
    "structure.batch_size": 32,
}  # fmt: skip
VALUES = {
    **{f"methods.{encoder}.{key}": value for encoder in ENCODERS for key, value in CONTRAST.items()},
    **{f"methods.step.{key}": value for key, value in STEP.items()},
    "data.id_shares": FEW_IMAGES, "data.pi": [0.3], "train_id.epochs": 1, "methods.knn.k": 5, "encoders": ENCODERS,
    "rivals": ["step"], "evaluate.methods": ["step", "msp", *ENCODERS],
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small project where all three are trained. None of them needs the filter."""
    root = tmp_path_factory.mktemp("trained")
    (root / "params.yaml").write_text(edited(default_text(), VALUES))
    workspace, params = Workspace(root), load_params(root / "params.yaml")[0]
    prepare_sets(workspace, params)
    prepare.prepare_wild(workspace, params.data, SMALL)
    train_id.run(workspace, params, SMALL)
    extract.run_id(workspace, params, SMALL)
    extract.run_wild(workspace, params, SMALL)
    for encoder in ENCODERS:
        train_ood.run_encoder(workspace, params, SMALL, encoder)
    train_ood.run(workspace, params, SMALL, rival="step")
    return root


@pytest.fixture
def own(trained: Path, tmp_path: Path) -> Workspace:
    return Workspace(shutil.copytree(trained, tmp_path / "own"))


def train(workspace: Workspace, name: str, **changes: Any) -> Any:
    """The network after a training with changed hyper-parameters; a__b stands for a.b."""
    values = {f"methods.{name}.{key.replace('__', '.')}": value for key, value in changes.items()}
    params = params_of(workspace, values)
    if name == "step":
        train_ood.run(workspace, params, SMALL, rival=name)
    else:
        train_ood.run_encoder(workspace, params, SMALL, name)
    return stored_network(workspace, name)


def stored_network(workspace: Workspace, name: str) -> Any:
    artifact = SMALL.network(name) if name == "step" else SMALL.encoder(name)
    return read_network(workspace.find(artifact), built_in()[name].network)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "changes", "accuracy"),
    [
        ("knn-plus", {"lr": 0.1, "head__lr": 0.5, "epochs": 14, "batch_size": 23, "head__epochs": 6}, 0.6),
        ("csi", {"lr": 20.0, "warmup_lr": 2.0, "epochs": 14, "batch_size": 23, "head__epochs": 6}, 0.2),
    ],
)
def test_an_encoder_learns(own: Workspace, name: str, changes: dict[str, Any], accuracy: float) -> None:
    """Small batches of a tiny set need other rates than the authors'. Chance is 1/8."""
    network = train(own, name, **changes, head__batch_size=23)
    rows = own.find(SMALL.encoder_curve(name)).path.read_text().splitlines()
    assert (rows[0], len(rows)) == ("phase,epoch,loss,accuracy", 1 + 14 + 6)
    assert float(rows[14].split(",")[2]) < 0.9 * float(rows[1].split(",")[2])
    test = id_samples(own, params_of(own), "test", SMALL)
    with torch.inference_mode():
        assert (network(test.rows.read(slice(None))).argmax(1) == test.labels).double().mean() > accuracy


def test_step_learns_to_find_views_and_keeps_the_means_of_the_training_images(own: Workspace) -> None:
    network = train(own, "step", epochs=6, batch_size=32, lr=0.003)
    lines = own.find(SMALL.curve("step")).path.read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    assert float(rows[5]["loss"]) < 0.8 * float(rows[0]["loss"])
    assert float(rows[5]["accuracy"]) > 2 * float(rows[0]["accuracy"])
    training = id_samples(own, params_of(own), "train", SMALL)
    with torch.no_grad():
        projected = network.head(network.features(training.rows.read(slice(None))))
    means = torch.stack([projected[training.labels == label].mean(0) for label in range(8)])
    torch.testing.assert_close(network.centres, means, atol=1e-5, rtol=1e-4)


# --- scores


def expected_scores(network: Any, known: Tensor, images: Tensor) -> Tensor:
    """As the papers define them, from whole matrices."""
    features = network.features(images)
    if isinstance(network, StepNetwork):
        return -torch.cdist(network.head(features), network.centres).amin(1)
    if isinstance(network, RotationClassifier):
        turned = [network.joint_head(network.features(torch.rot90(images, turns, (2, 3)))) for turns in range(4)]
        return sum(logits.chunk(4, 1)[turns] for turns, logits in enumerate(turned)).div(4).softmax(1).amax(1)
    distances = torch.cdist(normalize(features.double()), normalize(network.features(known).double()))
    return -distances.sort(1).values[:, 5 - 1]


def test_scores_are_their_definitions_and_short_schedules_are_marked(own: Workspace) -> None:
    params = params_of(own)
    done = evaluate.run(own, params, SMALL)
    assert list(done.metrics) == ["step", "msp", *ENCODERS]
    scores = read_arrays(own.find(SMALL.evaluation("scores.h5")), TEST_SCORES)
    sides = {
        "id": id_samples(own, params, "test", SMALL).rows.read(slice(0, 20)),
        "ood": ood_test_samples(own, params, SMALL).read(slice(0, 20)),
    }
    known = id_samples(own, params, "train", SMALL).rows.read(slice(None))
    for name in ("step", *ENCODERS):
        for side, images in sides.items():
            with torch.inference_mode():
                expected = expected_scores(stored_network(own, name), known, images)
            np.testing.assert_allclose(-scores[f"{name}/{side}"][:20], expected, rtol=1e-3, atol=2e-4)
    content = json.loads(own.find(SMALL.evaluation("metrics.json")).path.read_text())
    assert [name for name in done.metrics if content[name].get("short_schedule")] == ["step", *ENCODERS]


def test_baselines_on_all_id_data_are_rows_of_their_own(own: Workspace) -> None:
    """The network has seen the wild ID samples and those for calibration, and no test sample."""
    rows = ["msp", "all-id", "msp@all-id", "odin@all-id", "knn@all-id"]
    values = {"encoders": ["all-id"], "rivals": [], "methods.all-id.epochs": 2, "evaluate.methods": rows}
    params = params_of(own, values)
    train_ood.run_encoder(own, params, SMALL, "all-id")
    parts = {part: id_samples(own, params, part, SMALL).rows for part in ("train", "calibration", "test", "all")}
    assert {*parts["all"].index} > {*parts["train"].index, *parts["calibration"].index}
    assert len(parts["all"]) + len(parts["test"]) == len(parts["all"].arrays[0])
    assert not {*parts["all"].index} & {*parts["test"].index}
    scores = evaluate.run(own, params, SMALL).scores
    np.testing.assert_allclose(scores["msp@all-id"].id, scores["all-id"].id, rtol=1e-6)
    assert abs(scores["msp@all-id"].id - scores["msp"].id).max() > 0.01
    assert scores["all-id"].label == scores["msp@all-id"].label
    assert [scores[row].label for row in rows[2:]] == [f"{name} (all ID data)" for name in ("MSP", "ODIN", "KNN")]
    images, known = parts["test"].read(slice(0, 20)), parts["all"].read(slice(None))
    with pytest.raises(ParamsError, match="all-id was trained on the calibration data, too"):
        detector.run(own, params_of(own, values | {"detector.method": "all-id"}), SMALL)
    with torch.inference_mode():
        expected = expected_scores(stored_network(own, "all-id"), known, images)
    np.testing.assert_allclose(-scores["knn@all-id"].id[:20], expected, rtol=1e-3, atol=2e-4)
