"""Linear heads on vectors, fitted in full: logistic regression with an L2 penalty, by L-BFGS.

A head that is fitted to the end and penalized has gradients that tell more than those of one trained by SGD: the more
confident a head is, the smaller the gradients that SAL looks at (docs/embeddings.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Num
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from salcli.engine.batches import RESIDENT_BYTES, Rows
from salcli.engine.training import Epoch
from salcli.errors import SalError
from salcli.progress import Silent, Task
from salcli.sal.seeding import generator

PENALTIES = tuple(10.0**exponent for exponent in (1, 0.5, 0, -0.5, -1, -1.5, -2, -2.5, -3, -4))
ROWS_AT_ONCE, MOST_LOGITS = 16_384, 2**22
ITERATIONS, ROUNDS = 10, 50  # of L-BFGS in a round, and rounds at most
TOLERANCE, ROUGHLY = 1e-8, 1e-6  # relative change of the objective in an iteration: to fit, and to choose the penalty
MOST_TO_CHOOSE_ON = 5_000  # samples; on more of them the penalty would hardly be another
FOLDS, SMALL = 5, 2_000  # fewer samples are cross-validated, of more every fifth is held out


@dataclass(frozen=True)
class Examples:
    """What a head is fitted to: rows, their labels (class numbers, or 0 and 1) and weights."""

    rows: Rows
    labels: Num[Tensor, " n"]  # integers: classes; floats: a binary head
    weights: Float[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, index: np.ndarray) -> Examples:
        return Examples(self.rows.select(index), self.labels[index], self.weights[index])

    @classmethod
    def of_classes(cls, rows: Rows, labels: Tensor) -> Examples:
        return cls(rows, labels, torch.ones(len(rows)))

    @classmethod
    def of_two_sides(cls, rows: Rows, is_id: np.ndarray) -> Examples:
        """Both sides count the same, however many samples they have."""
        sides = torch.from_numpy(is_id).float()
        share = sides.mean()
        return cls(rows, sides, torch.where(sides > 0, 0.5 / share, 0.5 / (1 - share)))


@dataclass(frozen=True)
class FullFit:
    """A linear layer on `features` of the examples' rows, fitted to the end.

    Minimizes the mean loss plus ½ · penalty · ‖W‖². With `auto`, the penalty is the largest one whose loss on held-out
    examples is within one standard error of the smallest.
    """

    head: nn.Linear
    features: Callable[[Tensor], Tensor]
    examples: Examples
    penalty: float | Literal["auto"]
    seed: int
    device: torch.device

    def run(self, task: Task) -> tuple[list[Epoch], float]:
        """The course of the fit, and its penalty."""
        penalty = self._chosen() if self.penalty == "auto" else self.penalty
        _reset(self.head)
        chunks = _Chunks(self.examples, self.features, self.device)
        return _minimize(self.head, chunks, penalty, task, TOLERANCE), penalty

    @torch.no_grad()
    def _chosen(self) -> float:
        """By the loss on held-out examples. Strong penalties come first, and each fit starts from the one before."""
        order = generator(self.seed, "penalty").permutation(len(self.examples))[:MOST_TO_CHOOSE_ON]
        fold = np.arange(len(order)) % FOLDS
        n_folds = FOLDS if len(order) <= SMALL else 1
        parts = [[self.examples.take(np.sort(order[part])) for part in (fold != k, fold == k)] for k in range(n_folds)]
        folds = [[_Chunks(part, self.features, self.device) for part in pair] for pair in parts]
        heads = [_reset(nn.Linear(self.head.in_features, self.head.out_features)) for _ in folds]
        means: list[float] = []
        highest = math.inf  # mean loss that is as good as the best one
        for penalty in PENALTIES:
            for head, (training, _) in zip(heads, folds, strict=True):
                _minimize(head, training, penalty, Silent(), ROUGHLY)
            pairs = [(head, *batch) for head, (_, held_out) in zip(heads, folds, strict=True) for batch in held_out]
            each = torch.cat([_losses(head(x), labels) * weights for head, x, labels, weights in pairs]).double().cpu()
            means.append(float(each.mean()))
            if means[-1] == min(means):
                highest = means[-1] + float(each.std()) / len(each) ** 0.5
            if means[-1] > highest:  # and weaker penalties, which take longest, would fit still more noise
                break
        return next(penalty for penalty, mean in zip(PENALTIES, means, strict=False) if mean <= highest)


def _reset(head: nn.Linear) -> nn.Linear:
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


class _Chunks:
    """Features, labels and weights chunk by chunk; kept on the device if they are small enough."""

    def __init__(self, examples: Examples, features: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self.examples, self.features, self.device = examples, features, device
        self.total = float(examples.weights.sum())
        self._kept = [*self._read()] if examples.rows.n_bytes <= RESIDENT_BYTES else None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        return iter(self._kept) if self._kept is not None else self._read()

    def _read(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        labels = self.examples.labels
        n_outputs = 1 if labels.is_floating_point() else int(labels.max()) + 1
        at_once = max(1, min(ROWS_AT_ONCE, MOST_LOGITS // n_outputs))
        for start in range(0, len(self.examples), at_once):
            rows = slice(start, start + at_once)
            with torch.no_grad():
                features = self.features(self.examples.rows.read(rows).to(self.device))
            yield features, self.examples.labels[rows].to(self.device), self.examples.weights[rows].to(self.device)


def _losses(logits: Float[Tensor, "n k"], labels: Num[Tensor, " n"]) -> Float[Tensor, " n"]:
    if labels.is_floating_point():
        return binary_cross_entropy_with_logits(logits.squeeze(1), labels, reduction="none")
    return cross_entropy(logits, labels, reduction="none")


@torch.no_grad()
def _minimize(head: nn.Linear, chunks: _Chunks, penalty: float, task: Task, tolerance: float) -> list[Epoch]:
    """From where the head is. By scipy: torch's optimizers import a compiler first, which takes seconds."""
    from scipy.optimize import minimize  # slow to load, and most stages do without it

    head.to(chunks.device)
    weight, bias = head.weight, head.bias
    curve: list[Epoch] = []
    iteration, loss, accuracy = 0, math.nan, 0.0

    def place(parameters: NDArray[np.float64]) -> None:
        values = torch.from_numpy(parameters).to(weight)
        weight.copy_(values[: weight.numel()].view_as(weight))
        bias.copy_(values[weight.numel() :])

    def objective(parameters: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        nonlocal loss, accuracy
        place(parameters)
        loss = accuracy = 0.0
        slope, bias_slope = penalty * weight, torch.zeros_like(bias)
        for features, labels, weights in chunks:
            logits, share = head(features), weights / chunks.total
            loss += float((_losses(logits, labels) * share).sum(dtype=torch.float64))
            if labels.is_floating_point():
                predicted, residual = logits.squeeze(1) > 0, logits.sigmoid() - labels[:, None]
            else:
                predicted, residual = logits.argmax(1), logits.softmax(dim=1)
                residual[torch.arange(len(labels), device=labels.device), labels] -= 1  # one_hot takes n × k integers
            accuracy += float(((predicted == labels) * share).sum())
            residual = residual * share[:, None]  # with this, the gradients of the losses w.r.t. the logits
            slope.addmm_(residual.T, features)
            bias_slope += residual.sum(dim=0)
        if not math.isfinite(loss):
            raise SalError("the loss of a linear fit became NaN or infinite; are the features on a sane scale?")
        value = loss + 0.5 * penalty * float(weight.square().sum(dtype=torch.float64))
        return value, torch.cat([slope.flatten(), bias_slope]).double().cpu().numpy()

    def after_iteration(_: NDArray[np.float64]) -> None:
        nonlocal iteration
        iteration += 1
        if iteration % ITERATIONS == 0:
            curve.append(Epoch(len(curve) + 1, loss, accuracy))
            task.advance(1)

    start = torch.cat([weight.flatten(), bias]).double().cpu().numpy()
    options = {"maxiter": ITERATIONS * ROUNDS, "ftol": tolerance, "gtol": 1e-6}
    found = minimize(objective, start, jac=True, method="L-BFGS-B", callback=after_iteration, options=options)
    objective(found.x)
    curve.append(Epoch(len(curve) + 1, loss, accuracy))
    return curve
