"""train-id: fit the classifier h_w on labeled ID data (Eq. 3), or take given weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy

from salcli.artifacts import layout
from salcli.artifacts.atomic import write_text
from salcli.artifacts.checkpoint import write_network
from salcli.artifacts.curve import write_curve
from salcli.artifacts.fingerprint import fingerprint, fingerprint_of_file
from salcli.artifacts.resume import ResumePoint
from salcli.compute.augmentation import Augmentation
from salcli.compute.numerics import computing
from salcli.errors import WeightsError
from salcli.inference import accuracy, in_batches
from salcli.models.network import Classifier, check_own_head
from salcli.models.weights import load_weights
from salcli.progress import Silent
from salcli.seeding import derived_seed
from salcli.stages.batches import Batches
from salcli.stages.class_check import ClassCheck, class_check
from salcli.stages.inputs import id_images
from salcli.stages.network_spec import code_of_network, network_spec
from salcli.training import BatchResult, Epoch, Run, reproducible, train

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from salcli.artifacts.layout import Workspace
    from salcli.compute.numerics import Compute
    from salcli.params import Params
    from salcli.progress import Progress
    from salcli.training import Batch

EVALUATION_BATCH = 512


@dataclass(frozen=True)
class TrainedClassifier:
    """The figures of the run and what was written. Given weights have no last epoch."""

    seed: int
    last_epoch: Epoch | None
    train_accuracy: float
    test_accuracy: float
    written: list[Path]
    class_check: ClassCheck | None = None  # of a network that was used as it was given


def run(workspace: Workspace, params: Params, seed: int, progress: Progress | None = None) -> TrainedClassifier:
    """Train one classifier."""
    progress = progress or Silent()
    training = id_images(workspace, params.data.id, "train", seed)
    test = id_images(workspace, params.data.id, "test", seed)
    made_with = _made_with(workspace, params, seed)
    with computing(params) as compute:
        with reproducible(seed, "train-id") as generator:
            network = Classifier(network_spec(params.model, training))
            is_given = params.train_id.epochs == 0
            if params.train_id.weights:
                _start_from(workspace.given(params.train_id.weights), network, params.train_id.epochs)
            elif is_given:
                check_own_head(network)
            augment_generator = torch.Generator().manual_seed(derived_seed(seed, "augment"))
            course = Run(
                network=network,
                objective=_objective,
                batches=Batches(training, compute, Augmentation(params.train_id.augment, augment_generator)),
                n_samples=len(training),
                params=params.train_id,
                compute=compute,
                generator=generator,
                stateful={"augmentation": augment_generator},
            )
            with progress.task(f"train-id, seed {seed}", course.n_images, "images") as task:
                point = workspace.target(layout.resume_state("train-id", seed))
                keeper = ResumePoint(point, {**made_with, "processes": compute.processes.size}, task)
                curve = train(course, task, keeper)
        with progress.task("accuracy", len(training) + len(test), "images") as task:
            train_accuracy, test_accuracy = (
                accuracy(network, part.images, part.labels, EVALUATION_BATCH, compute, task)
                for part in (training, test)
            )
        check = _class_check(workspace, params, seed, network, compute) if is_given else None
        written = [
            workspace.target(place(seed))
            for place in (layout.classifier, layout.train_id_curve, layout.train_id_metrics)
        ]
        if compute.processes.is_main:
            write_network(written[0], network, made_with)
            write_curve(written[1], [asdict(epoch) for epoch in curve], fieldnames=("epoch", "loss", "accuracy"))
            figures = {"train_accuracy": train_accuracy, "test_accuracy": test_accuracy}
            write_text(written[2], json.dumps(figures) + "\n")
            keeper.clear()
    return TrainedClassifier(seed, curve[-1] if curve else None, train_accuracy, test_accuracy, written, check)


def _class_check(workspace: Workspace, params: Params, seed: int, network: Classifier, compute: Compute) -> ClassCheck:
    """On held-out data: were the network's classes in another order, nothing else would tell."""
    held_out = id_images(workspace, params.data.id, "calibration", seed)
    logits = in_batches(network, network.forward, held_out.images, EVALUATION_BATCH, compute, Silent())
    predicted = torch.cat([batch for (batch,) in logits]).argmax(1)
    return class_check(predicted, held_out.labels, held_out.class_names)


def _start_from(weights: Path, network: Classifier, epochs: int) -> None:
    report = load_weights(network, weights)
    if epochs == 0 and not report.head_was_loaded:
        raise WeightsError(
            f"{weights} has no head for {network.spec.n_classes} classes, so it cannot be used without training; "
            "set train_id.epochs to 1 or more"
        )


def _made_with(workspace: Workspace, params: Params, seed: int) -> dict[str, Any]:
    """All that the classifier depends on."""
    weights = params.train_id.weights
    return {
        "data": params.data.id,
        "seed": seed,
        "split": fingerprint(workspace.find(layout.id_split(seed))),
        "train_id": params.train_id.model_dump(),
        "model": params.model.model_dump(),
        "numerics": params.numerics.model_dump(),
        **({"weights": fingerprint_of_file(workspace.given(weights))} if weights else {}),
        **code_of_network(workspace, params.model),
    }


def _objective(network: nn.Module, batch: Batch) -> BatchResult:
    images, labels = batch
    logits = network(images)
    return BatchResult(cross_entropy(logits, labels), (logits.argmax(1) == labels).sum())
