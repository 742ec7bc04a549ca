"""What the rivals minimise that are trained with the whole wild set as if it were OOD: OE, Energy-OE, WOODS, SCONE.

All in float32, also where the network computes in less.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def oe_loss(
    id_logits: Float[Tensor, "n k"], labels: Int[Tensor, " n"], wild_logits: Float[Tensor, "m k"], weight: float
) -> Float[Tensor, ""]:
    """Cross-entropy of ID samples, and the weighted one of wild samples to the uniform distribution."""
    wild = wild_logits.float()
    to_uniform = wild.logsumexp(dim=1) - wild.mean(dim=1)
    return cross_entropy(id_logits.float(), labels) + (weight * to_uniform).mean()


def energy_oe_loss(
    id_logits: Float[Tensor, "n k"],
    labels: Int[Tensor, " n"],
    wild_logits: Float[Tensor, "m k"],
    weight: float,
    margins: tuple[float, float],
) -> Float[Tensor, ""]:
    """Cross-entropy of ID samples, and squared hinges on the energies of both sides, for ID and for wild samples."""
    id_energy, wild_energy = (-logits.float().logsumexp(dim=1) for logits in (id_logits, wild_logits))
    too_high, too_low = (id_energy - margins[0]).relu(), (margins[1] - wild_energy).relu()
    hinges = too_high.square().mean() + too_low.square().mean()
    return cross_entropy(id_logits.float(), labels) + weight * hinges


class ConstrainedEnergyLoss:
    """WOODS: call wild samples OOD, as far as ID false alarms and ID loss stay within limits. SCONE has a margin, too.

    An augmented Lagrangian: each of the two constraints has a multiplier and a penalty weight, which change after each
    epoch.
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
        self._outlier_line, self._margin = outlier_line, margin
        self._multiplier_lr, self._penalty_growth, self._tolerance = multiplier_lr, penalty_growth, tolerance
        # false alarms first, then the loss
        self._limits = torch.tensor([false_alarms, loss_factor]) * torch.tensor([1.0, loss_at_start])
        self._multipliers, self._penalty_weights = torch.zeros(2), torch.ones(2)

    def to(self, device: torch.device) -> None:
        """Compute there."""
        self._limits = self._limits.to(device)
        self._multipliers, self._penalty_weights = self._multipliers.to(device), self._penalty_weights.to(device)

    def __call__(
        self, id_logits: Float[Tensor, "n k"], labels: Int[Tensor, " n"], wild_logits: Float[Tensor, "m k"]
    ) -> Float[Tensor, ""]:
        """The loss with the multipliers as they are now: wild samples taken for ID, and what the constraints add."""
        missed = torch.sigmoid(-self._outlierness(wild_logits.float(), self._margin)).mean()
        id_logits = id_logits.float()
        alarms = torch.sigmoid(self._outlierness(id_logits)).mean()
        excess = torch.stack([alarms, cross_entropy(id_logits, labels)]) - self._limits
        multiplier, weight = self._multipliers, self._penalty_weights
        penalty = multiplier * excess + weight / 2 * excess.square()
        at_rest = -multiplier.square() / (2 * weight)  # the least that the penalty can be: a constraint well kept
        return missed + torch.where(weight * excess + multiplier >= 0, penalty, at_rest).sum()

    @torch.no_grad()
    def update(self, id_logits: Float[Tensor, "n k"], labels: Int[Tensor, " n"]) -> Constraints:
        """Change multipliers and penalty weights by how far all ID samples together break the constraints."""
        device, multiplier, weight = self._limits.device, self._multipliers, self._penalty_weights
        id_logits, labels = id_logits.to(device), labels.to(device)
        each_alarm = torch.sigmoid(self._outlierness(id_logits))
        each_loss = cross_entropy(id_logits, labels, reduction="none")
        # numpy's mean does not depend on the number of threads
        standing = torch.tensor([each.cpu().numpy().mean() for each in (each_alarm, each_loss)], device=device)
        excess = standing - self._limits
        slope = torch.where(weight * excess + multiplier >= 0, excess, -multiplier / weight)
        self._multipliers = multiplier + self._multiplier_lr * slope
        self._penalty_weights = torch.where(excess > self._tolerance, weight * self._penalty_growth, weight)
        (alarms, loss), (most_alarms, largest_loss) = standing.tolist(), self._limits.tolist()
        return Constraints(alarms, most_alarms, loss, largest_loss)

    def _outlierness(self, logits: Float[Tensor, "n k"], margin: float = 0.0) -> Float[Tensor, " n"]:
        """φ of the paper: positive for OOD."""
        line: Tensor = self._outlier_line(logits.logsumexp(dim=1, keepdim=True) - margin)
        return line.squeeze(dim=1)

    def get_state(self) -> dict[str, Tensor]:
        """Multipliers and penalty weights."""
        return {"multipliers": self._multipliers.cpu().clone(), "penalty_weights": self._penalty_weights.cpu().clone()}

    def set_state(self, state: dict[str, Tensor]) -> None:
        """Go on from there."""
        device = self._limits.device
        self._multipliers, self._penalty_weights = (state[name].to(device) for name in self.get_state())


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
