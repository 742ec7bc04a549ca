"""One training loop for every trained network: on one device or several, resumable. It prints nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from salcli.compute.sgd import Sgd
from salcli.errors import TrainingError
from salcli.seeding import derived_seed

if TYPE_CHECKING:
    from salcli.compute.numerics import Compute
    from salcli.params_section import SgdParams
    from salcli.progress import Task

STEPS_BETWEEN_FIGURES = 10  # reading the loss makes a GPU wait


class BatchResult(NamedTuple):
    """What an objective says of a batch of ID samples."""

    loss: Tensor  # a scalar that can be differentiated
    n_correct: Tensor


Batch = tuple[Tensor, ...]
# Positions in the ID training set, one tensor for each step → what each step needs of them.
BatchSource = Callable[[Sequence[Tensor]], Iterator[Batch]]
# The network as it is called in training, and a batch → loss. A method is its objective.
Objective = Callable[[nn.Module, Batch], BatchResult]

# What is trained, and with which numbers → what changes it.
MakeOptimiser = Callable[[Iterable[nn.Parameter], "SgdParams"], Optimizer]
# That, and the number of all steps → how its learning rate goes.
MakeSchedule = Callable[[Optimizer, int], LRScheduler]


class Stateful(Protocol):
    """Something that has to go on where it was."""

    def get_state(self) -> Any:
        """All there is to know, as tensors."""
        ...

    def set_state(self, state: Any) -> object:
        """Go on from there."""
        ...


class Keeper(Protocol):
    """Where the state of a run survives a kill."""

    def load(self) -> dict[str, Any] | None:
        """What the last run of the same kind left, if anything."""
        ...

    def save(self, state: dict[str, Any]) -> None:
        """Replace it."""
        ...


@dataclass(frozen=True)
class Epoch:
    """Means over one epoch."""

    epoch: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Run:
    """All that a training run is."""

    network: nn.Module
    objective: Objective
    batches: BatchSource
    n_samples: int
    params: SgdParams
    compute: Compute
    generator: torch.Generator
    stateful: Mapping[str, Stateful] = field(default_factory=dict)  # beside the network, the optimiser, …
    after_epoch: Callable[[], None] = lambda: None
    optimiser: MakeOptimiser | None = None  # SGD with Nesterov momentum, unless a method has another
    schedule: MakeSchedule | None = None  # a cosine, likewise

    @property
    def batch_size(self) -> int:
        """Of all processes together."""
        size, n_processes = min(self.params.batch_size, self.n_samples), self.compute.processes.size
        if size < n_processes:
            raise TrainingError(f"a batch of {size} cannot be shared by {n_processes} processes; start fewer")
        return size - size % n_processes  # equal parts, or the mean over processes would not be the mean over samples

    @property
    def n_batches(self) -> int:
        """In an epoch. The rest is dropped: batch norm would suffer from a tiny batch."""
        return self.n_samples // self.batch_size

    @property
    def n_images(self) -> int:
        """How many images the run goes through."""
        return self.params.epochs * self.n_batches * self.batch_size


def train(run: Run, task: Task, keeper: Keeper | None = None) -> list[Epoch]:
    """Over shuffled batches of one size."""
    run.compute.place(run.network)
    trainee = run.compute.trainee(run.network)
    course = _Course.start(run)
    kept = run.compute.processes.from_main(keeper.load() if keeper and run.compute.processes.is_main else None)
    if kept is not None:
        course.restore(kept)
        task.skip(len(course.curve) * run.n_batches * run.batch_size)
        task.note(f"goes on after epoch {len(course.curve)} of {run.params.epochs}, where an earlier run was stopped")
    for epoch in range(len(course.curve) + 1, run.params.epochs + 1):
        course.curve.append(_one_epoch(run, course, trainee, epoch, task))
        run.after_epoch()
        if keeper and run.compute.processes.is_main:
            keeper.save(course.state())
    run.network.eval()
    return course.curve


def _one_epoch(run: Run, course: _Course, trainee: nn.Module, epoch: int, task: Task) -> Epoch:
    trainee.train()
    if run.compute.processes.size > 1:  # or dropout would be the same in all of them
        purpose = f"epoch {epoch}, process {run.compute.processes.rank}"
        torch.manual_seed(derived_seed(run.generator.initial_seed(), purpose))
    order = torch.randperm(run.n_samples, generator=run.generator)
    steps = order[: run.n_batches * run.batch_size].reshape(run.n_batches, run.batch_size)
    exact = torch.float32 if run.compute.device.type == "mps" else torch.float64
    sums = torch.zeros(2, dtype=exact, device=run.compute.device)  # of loss and of correct predictions
    for step, batch in enumerate(run.batches(steps.unbind()), start=1):
        with run.compute.autocast():
            loss, n_correct = run.objective(trainee, batch)
        course.optimiser.zero_grad()
        course.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        course.scaler.step(course.optimiser)
        course.scaler.update()
        course.schedule.step()
        sums += torch.stack([loss.detach().to(exact), n_correct.to(exact)])
        shown = {"loss": float(loss.detach())} if step % STEPS_BETWEEN_FIGURES == 0 or step == run.n_batches else {}
        task.advance(run.batch_size, epoch=epoch, **shown)
    loss_sum, correct_sum = run.compute.processes.add_up(sums).tolist()
    if not math.isfinite(loss_sum):
        raise TrainingError(
            f"the loss is not finite in epoch {epoch}; try a smaller learning rate (lr is {run.params.lr:g}) "
            "or check the data"
        )
    n_losses = run.n_batches * run.compute.processes.size
    return Epoch(epoch, loss_sum / n_losses, correct_sum / (run.n_batches * run.batch_size))


@dataclass
class _Course:
    """What changes while a run is under way."""

    run: Run
    optimiser: Optimizer
    schedule: LRScheduler
    scaler: torch.amp.GradScaler
    curve: list[Epoch]

    @classmethod
    def start(cls, run: Run) -> _Course:
        optimiser = (run.optimiser or _nesterov)(run.network.parameters(), run.params)
        # no step at all is asked for where given weights are used as they are
        schedule = (run.schedule or CosineAnnealingLR)(optimiser, max(1, run.params.epochs * run.n_batches))
        return cls(run, optimiser, schedule, run.compute.scaler(), [])

    def state(self) -> dict[str, Any]:
        """All that a new process needs to go on from here to the same end."""
        return {
            "network": self.run.network.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "order": self.run.generator.get_state(),
            "stateful": {name: item.get_state() for name, item in self.run.stateful.items()},
            "curve": [asdict(epoch) for epoch in self.curve],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.run.network.load_state_dict(state["network"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["random"])
        if len(state["random_cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["random_cuda"])
        self.run.generator.set_state(state["order"])
        for name, item in self.run.stateful.items():
            item.set_state(state["stateful"][name])
        self.curve = [Epoch(**epoch) for epoch in state["curve"]]


def _nesterov(weights: Iterable[nn.Parameter], params: SgdParams) -> Optimizer:
    momentum = params.momentum
    return Sgd(weights, params.lr, momentum, nesterov=momentum > 0, weight_decay=params.weight_decay)


@contextmanager
def reproducible(seed: int, purpose: str) -> Iterator[torch.Generator]:
    """Inside, torch draws from a stream that depends on the seed and the purpose alone."""
    derived = derived_seed(seed, purpose)
    with torch.random.fork_rng():
        torch.manual_seed(derived)
        yield torch.Generator().manual_seed(derived)
