"""Projects with random images, an untrained classifier, or random representations, laid out as the stages need them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from salcli.data.sets import Samples
from salcli.data.splits import IdSplit
from salcli.models.network import Classifier, NetworkSpec
from salcli.params.presets import preset
from salcli.params.schema import Params, load_params
from salcli.pipeline import prepare
from salcli.project.init import create
from salcli.sal.gradients import Representation
from salcli.store.formats import (
    WILD_SET,
    write_id_split,
    write_index,
    write_network,
    write_samples,
    writing_representation,
)
from salcli.store.layout import Artifact, Experiment, Workspace, prepared_set

ID, OOD = "cifar10", "svhn"
SMALL_BACKBONE = "small-cnn"
N_CLASSES, SIZE = 10, 32  # of images
ROWS_AT_ONCE = 4096
SPREAD_OF_SCALES = 0.58  # std of the log of the std of each dimension: of EfficientNet-Lite0's features of CIFAR-10
LINEAR_HEADS: dict[str, Any] = {  # as `init` plans them for vectors and frozen backbones
    "data.image_size": None,
    "model.backbone": "linear",
    "model.drop_rate": 0.0,
    "model.mean": "auto",
    "model.std": "auto",
    **{f"{stage}.solver": "lbfgs" for stage in ("train_id", "train_ood")},
    **{f"{stage}.augment": "none" for stage in ("train_id", "train_ood")},
}


class Setup(NamedTuple):
    """The first arguments of every stage: `extract.run_wild(*setup)`."""

    workspace: Workspace
    params: Params
    experiment: Experiment


def empty_project(folder: Path, values: dict[str, Any]) -> Setup:
    """The CIFAR-10 preset with one experiment, without data. `values` are params by dotted key."""
    small = {"seeds": [0], "data.ood": [OOD], "rivals": [], "encoders": [], "evaluate.methods": ["sal"]}
    create(folder, preset("cifar10"), {**small, **values}, dvc=False)
    params, _ = load_params(folder / "params.yaml")
    return Setup(Workspace(folder), params, params.experiments()[0])


def image_project(folder: Path, n_wild: int, backbone: str, device: str = "cpu") -> Setup:
    """Images of noise, split and mixed, and an untrained classifier."""
    setup = empty_project(folder, {"model.backbone": backbone, "model.drop_rate": 0.0, "device": device})
    workspace, params, experiment = setup
    rng = np.random.default_rng(0)
    # nine tenths of the wild data are ID data, and the wild part is half of the ID data that are not for the test
    n_id = 2 * round(0.9 * n_wild)
    n_test = n_id // 5
    array = _noise(rng, n_id + n_test)
    id_set = Samples(
        array,
        labels=rng.integers(0, N_CLASSES, n_id + n_test),
        class_names=tuple(f"class {k}" for k in range(N_CLASSES)),
        is_test=np.arange(n_id + n_test) >= n_id,
    )
    write_samples(workspace.target(prepared_set(ID)), id_set, {"name": ID})
    write_samples(workspace.target(prepared_set(OOD)), Samples(_noise(rng, n_wild)), {"name": OOD})
    prepare.prepare_split(workspace, params.data, experiment)
    prepare.prepare_wild(workspace, params.data, experiment)
    _write_classifier(setup, backbone)
    return setup


def vector_project(folder: Path, n_wild: int, dimensions: int, post_hoc: tuple[str, ...], device: str) -> Setup:
    """Vectors as a network gives them, in clusters that overlap; OOD data are further clusters. Split and mixed.

    Like those of EfficientNet-Lite0 on CIFAR-10: scikit-learn's LogisticRegression takes 88 iterations for 3,000 of
    them and 122 for 7,000 (93 and 124 there), because dimensions have different scales.
    """
    setup = empty_project(
        folder, {**LINEAR_HEADS, "data.channels": None, "evaluate.methods": ["sal", *post_hoc], "device": device}
    )
    workspace, params, experiment = setup
    rng = np.random.default_rng(0)
    inside = rng.standard_normal((64, dimensions), dtype=np.float32) / 8
    centres = 0.4 * rng.standard_normal((N_CLASSES + 4, 64), dtype=np.float32)
    scale = np.exp(SPREAD_OF_SCALES * rng.standard_normal(dimensions, dtype=np.float32))

    def drawn(classes: np.ndarray) -> np.ndarray:
        inner = centres[classes] + rng.standard_normal((len(classes), 64), dtype=np.float32)
        noise = rng.standard_normal((len(classes), dimensions), dtype=np.float32)
        return scale * np.maximum(inner @ inside + noise / 2, 0)

    n_id = 2 * round(0.9 * n_wild)
    n_test = n_id // 5
    labels = rng.integers(0, N_CLASSES, n_id + n_test)
    array = drawn(labels)
    id_set = Samples(
        array,
        labels=labels,
        class_names=tuple(f"class {k}" for k in range(N_CLASSES)),
        is_test=np.arange(n_id + n_test) >= n_id,
    )
    write_samples(workspace.target(prepared_set(ID)), id_set, {"name": ID})
    odd = drawn(N_CLASSES + rng.integers(0, 4, round(0.2 * n_wild)))
    write_samples(workspace.target(prepared_set(OOD)), Samples(odd), {"name": OOD})
    prepare.prepare_split(workspace, params.data, experiment)
    prepare.prepare_wild(workspace, params.data, experiment)
    return setup


def filter_project(folder: Path, n_wild: int, n_classes: int, n_features: int, svd: str = "class-conditional") -> Setup:
    """Representations of an ID training set as large as the wild set, of a calibration set and of the wild set."""
    setup = empty_project(folder, {"filter.svd": svd, "filter.directions": "wild"})
    workspace, _, experiment = setup
    # never read: representations store the fingerprints of these three files
    none = np.empty(0, np.int64)
    write_id_split(workspace.target(experiment.split), IdSplit(none, none, none, none), {})
    write_index(workspace.target(experiment.wild), WILD_SET, none, workspace.about(experiment.wild))
    _write_classifier(setup, SMALL_BACKBONE)
    for artifact, n in (
        (experiment.id_representation("train"), n_wild),
        (experiment.id_representation("calibration"), max(n_classes, n_wild // 10)),
        (experiment.wild_representation, n_wild),
    ):
        write_representation(workspace, artifact, n, n_classes, n_features)
    return setup


def write_representation(workspace: Workspace, artifact: Artifact, n: int, n_classes: int, n_features: int) -> None:
    """Samples of all classes in turn, each predicted as its own class, with features as they come out of a ReLU.

    As in real data, some samples of a class, more in one class than in another, are almost as likely to be of the next
    class: so the gradients of a class have one direction that stands out.
    """
    generator, of_classes = torch.Generator().manual_seed(n), torch.Generator().manual_seed(0)
    centres = torch.rand(n_classes, n_features, generator=of_classes)
    doubtful_share = 0.05 + 0.4 * torch.rand(n_classes, generator=of_classes)
    path = workspace.target(artifact)
    with writing_representation(path, n, n_classes, n_features, workspace.about(artifact)) as append:
        for start in range(0, n, ROWS_AT_ONCE):
            rows = torch.arange(min(ROWS_AT_ONCE, n - start))
            label = (start + rows) * 7919 % n_classes  # in no order of classes, and equally many of each
            feature = (centres[label] + 0.5 * torch.randn(len(rows), n_features, generator=generator)).relu()
            logits = torch.randn(len(rows), n_classes, generator=generator)
            logits[rows, label] += 12
            is_doubtful = torch.rand(len(rows), generator=generator) < doubtful_share[label]
            doubtful, own = rows[is_doubtful], label[is_doubtful]
            lead = torch.rand(len(doubtful), generator=generator)
            logits[doubtful, (own + 1) % n_classes] = logits[doubtful, own] - lead
            append(Representation(feature, logits, label))


def _noise(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(0, 256, (n, 3, SIZE, SIZE), dtype=np.uint8)


def _write_classifier(setup: Setup, backbone: str) -> None:
    torch.manual_seed(0)
    network = Classifier(NetworkSpec(backbone, N_CLASSES, mean=(0.5,) * 3, std=(0.25,) * 3))
    artifact = setup.experiment.classifier
    write_network(setup.workspace.target(artifact), network, setup.workspace.about(artifact))
