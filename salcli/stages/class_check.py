"""Whether a network that was trained elsewhere means the same classes, in the same order, as the data do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import linear_sum_assignment

if TYPE_CHECKING:
    from torch import Tensor

CLEARLY_BETTER = 0.2  # accuracy that another order of the classes gains, to be worth a word
DEVIATIONS = 3


@dataclass(frozen=True)
class ClassCheck:
    """How a given network does on held-out ID data, and in which order its classes would do best."""

    accuracy: float
    n_samples: int
    class_names: tuple[str, ...]
    best_order: tuple[str, ...]  # what output 0, 1, … most likely means
    best_accuracy: float

    @property
    def is_near_chance(self) -> bool:
        """Not better than a guess, as far as so many samples can tell."""
        chance = 1 / len(self.class_names)
        return self.accuracy <= chance + DEVIATIONS * math.sqrt(chance * (1 - chance) / self.n_samples)

    @property
    def has_other_order(self) -> bool:
        """Whether the classes surely stand in another order."""
        return self.best_accuracy >= self.accuracy + CLEARLY_BETTER


def class_check(predicted: Tensor, labels: Tensor, class_names: tuple[str, ...]) -> ClassCheck:
    """The order is the assignment of outputs to classes under which most samples are right."""
    counts = np.zeros((len(class_names), len(class_names)), dtype=np.int64)  # output × class
    np.add.at(counts, (predicted.numpy(), labels.numpy()), 1)
    outputs, classes = linear_sum_assignment(counts, maximize=True)
    return ClassCheck(
        accuracy=float(np.trace(counts) / len(labels)),
        n_samples=len(labels),
        class_names=class_names,
        best_order=tuple(class_names[k] for k in classes),
        best_accuracy=float(counts[outputs, classes].sum() / len(labels)),
    )
