"""One training loop for every network, on one device or several, resumable; and its default objective (Eq. 3).

It prints nothing.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from inspect import unwrap
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, MultiStepLR

from salcli.engine.batches import Batch, BatchSource
from salcli.engine.device import Compute
from salcli.errors import SalError
from salcli.progress import Task
from salcli.sal.seeding import derived_seed

STEPS_BETWEEN_LOSSES = 10  # reading the loss makes a GPU wait
TRUST = 0.001  # of LARS
TINY = 1e-8  # a gradient may vanish
DROPS = (60, 75, 90)  # percent of the run


class BatchResult(NamedTuple):
    """An objective's result for a batch of ID samples."""

    loss: Tensor  # a scalar that can be differentiated
    n_correct: Tensor


@runtime_checkable
class SgdConfig(Protocol):
    """Every section of params.yaml that describes a training run."""

    @property
    def epochs(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def momentum(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...


def classification(network: nn.Module, batch: Batch) -> BatchResult:
    """Cross-entropy of the class logits."""
    samples, labels = batch
    logits = network(samples)
    return BatchResult(cross_entropy(logits, labels), (logits.argmax(1) == labels).sum())


# (network as called in training, batch) → loss. A method is its objective.
Objective = Callable[[nn.Module, Batch], BatchResult]
# (parameters, config) → optimizer
MakeOptimizer = Callable[[Iterable[nn.Parameter], SgdConfig], Optimizer]
# (optimizer, number of steps) → learning rate schedule
MakeSchedule = Callable[[Optimizer, int], LRScheduler]


class Stateful(Protocol):
    """Anything whose state must survive an interruption, such as a torch.Generator."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> object: ...


class Keeper(Protocol):
    """Where the state of an unfinished run is kept; `load` gives that of the same run, if there is one."""

    def load(self) -> dict[str, Any] | None: ...

    def save(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Epoch:
    """Means over one epoch."""

    epoch: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Run:
    """Everything that defines a training run."""

    network: nn.Module
    objective: Objective
    batches: BatchSource
    n_samples: int
    params: SgdConfig
    compute: Compute
    generator: torch.Generator
    stateful: Mapping[str, Stateful] = field(default_factory=dict)  # besides the network, the optimizer, …
    after_epoch: Callable[[], None] = lambda: None
    optimizer: MakeOptimizer | None = None  # default: SGD with Nesterov momentum
    schedule: MakeSchedule | None = None  # default: cosine

    @property
    def batch_size(self) -> int:
        """Of all processes together."""
        size, n_processes = min(self.params.batch_size, self.n_samples), self.compute.processes.size
        if size == 0:
            raise SalError("there are no samples to train on; check the data and data.id_shares")
        if size < n_processes:
            raise SalError(f"a batch of {size} cannot be shared by {n_processes} processes; start fewer")
        return size - size % n_processes  # equal parts, or the mean over processes would not be the mean over samples

    @property
    def n_batches(self) -> int:
        """Per epoch. The rest is dropped: batch norm would suffer from a tiny batch."""
        return self.n_samples // self.batch_size

    @property
    def total_samples(self) -> int:
        """Of all epochs."""
        return self.params.epochs * self.n_batches * self.batch_size


def train(run: Run, task: Task, keeper: Keeper | None = None) -> list[Epoch]:
    """Train over shuffled batches of equal size; resumes from the last completed epoch that `keeper` has."""
    processes, curve = run.compute.processes, list[Epoch]()
    run.compute.place(run.network)
    trainee = run.compute.trainee(run.network)
    optimizer = (run.optimizer or nesterov_sgd)(run.network.parameters(), run.params)
    # no step at all where given weights are used as they are
    schedule = (run.schedule or CosineAnnealingLR)(optimizer, max(1, run.params.epochs * run.n_batches))
    scaler = run.compute.scaler()
    # everything that changes during a run
    learned: dict[str, Any] = {"network": run.network, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    kept = processes.from_main(keeper.load() if keeper and processes.is_main else None)
    if kept is not None:
        for name, part in learned.items():
            part.load_state_dict(kept[name])
        for name, source in run.stateful.items():
            source.set_state(kept["stateful"][name])
        run.generator.set_state(kept["order"])
        torch.set_rng_state(kept["random"])
        if len(kept["random_cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(kept["random_cuda"])
        curve = [Epoch(**epoch) for epoch in kept["curve"]]
        task.skip(len(curve) * run.n_batches * run.batch_size)
        task.note(f"resumes an interrupted run after epoch {len(curve)} of {run.params.epochs}")
    for epoch in range(len(curve) + 1, run.params.epochs + 1):
        trainee.train()
        if processes.size > 1:  # else dropout would be the same in all of them
            seed = derived_seed(run.generator.initial_seed(), f"epoch {epoch}, process {processes.rank}")
            torch.manual_seed(seed)
        order = torch.randperm(run.n_samples, generator=run.generator)
        steps = order[: run.n_batches * run.batch_size].reshape(run.n_batches, run.batch_size)
        exact = torch.float32 if run.compute.device.type == "mps" else torch.float64
        sums = torch.zeros(2, dtype=exact, device=run.compute.device)  # of losses and of correct predictions
        for step, batch in enumerate(run.batches(steps.unbind()), start=1):
            with run.compute.autocast():
                loss, n_correct = run.objective(trainee, batch)
            optimizer.zero_grad()
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            sums += torch.stack([loss.detach().to(exact), n_correct.to(exact)])
            is_shown = step % STEPS_BETWEEN_LOSSES == 0 or step == run.n_batches
            task.advance(run.batch_size, epoch=epoch, **({"loss": float(loss.detach())} if is_shown else {}))
        loss_sum, correct_sum = processes.add_up(sums).tolist()
        if not math.isfinite(loss_sum):
            raise SalError(
                f"the loss is NaN or infinite in epoch {epoch}; try a smaller learning rate (lr is {run.params.lr:g}) "
                "or check the data"
            )
        mean_loss = loss_sum / (run.n_batches * processes.size)
        curve.append(Epoch(epoch, mean_loss, correct_sum / (run.n_batches * run.batch_size)))
        processes.equalize(run.network)
        run.after_epoch()
        if keeper and processes.is_main:
            keeper.save(
                {name: part.state_dict() for name, part in learned.items()}
                | {"stateful": {name: source.get_state() for name, source in run.stateful.items()}}
                | {"order": run.generator.get_state(), "random": torch.get_rng_state()}
                | {"random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}
                | {"curve": [asdict(one) for one in curve]}
            )
    run.network.eval()
    return curve


@contextmanager
def reproducible(seed: int, purpose: str) -> Iterator[torch.Generator]:
    """Inside, torch draws from a stream that depends only on the seed and the purpose."""
    derived = derived_seed(seed, purpose)
    with torch.random.fork_rng():
        torch.manual_seed(derived)
        yield torch.Generator().manual_seed(derived)


class Sgd(torch.optim.SGD):
    """torch's SGD without the decorators that import torch's compiler at the first step, even if nothing is compiled.

    Measured on two cores with torch 2.15, medians of 5 fresh processes: 10 steps of a tiny network take 5.5 s with
    torch's SGD and 3.3 s with this one, `train-id` of the demo with one epoch 7.6 s and 4.8 s. The demo has 18 training
    processes, so this saves about 40 s of its 150 to 290 s.
    """

    add_param_group = unwrap(torch.optim.SGD.add_param_group)
    zero_grad = unwrap(torch.optim.SGD.zero_grad)
    state_dict = unwrap(torch.optim.SGD.state_dict)
    load_state_dict = unwrap(torch.optim.SGD.load_state_dict)
    _plain_step: Callable[..., Any] = unwrap(torch.optim.SGD.step)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        return self._plain_step(closure)


class Lars(Sgd):
    """SGD with a learning rate for each layer (You et al., 2017).

    Each gradient (with weight decay) is scaled by trust · ‖w‖ / (‖g‖ + decay · ‖w‖) before SGD with momentum.
    Weights that are zero or have no gradient get plain SGD: scaled, they would never move.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, lr=lr, momentum=momentum)
        self._decay = weight_decay  # not SGD's own, which would come after the scaling

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._scale(weight, weight.grad)
        return super().step(closure)

    def _scale(self, weight: Tensor, gradient: Tensor) -> None:
        weight_norm, gradient_norm = weight.norm(), gradient.norm()
        local = TRUST * weight_norm / (gradient_norm + self._decay * weight_norm + TINY)
        # both stay on the device: reading their values here would make a GPU wait
        factor = torch.where((weight_norm > 0) & (gradient_norm > 0), local, torch.ones_like(local))
        gradient.add_(weight, alpha=self._decay).mul_(factor)


def nesterov_sgd(weights: Iterable[nn.Parameter], params: SgdConfig) -> Optimizer:
    momentum = params.momentum
    return Sgd(weights, params.lr, momentum, nesterov=momentum > 0, weight_decay=params.weight_decay)


def momentum_sgd(weights: Iterable[nn.Parameter], params: SgdConfig) -> Optimizer:
    """Momentum that is not Nesterov's."""
    return Sgd(weights, params.lr, params.momentum, weight_decay=params.weight_decay)


def lars(weights: Iterable[nn.Parameter], params: SgdConfig) -> Optimizer:
    return Lars(weights, params.lr, params.momentum, params.weight_decay)


def warm_up_then_cosine(optimizer: Optimizer, n_steps: int, warm_up_share: float, start: float) -> LRScheduler:
    """A cosine down to 0 whose first part is a straight line from `start` (a factor) to where the cosine then is.

    A LambdaLR, because SequentialLR would restart the cosine after the warm-up; SupCon's authors let it continue.
    """

    def cosine(done: float) -> float:
        return (1 + math.cos(math.pi * done)) / 2

    def factor(step: int) -> float:
        done = step / max(1, n_steps)
        if done >= warm_up_share:
            return cosine(done)
        return start + done / warm_up_share * (cosine(warm_up_share) - start)

    return LambdaLR(optimizer, factor)


def drops(optimizer: Optimizer, n_steps: int, factor: float, percents: Iterable[int] = DROPS) -> LRScheduler:
    """The learning rate times `factor` after 60 %, 75 % and 90 % of the run."""
    return MultiStepLR(optimizer, [math.ceil(n_steps * percent / 100) for percent in percents], gamma=factor)


# as params.yaml names them; `steps` is WOODS'
SCHEDULES: dict[str, MakeSchedule] = {
    "cosine": CosineAnnealingLR,
    "constant": lambda optimizer, n_steps: LambdaLR(optimizer, lambda step: 1.0),
    "steps": lambda optimizer, n_steps: drops(optimizer, n_steps, 0.5, (50, 75, 90)),
}
