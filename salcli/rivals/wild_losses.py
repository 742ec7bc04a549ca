"""What the rivals minimise that are trained with the whole wild set as if it were OOD: OE, Energy-OE, WOODS, SCONE."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

# pytorch-ood is imported inside functions: it takes seconds, and SAL is trained by the same stage without it.


def oe_loss(
    id_logits: Float[Tensor, "n k"], labels: Int[Tensor, " n"], wild_logits: Float[Tensor, "m k"], weight: float
) -> Float[Tensor, ""]:
    """Cross-entropy of ID samples, and the weighted one of wild samples to the uniform distribution."""
    from pytorch_ood.loss import OutlierExposureLoss

    # each of the two a mean over its own samples; the library's mean over all would halve both
    losses = OutlierExposureLoss(weight, reduction=None)(*_together(id_logits, labels, wild_logits))
    of_id, of_wild = losses.split([len(id_logits), len(wild_logits)])
    mean: Tensor = of_id.mean() + of_wild.mean()
    return mean


def energy_oe_loss(
    id_logits: Float[Tensor, "n k"],
    labels: Int[Tensor, " n"],
    wild_logits: Float[Tensor, "m k"],
    weight: float,
    margins: tuple[float, float],
) -> Float[Tensor, ""]:
    """Cross-entropy of ID samples, and squared hinges on the energies of both sides, for ID and for wild samples."""
    from pytorch_ood.loss import EnergyRegularizedLoss

    loss: Tensor = EnergyRegularizedLoss(weight, *margins)(*_together(id_logits, labels, wild_logits))
    return loss


class ConstrainedEnergyLoss:
    """WOODS: call wild samples OOD, as far as ID false alarms and ID loss stay within limits. SCONE has a margin, too.

    An augmented Lagrangian, whose multipliers and penalty weights change after each epoch.
    """

    def __init__(
        self,
        outlier_line: nn.Module,
        loss_at_start: float,
        *,
        margin: float,
        false_alarms: float,
        loss_factor: float,
        multiplier_lr: float,
        penalty_growth: float,
        tolerance: float,
    ) -> None:
        from pytorch_ood.loss import EnergyMarginLoss

        self._outlier_line = outlier_line
        self._loss = EnergyMarginLoss(
            full_train_loss=loss_at_start,
            eta=margin,
            false_alarm_cutoff=false_alarms,
            ce_tol=loss_factor,
            lr_lam=multiplier_lr,
            penalty_mult=penalty_growth,
            constraint_tol=tolerance,
        )

    def to(self, device: torch.device) -> None:
        """Compute there."""
        self._loss.to(device)

    def __call__(
        self, id_logits: Float[Tensor, "n k"], labels: Int[Tensor, " n"], wild_logits: Float[Tensor, "m k"]
    ) -> Float[Tensor, ""]:
        """The loss with the multipliers as they are now."""
        loss: Tensor = self._loss(*_together(id_logits, labels, wild_logits), self._outlier_line)
        return loss

    def update(self, id_logits: Float[Tensor, "n k"], labels: Int[Tensor, " n"]) -> Constraints:
        """Change multipliers and penalty weights by how far all ID samples together break the constraints."""
        device = self._loss.lam.device
        id_logits, labels = id_logits.to(device), labels.to(device)
        self._loss.update_hyperparameters(nn.Identity(), [(id_logits, labels)], self._outlier_line)
        with torch.no_grad():
            alarms = torch.sigmoid(self._outlier_line(id_logits.logsumexp(1, keepdim=True))).mean()
            loss = cross_entropy(id_logits, labels)
        limits = self._loss.false_alarm_cutoff, self._loss.ce_tol * self._loss.full_train_loss
        return Constraints(*(float(value) for value in (alarms, limits[0], loss, limits[1])))

    def get_state(self) -> dict[str, Tensor]:
        """Multipliers and penalty weights."""
        return {name: value.cpu().clone() for name, value in self._loss.state_dict().items()}

    def set_state(self, state: dict[str, Tensor]) -> None:
        """Go on from there."""
        self._loss.load_state_dict(state)


class Constraints(NamedTuple):
    """How ID samples stand to the two constraints of WOODS."""

    false_alarms: float
    most_false_alarms: float
    loss: float
    largest_loss: float

    @property
    def excess(self) -> float:
        """By how much the worse one is broken; negative where both hold."""
        return max(self.false_alarms - self.most_false_alarms, self.loss - self.largest_loss)


def _together(id_logits: Tensor, labels: Tensor, wild_logits: Tensor) -> tuple[Tensor, Tensor]:
    """As pytorch-ood takes them: logits of all samples, in float32, and labels that are negative for OOD."""
    return torch.cat([id_logits, wild_logits]).float(), torch.cat([labels, labels.new_full((len(wild_logits),), -1)])
