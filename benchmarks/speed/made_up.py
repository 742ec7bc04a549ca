"""Made-up images, networks and gradients, laid out as the stages want them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from salcli.artifacts import layout
from salcli.artifacts.checkpoint import write_network
from salcli.artifacts.fingerprint import fingerprint
from salcli.artifacts.gradients import writing_gradients
from salcli.artifacts.images import write_image_set
from salcli.artifacts.layout import Workspace
from salcli.data.image_set import ImageSet
from salcli.models.network import Classifier, NetworkSpec
from salcli.params import Params, load_params
from salcli.presets.registry import preset
from salcli.project import create
from salcli.sal.gradients import Factors, last_layer_residual
from salcli.stages import prepare

if TYPE_CHECKING:
    from pathlib import Path

ID, OOD, SEED = "cifar10", "svhn", 0
ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Experiment:
    """A workspace with the files that a stage begins with."""

    workspace: Workspace
    params: Params


def params_in(folder: Path, **values: Any) -> Experiment:
    """A workspace without data. Dots in the names of values are written as two underscores."""
    dotted = {name.replace("__", "."): value for name, value in values.items()}
    create(folder, preset("cifar10"), {"data.ood": [OOD], **dotted}, dvc=False, force=True)
    return Experiment(Workspace(folder), load_params(folder / "params.yaml")[0])


def image_experiment(folder: Path, n_wild: int, backbone: str, device: str, *, size: int = 32) -> Experiment:
    """Images of noise, split and mixed, and a classifier that nobody has trained."""
    made = params_in(folder, model__backbone=backbone, model__drop_rate=0.0, device=device)
    rng = np.random.default_rng(0)
    # nine tenths of the wild data are ID data, which are half of all that are not for the test
    n_id = 2 * round(0.9 * n_wild)
    n_test = n_id // 5
    images = rng.integers(0, 256, (n_id + n_test, 3, size, size), dtype=np.uint8)
    labels = rng.integers(0, 10, n_id + n_test)
    is_test = np.arange(n_id + n_test) >= n_id
    names = tuple(f"class {k}" for k in range(10))
    write_image_set(made.workspace.target(layout.prepared_set(ID)), ImageSet(images, labels, names, is_test), ID)
    ood = ImageSet(rng.integers(0, 256, (n_wild, 3, size, size), dtype=np.uint8))
    write_image_set(made.workspace.target(layout.prepared_set(OOD)), ood, OOD)
    prepare.prepare_split(made.workspace, made.params.data, SEED)
    prepare.prepare_wild(made.workspace, made.params.data, OOD, SEED)
    write_classifier(made, backbone)
    return made


def write_classifier(made: Experiment, backbone: str) -> None:
    """With random weights."""
    torch.manual_seed(0)
    network = Classifier(NetworkSpec(backbone, 10, mean=(0.5,) * 3, std=(0.25,) * 3))
    split = fingerprint(made.workspace.find(layout.id_split(SEED)))
    write_network(made.workspace.target(layout.classifier(SEED)), network, {"split": split})


def gradient_experiment(
    folder: Path, n_wild: int, n_classes: int, n_features: int, *, n_id: int | None = None, **values: Any
) -> Experiment:
    """Gradients of a made-up network: nothing else is needed to filter."""
    made = params_in(folder, **values)
    for place, n in (
        (layout.id_gradients("train", SEED), n_id or n_wild),
        (layout.id_gradients("calibration", SEED), max(n_classes, n_wild // 10)),
        (layout.wild_gradients(OOD, SEED), n_wild),
    ):
        write_gradients(made.workspace.target(place), n, n_classes, n_features)
    return made


def write_gradients(
    path: Path, n: int, n_classes: int, n_features: int, network: str = "made up", wild: str = "made up"
) -> None:
    """Samples in no order of classes; features as they come out of a ReLU, around a centre for each class.

    As in real data, some samples of a class, more in one than in another, are as likely of its neighbour: so the
    gradients of a class have a direction that stands out (its squared singular value is several times the next one's).
    """
    generator, of_classes = torch.Generator().manual_seed(n), torch.Generator().manual_seed(0)
    centres = torch.rand(n_classes, n_features, generator=of_classes)
    doubtful_share = 0.05 + 0.4 * torch.rand(n_classes, generator=of_classes)
    made_with = {"wild": wild, "data": "made up"}
    with writing_gradients(path, n, n_classes, n_features, network, made_with) as writer:
        for start in range(0, n, ROWS_AT_ONCE):
            rows = torch.arange(min(ROWS_AT_ONCE, n - start))
            label = (start + rows) * 7919 % n_classes  # every class has about as many
            feature = (centres[label] + 0.5 * torch.randn(len(rows), n_features, generator=generator)).relu()
            logits = torch.randn(len(rows), n_classes, generator=generator)
            logits[rows, label] += 10
            is_doubtful = torch.rand(len(rows), generator=generator) < doubtful_share[label]
            logits[rows, (label + 1) % n_classes] += 10 * is_doubtful
            factors = Factors(last_layer_residual(logits, label), feature, label)
            writer.append(factors, label, np.arange(start, start + len(rows)))
