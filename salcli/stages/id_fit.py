"""How well the classifier fits the ID data, read off the stored gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from salcli.artifacts.gradients import GradientFile

# Below this accuracy on held-out ID data τ was seen to separate no better than chance (docs/method.md).
ACCURACY_THE_THEORY_NEEDS = 0.9


@dataclass(frozen=True)
class IdFit:
    """How well the classifier fits the ID data: τ separates only where the ID risk is small."""

    train_risk: float  # mean cross-entropy
    train_accuracy: float
    calibration_accuracy: float

    @property
    def is_poor(self) -> bool:
        """Whether the theory promises little."""
        return min(self.train_accuracy, self.calibration_accuracy) < ACCURACY_THE_THEORY_NEEDS


def id_fit(id_train: GradientFile, calibration: GradientFile) -> IdFit:
    """The residual at the true label is p − 1."""
    loss_sum = 0.0
    for chunk in id_train.chunks():
        own = chunk.residual.double().gather(1, chunk.label[:, None])
        loss_sum -= float(torch.log1p(own.clamp(min=-1 + 1e-7)).sum())
    return IdFit(
        train_risk=loss_sum / len(id_train),
        train_accuracy=float((id_train.predicted == id_train.label).double().mean()),
        calibration_accuracy=float((calibration.predicted == calibration.label).double().mean()),
    )
