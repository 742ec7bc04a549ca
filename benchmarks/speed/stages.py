"""Stages that run networks, against bare loops of PyTorch; the metrics, against one sort; start-up and DVC."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from benchmarks.speed.made_up import N_CLASSES, SIZE, SMALL_BACKBONE, Setup, image_project, write_representation
from benchmarks.speed.measuring import (
    Goal,
    Peak,
    Row,
    Sizes,
    Timed,
    lowest_peak,
    peak_during,
    seconds_of,
    seconds_text,
    side_by_side,
)
from salcli.engine.augmentation import Augmentation
from salcli.engine.batches import Batch, Batches, LabeledRows, Rows
from salcli.engine.device import computing
from salcli.engine.inference import CPU_BATCH
from salcli.engine.training import BatchResult, Run, reproducible, train
from salcli.models.network import Classifier
from salcli.pipeline import evaluate, extract
from salcli.pipeline.loading import classifier, id_samples, ood_test_samples, wild_samples
from salcli.progress import Silent
from salcli.sal.metrics import ood_metrics

# -- extract-grads

PER_SAMPLE_BATCH, N_PER_SAMPLE_BATCHES = 32, 4  # a gradient of all weights for each sample takes memory


def extraction(sizes: Sizes, folder: Path) -> Iterator[Row]:
    setup = image_project(folder / "images", sizes.images, sizes.backbone, sizes.device)
    batches = _normalised_batches(setup, [wild_samples(*setup), ood_test_samples(*setup)])
    network, n_images = _bare(_classifier(setup)), sum(map(len, batches))

    def ours() -> None:
        extract.run_wild(*setup)

    # more repeats: this ratio is near one, where noise counts
    timed = side_by_side(ours, lambda: _forward(network, batches), sizes.repeats + 2)
    share_of_limit = timed.times_faster
    yield Row.of_times(
        f"extract-grads / bare forward pass ({sizes.backbone}, {n_images:,} images)",
        Goal(0.95),
        timed,
        note=f"{n_images / min(timed.ours):,.0f} images/s",
    )

    few = [batch[:PER_SAMPLE_BATCH] for batch in batches][:N_PER_SAMPLE_BATCHES]
    n_few = sum(map(len, few))
    timed = side_by_side(ours, lambda: _per_sample_gradients(network, few), sizes.repeats).per_item(n_images, n_few)
    head_alone = seconds_of(lambda: _per_sample_gradients(network, few, of="head."))
    yield Row.of_times(
        "extract-grads / per-sample vmap(grad) of all weights",
        Goal(6),
        timed,
        note=f"per image; a bare forward pass, the limit: {timed.times_faster / share_of_limit:.3g} ×; "
        f"vmap(grad) of the head's weights alone: {seconds_text(head_alone / n_few)}",
    )

    n_large, n_small = 8 * sizes.images, 2 * sizes.images
    peaks = [lowest_peak(peak_of_extraction, n, repeats=3) for n in (n_large, n_small)]
    yield Row.of_memory(f"extract-grads, peak memory, {n_large:,} images / {n_small:,}", *peaks)


def peak_of_extraction(n_wild: int) -> Peak:
    """With a fast network, because what is held of the images is the same; after a small run, to load all code."""
    with tempfile.TemporaryDirectory() as folder:
        extract.run_wild(*image_project(Path(folder, "small"), 512, SMALL_BACKBONE))
        large = image_project(Path(folder, "large"), n_wild, SMALL_BACKBONE)
        return peak_during(lambda: extract.run_wild(*large))


def _per_sample_gradients(network: nn.Module, batches: Iterable[Tensor], *, of: str = "") -> None:
    """∂ loss / ∂ weights for each sample, with predicted labels, for all weights whose name contains `of`."""
    weights = {name: weight.detach() for name, weight in network.named_parameters()}
    fixed = {name: weight for name, weight in weights.items() if of not in name}
    wanted = {name: weight for name, weight in weights.items() if of in name}
    buffers = dict(network.named_buffers())

    def loss(some: dict[str, Tensor], image: Tensor) -> Tensor:
        logits = functional_call(network, {**fixed, **some, **buffers}, (image[None],))
        return cross_entropy(logits, logits.detach().argmax(1))

    for batch in batches:
        vmap(grad(loss), in_dims=(None, 0), randomness="different")(wanted, batch)


# -- a bare forward pass, the limit of everything that needs one


def _classifier(setup: Setup) -> Classifier:
    return classifier(setup.workspace, setup.experiment).to(setup.params.device)


def _bare(network: Classifier) -> nn.Sequential:
    """The network without normalisation."""
    return nn.Sequential(OrderedDict(backbone=network.backbone, head=network.head)).eval()


def _normalised_batches(setup: Setup, sources: Iterable[Rows]) -> list[Tensor]:
    """On the device and in the memory order of the network, in batches as large as those of salcli."""
    network, device = _classifier(setup), setup.params.device
    size = setup.params.extract_grads.batch_size
    size = min(size, CPU_BATCH) if device == "cpu" else size
    with torch.inference_mode():
        return [
            network.normalised(batch.to(device)).contiguous(memory_format=torch.channels_last)
            for rows in sources
            for batch in rows.read(slice(None)).split(size)
        ]


def _forward(network: nn.Module, batches: Iterable[Tensor]) -> None:
    with torch.inference_mode():
        for batch in batches:
            network(batch)


# -- training

BATCH, LR = 128, 0.01
EPOCHS_FROM_FILES = 2


def training(sizes: Sizes, folder: Path) -> Iterator[Row]:
    setup = image_project(folder / "images", sizes.images, sizes.backbone, sizes.device)
    samples = _training_samples(setup)
    images, labels = samples.rows.read(slice(None)).to(sizes.device), samples.labels.to(sizes.device)
    n_steps = len(images) // BATCH
    in_order = list(zip(images.split(BATCH), labels.split(BATCH), strict=True))[:n_steps]
    ours, bare = _classifier(setup), _classifier(setup)
    # more repeats: this ratio is near one, where noise counts
    timed = side_by_side(lambda: _train(setup, ours, 1), lambda: _bare_training(bare, in_order), sizes.repeats + 2)
    yield Row.of_times(
        f"training with flip and crop / bare loop without ({sizes.backbone}, {n_steps} steps of {BATCH})",
        Goal(0.97),
        timed,
        note=f"{n_steps * BATCH / min(timed.ours):,.0f} images/s",
    )

    small = image_project(folder / "small", 4 * sizes.images, SMALL_BACKBONE, sizes.device)
    n_files = _write_files(_training_samples(small), folder / "files")

    def against_files(new_network: Callable[[], nn.Module], repeats: int) -> Timed:
        return side_by_side(
            lambda: _train(small, new_network(), EPOCHS_FROM_FILES),
            lambda: _bare_training(new_network(), _batches_of_files(folder / "files", sizes.device)),
            repeats,
        )

    linear = against_files(lambda: LinearInPixels().to(sizes.device), 1)
    yield Row.of_times(
        f"training from an image set / DataLoader of PIL images ({EPOCHS_FROM_FILES} × {n_files:,} images)",
        Goal(2),
        against_files(lambda: _classifier(small), sizes.repeats),
        note=f"{SMALL_BACKBONE}, same augmentation, 2 workers; with a linear network: {linear.times_faster:.2g} ×",
    )


class LinearInPixels(nn.Module):
    """The smallest network: what is left is the time to read and to augment."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * SIZE * SIZE, N_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(images.flatten(1).float() / 255)
        return logits


