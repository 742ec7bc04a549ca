"""A training step beside the bare loop, and training from an image set beside a DataLoader of PIL images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.speed.clock import Timed, shown, side_by_side
from benchmarks.speed.made_up import ID, SEED, image_experiment
from benchmarks.speed.other_ways import bare_training, training_from_files
from benchmarks.speed.rows import Goal, Row, Sizes
from salcli.compute.augmentation import Augmentation
from salcli.compute.numerics import computing
from salcli.progress import Silent
from salcli.stages.batches import Batches
from salcli.stages.inputs import classifier_of, id_images
from salcli.training import BatchResult, Run, reproducible, train

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from benchmarks.speed.made_up import Experiment
    from salcli.models.network import Classifier
    from salcli.training import Batch

BATCH, LR = 128, 0.01
SMALL = "small-cnn"
EPOCHS_FROM_FILES = 2


def rows(sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Two lines of the table."""
    made = image_experiment(folder / "images", sizes.images, sizes.backbone, sizes.device)
    training = id_images(made.workspace, ID, "train", SEED)
    images, labels = training.images.read(slice(None)).to(sizes.device), training.labels.to(sizes.device)
    n_steps = len(images) // BATCH
    ours, bare = _network(made), _network(made)
    timed = side_by_side(
        lambda: _epochs(made, ours, 1),
        lambda: bare_training(bare, images, labels, BATCH, n_steps, LR),
        sizes.repeats + 2,  # near one: noise counts
    )
    yield Row(
        f"training with flip and crop / bare loop without ({sizes.backbone}, {n_steps} steps of {BATCH})",
        Goal(0.97), timed.times_faster, shown(timed.ours), shown(timed.other),
        note=f"{n_steps * BATCH / min(timed.ours):,.0f} images/s",
    )  # fmt: skip

    small = image_experiment(folder / "small", 4 * sizes.images, SMALL, sizes.device)
    n_files = _write_files(small, folder / "files")

    def from_files(network: nn.Module) -> None:
        training_from_files(network, folder / "files", BATCH, EPOCHS_FROM_FILES, LR, 32, sizes.device)

    def beside(make: Callable[[], nn.Module], repeats: int) -> Timed:
        return side_by_side(lambda: _epochs(small, make(), EPOCHS_FROM_FILES), lambda: from_files(make()), repeats)

    timed = beside(lambda: _network(small), sizes.repeats)
    linear = beside(lambda: LinearInPixels().to(sizes.device), 1)
    yield Row(
        f"training from an image set / DataLoader of PIL images ({EPOCHS_FROM_FILES} × {n_files:,} images)",
        Goal(2), timed.times_faster, shown(timed.ours), shown(timed.other),
        note=f"{SMALL}, same augmentation, 2 workers; with a linear network: {linear.times_faster:.2g} ×",
    )  # fmt: skip


class LinearInPixels(nn.Module):
    """The smallest network: what is left is the time to read and to augment."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 32 * 32, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Class logits of images in [0, 255]."""
        logits: Tensor = self.head(images.flatten(1).float() / 255)
        return logits


def _network(made: Experiment) -> Classifier:
    return classifier_of(made.workspace, SEED)[0].to(made.params.device)


def _epochs(made: Experiment, network: nn.Module, n_epochs: int) -> None:
    """As train-id trains, but for the accuracy at the end."""
    params = made.params.train_id.model_copy(update={"epochs": n_epochs, "batch_size": BATCH, "lr": LR})
    training = id_images(made.workspace, ID, "train", SEED)
    with computing(made.params) as compute, reproducible(SEED, "benchmark") as generator:
        augment = Augmentation("flip-crop", torch.Generator().manual_seed(SEED))
        batches = Batches(training, compute, augment)
        train(Run(network, _objective, batches, len(training), params, compute, generator), Silent())


def _objective(network: nn.Module, batch: Batch) -> BatchResult:
    images, labels = batch
    logits = network(images)
    return BatchResult(cross_entropy(logits, labels), (logits.argmax(1) == labels).sum())


def _write_files(made: Experiment, folder: Path) -> int:
    """The ID training images as PNG files, one folder for each class."""
    training = id_images(made.workspace, ID, "train", SEED)
    for place, label in enumerate(training.labels.tolist()):
        path = folder / str(label) / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(training.images[place].permute(1, 2, 0).numpy()).save(path)
    return len(training)
