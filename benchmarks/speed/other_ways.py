"""The other ways: small and honest, as one would write them without salcli. The bare loops are the limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from salcli.inference import CPU_BATCH

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from salcli.models.network import Classifier
    from salcli.sal.gradients import Factors


def bare_forward(network: Classifier, batches: Sequence[Tensor]) -> None:
    """Class logits of batches that are normalised, on the device, and in channels-last order already."""
    with torch.inference_mode():
        for batch in batches:
            network.head(network.backbone(batch))


def best_batch(size: int, device: str) -> int:
    """Of a pass without gradients: on a CPU, more do not fit in the caches."""
    return min(size, CPU_BATCH) if device == "cpu" else size


def ready(network: Classifier, images: Tensor, batch_size: int, device: str) -> list[Tensor]:
    """Batches as `bare_forward` wants them."""
    network.to(device).eval()
    with torch.inference_mode():
        return [
            network.normalised(batch.to(device)).contiguous(memory_format=torch.channels_last)
            for batch in images.split(batch_size)  # type: ignore[no-untyped-call]
        ]


def per_sample_gradients(network: nn.Module, batches: Iterable[Tensor], *, of: str) -> None:
    """d loss / d weights for each sample, by vmap over grad, with predicted labels.

    Of all weights, as a loop over samples with `backward` gets them, or `of` the head alone.
    """
    weights = {name: weight.detach() for name, weight in network.named_parameters()}
    fixed = {name: weight for name, weight in weights.items() if of not in name}
    wanted = {name: weight for name, weight in weights.items() if of in name}
    buffers = dict(network.named_buffers())

    def loss(some: dict[str, Tensor], image: Tensor) -> Tensor:
        logits = functional_call(network, {**fixed, **some, **buffers}, (image[None],))
        return cross_entropy(logits, logits.detach().argmax(1))

    for batch in batches:
        vmap(grad(loss), in_dims=(None, 0), randomness="different")(wanted, batch)


def dense_scores(wild: Factors, other: Factors, id_train: Factors, classes: Iterable[int]) -> tuple[np.ndarray, ...]:
    """Class-conditional τ by the book: build G of a class, take its SVD, project on the first right vector."""
    scores = tuple(np.full(len(source), np.nan) for source in (wild, other))
    for k in classes:
        reference = id_train.of_class(k).dense().double().numpy().mean(axis=0)
        G = wild.of_class(k).dense().double().numpy() - reference
        v = np.linalg.svd(G, full_matrices=False)[2][0]
        for values, source in zip(scores, (wild, other), strict=True):
            rows = source.of_class(k).dense().double().numpy() - reference
            values[source.label.numpy() == k] = (rows @ v) ** 2
    return scores


def dense_svd(m: int, width: int) -> None:
    """One SVD of one dense matrix of noise."""
    np.linalg.svd(np.random.default_rng(0).standard_normal((m, width)), full_matrices=False)


def bare_training(network: nn.Module, images: Tensor, labels: Tensor, batch_size: int, n_steps: int, lr: float) -> None:
    """SGD on tensors in memory, in order, and nothing else."""
    network.train()
    optimiser = torch.optim.SGD(network.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    for step in range(n_steps):
        first = step * batch_size % (len(images) - batch_size + 1)
        rows = slice(first, first + batch_size)
        loss = cross_entropy(network(images[rows]), labels[rows])
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()


def training_from_files(
    network: nn.Module, folder: Path, batch_size: int, n_epochs: int, lr: float, size: int, device: str
) -> None:
    """The same from image files, decoded and augmented one by one by the workers of a DataLoader."""
    augment = transforms.Compose(
        [
            transforms.RandomHorizontalFlip(),
            transforms.RandomCrop(size, padding=4),
            transforms.PILToTensor(),  # our networks normalise by themselves
        ]
    )
    loader = DataLoader(
        ImageFolder(str(folder), augment), batch_size, shuffle=True, drop_last=True, num_workers=2,
        pin_memory=device == "cuda", persistent_workers=True,
    )  # fmt: skip
    network.train()
    optimiser = torch.optim.SGD(network.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    for _ in range(n_epochs):
        for images, labels in loader:
            loss = cross_entropy(network(images.to(device)), labels.to(device))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