def _training_samples(setup: Setup) -> LabeledRows:
    return id_samples(setup.workspace, setup.params, "train", setup.experiment)


def _train(setup: Setup, network: nn.Module, n_epochs: int) -> None:
    """As train-id does, without its accuracy at the end."""
    samples, seed = _training_samples(setup), setup.experiment.seed
    params = setup.params.train_id.model_copy(update={"epochs": n_epochs, "batch_size": BATCH, "lr": LR})
    with (
        computing(setup.params.device, setup.params.numerics) as compute,
        reproducible(seed, "benchmark") as generator,
    ):
        batches = Batches(samples, compute, Augmentation("flip-crop", torch.Generator().manual_seed(seed)))
        train(Run(network, _objective, batches, len(samples), params, compute, generator), Silent())


def _objective(network: nn.Module, batch: Batch) -> BatchResult:
    images, labels = batch
    logits = network(images)
    return BatchResult(cross_entropy(logits, labels), (logits.argmax(1) == labels).sum())


def _bare_training(network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    """SGD and nothing else."""
    network.train()
    optimizer = torch.optim.SGD(network.parameters(), LR, momentum=0.9, nesterov=True, weight_decay=5e-4)
    for images, labels in batches:
        loss = cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _batches_of_files(folder: Path, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Image files, decoded and augmented one by one by the workers of a DataLoader."""
    # imported here: the memory of extract-grads is measured in processes that import this module
    from torch.utils.data import DataLoader
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    augment = transforms.Compose(
        [
            transforms.RandomHorizontalFlip(),
            transforms.RandomCrop(SIZE, padding=4),
            transforms.PILToTensor(),  # the network normalises
        ]
    )
    loader = DataLoader(
        ImageFolder(str(folder), augment),
        BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        pin_memory=device == "cuda",
        persistent_workers=True,
    )
    for _ in range(EPOCHS_FROM_FILES):
        for images, labels in loader:
            yield images.to(device), labels.to(device)


def _write_files(samples: LabeledRows, folder: Path) -> int:
    """PNG files in one folder for each class."""
    for i, label in enumerate(samples.labels.tolist()):
        path = folder / str(label) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(samples.rows[i].permute(1, 2, 0).numpy()).save(path)
    return len(samples)


# -- scores and metrics

POST_HOC = ("sal-posthoc", "msp", "mahalanobis", "energy", "knn", "react", "dice", "ash", "gradnorm", "vim")
N_ID_TRAIN, N_WILD = 22_500, 27_778  # as with CIFAR-10, for any number of test images


def scoring(sizes: Sizes, folder: Path) -> Iterator[Row]:
    setup = image_project(folder / "images", 4 * sizes.images, sizes.backbone, sizes.device)
    workspace, params, experiment = setup
    id_test = id_samples(workspace, params, "test", experiment).rows
    ood_test = ood_test_samples(*setup)
    batches = _normalised_batches(setup, [id_test, ood_test])
    network = _classifier(setup)
    for artifact, n in (
        (experiment.id_representation("train"), N_ID_TRAIN),
        (experiment.id_representation("test"), len(id_test)),
        (experiment.wild_representation, N_WILD),
        (experiment.test_representation(), len(ood_test)),
    ):
        write_representation(workspace, artifact, n, N_CLASSES, network.n_features)
    chosen = params.evaluate.model_copy(update={"methods": POST_HOC})
    setup, bare = setup._replace(params=params.model_copy(update={"evaluate": chosen})), _bare(network)

    def pass_and_scores() -> None:
        _forward(bare, batches)
        evaluate.run(*setup)

    yield Row.of_times(
        f"forward pass and evaluate with {len(POST_HOC)} post-hoc scores / forward pass alone "
        f"({sizes.backbone}, {len(id_test) + len(ood_test):,} images)",
        Goal(1.3, at_most=True),
        side_by_side(pass_and_scores, lambda: _forward(bare, batches), sizes.repeats),
        note=f"with {N_ID_TRAIN:,} ID training samples, {N_WILD:,} wild samples, metrics and files; "
        "evaluate reads what extract-grads stored of the pass",
    )

    rng = np.random.default_rng(0)
    n_id = sizes.scores // 2
    id_scores, ood_scores = rng.standard_normal(n_id) + 1, rng.standard_normal(sizes.scores - n_id)
    both = np.concatenate([id_scores, ood_scores])
    yield Row.of_times(
        f"FPR95, AUROC, both AUPR of {sizes.scores:,} scores / one numpy.sort",
        Goal(4, at_most=True),
        side_by_side(lambda: ood_metrics(id_scores, ood_scores), lambda: np.sort(both), sizes.repeats),
    )


# -- whole commands

BIN = Path(sys.executable).parent
WORKED = re.compile(r"worked\s+([\d.]+)\s+s")  # printed by every stage at its end, perhaps over two lines


def commands(sizes: Sizes, folder: Path) -> Iterator[Row]:
    yield Row.of_times(
        'salcli --help / python -c "import typer, rich"',
        Goal(2, at_most=True),
        side_by_side(
            lambda: _run("salcli", "--help"), lambda: _run("python", "-c", "import typer, rich"), 3 * sizes.repeats
        ),
    )

    project, output = folder / "demo", []
    _run("salcli", "init", str(project))
    seconds = seconds_of(lambda: output.append(_run("dvc", "repro", cwd=project)))
    worked = [float(text) for text in WORKED.findall(output[0])]
    yield Row(
        what="dvc repro of the demo: seconds of work / all seconds",
        goal=Goal(0.5),
        value=sum(worked) / seconds,
        ours=seconds_text(sum(worked)),
        baseline=seconds_text(seconds),
        note=f"{len(worked)} stages; work is what runs below a progress bar",
    )

    idle = min(seconds_of(lambda: _run("dvc", "repro", cwd=project)) for _ in range(sizes.repeats))
    yield Row(
        what="dvc repro with nothing to do",
        goal=Goal(3, at_most=True),
        value=idle,
        ours=seconds_text(idle),
        baseline="–",
        unit="s",
        note=f"the best of {sizes.repeats}",
    )


def _run(program: str, *arguments: str, cwd: Path | None = None) -> str:
    """What a command of this environment prints."""
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [str(BIN / program), *arguments], cwd=cwd, env=environment, check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{program} {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout
