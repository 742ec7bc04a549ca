"""train-id: fit the classifier h_w on labeled ID data (Eq. 3)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from torch.nn.functional import cross_entropy

from salcli.artifacts import layout
from salcli.artifacts.atomic import write_text
from salcli.artifacts.checkpoint import write_network
from salcli.artifacts.curve import write_curve
from salcli.artifacts.fingerprint import fingerprint
from salcli.devices import resolve_device
from salcli.inference import accuracy
from salcli.models.network import Classifier, NetworkSpec
from salcli.progress import Silent
from salcli.stages.inputs import id_images
from salcli.training import BatchResult, Epoch, n_images_seen, reproducible, train

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from salcli.artifacts.layout import Workspace
    from salcli.params import Params
    from salcli.progress import Progress

EVALUATION_BATCH = 512


@dataclass(frozen=True)
class TrainedClassifier:
    """The figures of the run and what was written."""

    seed: int
    last_epoch: Epoch
    train_accuracy: float
    test_accuracy: float
    written: list[Path]


def run(workspace: Workspace, params: Params, seed: int, progress: Progress | None = None) -> TrainedClassifier:
    """Train one classifier."""
    progress = progress or Silent()
    device = resolve_device(params.device)
    training = id_images(workspace, params.data.id, "train", seed)
    test = id_images(workspace, params.data.id, "test", seed)
    mean, std = _channel_statistics(training.images)
    with reproducible(seed, "train-id") as generator:
        network = Classifier(NetworkSpec(params.model.backbone, training.n_classes, mean, std)).to(device)
        images, labels = training.images.to(device), training.labels.to(device)

        def objective(batch: Tensor) -> BatchResult:
            logits = network(images[batch])
            return BatchResult(cross_entropy(logits, labels[batch]), (logits.argmax(1) == labels[batch]).sum())

        n_seen = n_images_seen(len(training), params.train_id)
        with progress.task(f"train-id, seed {seed}", n_seen, "images") as task:
            curve = list(train(network, objective, len(training), params.train_id, generator, task))
    with progress.task("accuracy", len(training) + len(test), "images") as task:
        train_accuracy, test_accuracy = (
            accuracy(network, part.images, part.labels, EVALUATION_BATCH, device, task) for part in (training, test)
        )
    written = [
        workspace.target(place(seed)) for place in (layout.classifier, layout.train_id_curve, layout.train_id_metrics)
    ]
    made_with = {
        "data": params.data.id,
        "seed": seed,
        "split": fingerprint(workspace.find(layout.id_split(seed))),
        "train_id": params.train_id.model_dump(),
    }
    write_network(written[0], network, made_with)
    write_curve(written[1], [asdict(epoch) for epoch in curve])
    write_text(written[2], json.dumps({"train_accuracy": train_accuracy, "test_accuracy": test_accuracy}) + "\n")
    return TrainedClassifier(seed, curve[-1], train_accuracy, test_accuracy, written)


def _channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, on a scale of 0 to 1."""
    pixels = images.transpose(0, 1).flatten(1).double() / 255
    std = pixels.std(dim=1).clamp(min=1e-3)  # a channel that never changes carries nothing to scale
    return tuple(pixels.mean(dim=1).tolist()), tuple(std.tolist())
