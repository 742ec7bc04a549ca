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
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from salcli.engine.batches import RESIDENT_BYTES, Rows
from salcli.engine.training import Epoch
from salcli.errors import TrainingError
from salcli.progress import Silent, Task
from salcli.sal.seeding import generator

PENALTIES = tuple(10.0**exponent for exponent in (1, 0.5, 0, -0.5, -1, -1.5, -2, -2.5, -3, -4))
ROWS_AT_ONCE = 16_384
ITERATIONS, ROUNDS = 10, 50  # of L-BFGS in a round, and rounds at most
TOLERANCE = 1e-6  # relative change of the loss in a round
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
        return _minimize(self.head, _Chunks(self.examples, self.features, self.device), penalty, task), penalty

    def _chosen(self) -> float:
        """By the loss on held-out examples. Strong penalties come first, and each fit starts from the one before."""
        order = generator(self.seed, "penalty").permutation(len(self.examples))[:MOST_TO_CHOOSE_ON]
        fold = np.arange(len(order)) % FOLDS
        n_folds = FOLDS if len(order) <= SMALL else 1
        losses = []  # of each held-out example with each penalty
        for k in range(n_folds):
            parts = (self.examples.take(np.sort(order[part])) for part in (fold != k, fold == k))
            training, held_out = (_Chunks(part, self.features, self.device) for part in parts)
            head = _reset(nn.Linear(self.head.in_features, self.head.out_features))
            found = []
            for penalty in PENALTIES:
                _minimize(head, training, penalty, Silent())
                with torch.no_grad():
                    found.append(torch.cat([_losses(head(x), y) * w for x, y, w in held_out]).double().cpu())
            losses.append(torch.stack(found))
        each = torch.cat(losses, dim=1)  # penalties, examples
        mean, error = each.mean(dim=1), each.std(dim=1) / each.shape[1] ** 0.5
        best = int(mean.argmin())
        return PENALTIES[int((mean <= mean[best] + error[best]).nonzero()[0])]


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
        for start in range(0, len(self.examples), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            with torch.no_grad():
                features = self.features(self.examples.rows.read(rows).to(self.device))
            yield features, self.examples.labels[rows].to(self.device), self.examples.weights[rows].to(self.device)


def _losses(logits: Float[Tensor, "n k"], labels: Num[Tensor, " n"]) -> Float[Tensor, " n"]:
    if labels.is_floating_point():
        return binary_cross_entropy_with_logits(logits.squeeze(1), labels, reduction="none")
    return cross_entropy(logits, labels, reduction="none")


def _minimize(head: nn.Linear, chunks: _Chunks, penalty: float, task: Task) -> list[Epoch]:
    """From where the head is."""
    head.to(chunks.device)
    optimizer = torch.optim.LBFGS(
        head.parameters(), max_iter=ITERATIONS, tolerance_grad=1e-6, history_size=10, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        total = 0.5 * penalty * head.weight.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        total = total.detach()
        for features, labels, weights in chunks:
            part = (_losses(head(features), labels) * weights).sum() / chunks.total
            part.backward()  # type: ignore[no-untyped-call]
            total = total + part.detach()
        return total

    curve: list[Epoch] = []
    before = math.inf
    for epoch in range(1, ROUNDS + 1):
        optimizer.step(loss)  # type: ignore[no-untyped-call]
        value, accuracy = _measured(head, chunks)
        curve.append(Epoch(epoch, value, accuracy))
        task.advance(1)
        if not math.isfinite(value):
            raise TrainingError("the loss of a linear fit became NaN or infinite; are the vectors on a sane scale?")
        objective = float(value + 0.5 * penalty * head.weight.detach().square().sum())
        if before - objective <= TOLERANCE * objective:
            break
        before = objective
    return curve


@torch.no_grad()
def _measured(head: nn.Linear, chunks: _Chunks) -> tuple[float, float]:
    """Mean loss and accuracy."""
    loss = right = 0.0
    for features, labels, weights in chunks:
        logits = head(features)
        loss += float((_losses(logits, labels) * weights).sum()) / chunks.total
        predicted = logits.squeeze(1) > 0 if labels.is_floating_point() else logits.argmax(1)
        right += float(((predicted == labels) * weights).sum()) / chunks.total
    return loss, right
