"""What sets the methods apart that are trained with wild data: the network, what else a batch has, loss and state."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from salcli.compute.image_rows import ImageRows
from salcli.inference import in_batches
from salcli.models.network import EnergyClassifier, OodClassifier
from salcli.progress import Silent
from salcli.rivals.wild_losses import ConstrainedEnergyLoss, Constraints, energy_oe_loss, oe_loss
from salcli.sal.objective import sal_objective
from salcli.training import Batch, BatchResult, Objective, Stateful

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from salcli.compute.numerics import Compute
    from salcli.models.network import Classifier
    from salcli.params import Params
    from salcli.stages.inputs import LabeledImages

N_NOISE = 1000


@dataclass(frozen=True)
class Start:
    """What every method starts from."""

    classifier: Classifier
    training: LabeledImages
    wild: ImageRows
    is_candidate: np.ndarray | None  # of the wild data; for SAL alone
    params: Params
    compute: Compute


@dataclass(frozen=True)
class WildMethod:
    """A method: its network, the images that join each batch of ID images, its loss, and what it does beside that."""

    network: Classifier
    others: Mapping[str, ImageRows]
    objective: Objective
    stateful: Mapping[str, Stateful] = field(default_factory=dict)
    after_epoch: Callable[[], None] = lambda: None
    finish: Callable[[], str] = lambda: ""  # gives a note, if there is something that people should know


def _sal(start: Start) -> WildMethod:
    """Separate and learn: candidate outliers against ID data (Eq. 8)."""
    params = start.params.train_ood
    assert start.is_candidate is not None
    others = {"outliers": start.wild.select(start.is_candidate)}
    if params.candidate_id:
        others["wild_id"] = start.wild.select(~start.is_candidate)
    network = OodClassifier.on_top_of(start.classifier)
    return WildMethod(network, others, partial(_sal_objective, loss_weight=params.loss_weight))


def _sal_objective(network: nn.Module, batch: Batch, *, loss_weight: float) -> BatchResult:
    """`batch`: ID images, their labels, as many outliers, and maybe as many wild images that count as ID."""
    images, labels, *others = batch
    n = len(labels)
    # one pass, so that batch norm sees the mixture that it will see in use
    class_logits, ood_logit = network(torch.cat([images, *others]))
    id_logit, outlier_logit = torch.cat([ood_logit[:n], ood_logit[2 * n :]]), ood_logit[n : 2 * n]
    loss = sal_objective(class_logits[:n], labels, id_logit, outlier_logit, loss_weight)
    return BatchResult(loss, (class_logits[:n].argmax(1) == labels).sum())


def _oe(start: Start) -> WildMethod:
    """Outlier Exposure with the whole wild set."""
    chosen = start.params.train_rival.oe
    loss = partial(oe_loss, weight=chosen.loss_weight)
    return WildMethod(start.classifier, {"wild": start.wild}, partial(_wild_objective, loss=loss))


def _energy_oe(start: Start) -> WildMethod:
    """Energy-regularised training with the whole wild set."""
    chosen = start.params.train_rival.energy_oe
    margins = (
        _mean_energy(start, start.training.images) if chosen.m_in == "auto" else chosen.m_in,
        _mean_energy(start, _noise_like(start.training.images)) if chosen.m_out == "auto" else chosen.m_out,
    )
    loss = partial(energy_oe_loss, weight=chosen.loss_weight, margins=margins)
    return WildMethod(start.classifier, {"wild": start.wild}, partial(_wild_objective, loss=loss))


def _woods(start: Start) -> WildMethod:
    return _constrained(start, start.params.train_rival.woods.model_dump() | {"margin": 0.0})


def _scone(start: Start) -> WildMethod:
    return _constrained(start, start.params.train_rival.scone.model_dump())


def _wild_objective(
    network: nn.Module, batch: Batch, *, loss: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> BatchResult:
    """`batch`: ID images, their labels, as many wild images."""
    images, labels, wild = batch
    class_logits = network(torch.cat([images, wild]))
    id_logits, wild_logits = class_logits[: len(labels)], class_logits[len(labels) :]
    return BatchResult(loss(id_logits, labels, wild_logits), (id_logits.argmax(1) == labels).sum())


def _constrained(start: Start, numbers: dict[str, float]) -> WildMethod:
    """WOODS and SCONE. At the start, ID data have as many false alarms as they may."""
    id_logits = _logits(start.classifier, start.training.images, start)
    threshold = float(id_logits.logsumexp(1).quantile(numbers["false_alarms"]))
    network = EnergyClassifier.on_top_of(start.classifier, threshold)
    loss_at_start = float(cross_entropy(id_logits, start.training.labels))
    loss = ConstrainedEnergyLoss(network.outlier_line, loss_at_start, **numbers)
    start.compute.place(network)
    loss.to(start.compute.device)
    course = _ConstrainedCourse(start, network, loss, numbers["tolerance"])
    return WildMethod(
        network,
        {"wild": start.wild},
        partial(_wild_objective, loss=loss),
        {"multipliers": loss, "best": course},
        course.after_epoch,
        course.finish,
    )


class _ConstrainedCourse:
    """Looks at the constraints after each epoch, and keeps the last network that meets them, or comes nearest."""

    def __init__(self, start: Start, network: EnergyClassifier, loss: ConstrainedEnergyLoss, tolerance: float) -> None:
        self._start, self._network, self._loss, self._tolerance = start, network, loss, tolerance
        self._epoch, self._best_epoch = 0, 0
        self._best: Constraints | None = None
        self._weights: dict[str, Tensor] = {}

    def after_epoch(self) -> None:
        self._epoch += 1
        found = self._loss.update(
            _logits(self._network, self._start.training.images, self._start), self._start.training.labels
        )
        if self._best is None or self._short_of(found) <= self._short_of(self._best):
            self._best, self._best_epoch = found, self._epoch
            self._weights = {name: value.cpu().clone() for name, value in self._network.state_dict().items()}

    def finish(self) -> str:
        """Take the best network, and say so where it is not the last, or breaks a constraint."""
        best = self._best
        assert best is not None
        self._network.load_state_dict(self._weights)
        if self._short_of(best) > 0:
            broken = {
                "false_alarms": not best.false_alarms <= best.most_false_alarms,
                "loss_factor": not best.loss <= best.largest_loss,
            }
            larger = " and ".join(f"a larger {key}" for key, is_broken in broken.items() if is_broken)
            return (
                f"the constraints cannot be met. In epoch {self._best_epoch}, which comes nearest and is kept, ID data "
                f"have {100 * best.false_alarms:.3g}% false alarms (at most {100 * best.most_false_alarms:.3g}%) and a "
                f"loss of {best.loss:.4g} (at most {best.largest_loss:.4g}); more epochs or {larger} may help"
            )
        if self._best_epoch < self._epoch:
            return f"epoch {self._best_epoch} of {self._epoch} is kept, because the later ones break a constraint"
        return ""

    def _short_of(self, found: Constraints) -> float:
        """By how much more than is tolerated. A network that has lost its way is worst of all."""
        if not math.isfinite(found.false_alarms + found.loss):
            return math.inf
        return max(0.0, found.excess - self._tolerance)

    def get_state(self) -> dict[str, Any]:
        best = None if self._best is None else tuple(self._best)
        return {"epochs": (self._epoch, self._best_epoch), "best": best, "weights": self._weights}

    def set_state(self, state: dict[str, Any]) -> None:
        self._epoch, self._best_epoch = state["epochs"]
        self._best = None if state["best"] is None else Constraints(*state["best"])
        self._weights = state["weights"]


def _logits(network: Classifier, images: ImageRows, start: Start) -> Tensor:
    """Class logits of all images, as the network gives them in use."""
    size = start.params.extract_grads.batch_size
    logits = in_batches(network, network.forward, images, size, start.compute, Silent())
    return torch.cat([batch for (batch,) in logits])


def _mean_energy(start: Start, images: ImageRows) -> float:
    """Of the network that all start from. Energy is −logsumexp here, as the authors of Energy-OE have it."""
    return -float(_logits(start.classifier, images, start).logsumexp(1).mean())


def _noise_like(images: ImageRows) -> ImageRows:
    """As many images (at most N_NOISE) of independent uniform pixels. Test OOD data must not choose a margin."""
    shape = (min(len(images), N_NOISE), *images.sets[0].shape[1:])
    noise = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return ImageRows((noise,), np.arange(len(noise)))


WILD_METHODS: dict[str, Callable[[Start], WildMethod]] = {
    "sal": _sal,
    "oe": _oe,
    "energy-oe": _energy_oe,
    "woods": _woods,
    "scone": _scone,
}
