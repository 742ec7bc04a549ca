"""One training loop for every trained network. It reports to a task and yields records; it prints nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from salcli.errors import TrainingError
from salcli.seeding import derived_seed

if TYPE_CHECKING:
    from salcli.params import TrainParams
    from salcli.progress import Task


class BatchResult(NamedTuple):
    """What an objective says of a batch of ID samples."""

    loss: Tensor  # a scalar that can be differentiated
    n_correct: Tensor


# Positions in the ID training set → loss. A method is its objective.
Objective = Callable[[Tensor], BatchResult]


@dataclass(frozen=True)
class Epoch:
    """Means over one epoch."""

    epoch: int
    loss: float
    accuracy: float


def n_images_seen(n_samples: int, params: TrainParams) -> int:
    """How many images a run goes through: whole batches of every epoch."""
    batch_size = min(params.batch_size, n_samples)
    return params.epochs * (n_samples // batch_size) * batch_size


def train(
    network: nn.Module,
    objective: Objective,
    n_samples: int,
    params: TrainParams,
    generator: torch.Generator,
    task: Task,
) -> Iterator[Epoch]:
    """SGD with Nesterov momentum and a cosine schedule, over shuffled batches of one size."""
    batch_size = min(params.batch_size, n_samples)
    n_batches = n_samples // batch_size  # the rest is dropped: batch norm would suffer from a tiny batch
    optimiser = torch.optim.SGD(
        network.parameters(),
        lr=params.lr,
        momentum=params.momentum,
        nesterov=params.momentum > 0,
        weight_decay=params.weight_decay,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, params.epochs * n_batches)
    for epoch in range(1, params.epochs + 1):
        network.train()
        order = torch.randperm(n_samples, generator=generator)
        loss_sum, correct_sum = 0.0, 0
        for batch in order[: n_batches * batch_size].reshape(n_batches, batch_size):
            loss, n_correct = objective(batch)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
            loss_sum += float(loss.detach())
            correct_sum += int(n_correct)
            task.advance(batch_size, epoch=epoch, loss=float(loss.detach()))
        if not math.isfinite(loss_sum):
            raise TrainingError(
                f"the loss is not finite in epoch {epoch}; try a smaller learning rate (lr is {params.lr:g}) "
                "or check the data"
            )
        yield Epoch(epoch, loss_sum / n_batches, correct_sum / (n_batches * batch_size))
    network.eval()


@contextmanager
def reproducible(seed: int, purpose: str) -> Iterator[torch.Generator]:
    """Inside, torch draws from a stream that depends on the seed and the purpose alone."""
    derived = derived_seed(seed, purpose)
    with torch.random.fork_rng():
        torch.manual_seed(derived)
        yield torch.Generator().manual_seed(derived)
