"""Rivals that are trained with the whole wild set as if it were OOD: OE, Energy-OE, Energy-VOS, WOODS, SCONE.

Losses are computed in float32, also where the network computes in less.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import Field, PlainValidator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus

from salcli.engine.batches import Batch, Rows
from salcli.engine.training import BatchResult
from salcli.methods.base import NotNegative, Number, Phase, Phases, Positive, Section, Share, Start, WildTrained, method
from salcli.methods.logits import energy, msp
from salcli.models.network import Classifier, NetworkSpec

N_NOISE = 1000
FALSE_ALARMS = 0.05  # of ID data, where Energy-VOS starts
IdLogits = Float[Tensor, "n k"]
Labels = Int[Tensor, " n"]
WildLogits = Float[Tensor, "m k"]
Loss = Float[Tensor, ""]
WildLoss = Callable[[IdLogits, Labels, WildLogits], Loss]


def _objective(network: nn.Module, batch: Batch, *, loss: WildLoss) -> BatchResult:
    """`batch`: ID samples, their labels, as many wild samples."""
    samples, labels, wild = batch
    class_logits = network(torch.cat([samples, wild]))
    id_logits, wild_logits = class_logits[: len(labels)], class_logits[len(labels) :]
    return BatchResult(loss(id_logits, labels, wild_logits), (id_logits.argmax(1) == labels).sum())


class FineTuned(Section):
    """schedule: of the learning rate; None: that of train_ood, which SAL has too."""

    schedule: Literal["cosine", "constant", "steps"] | None


class Weighted(FineTuned):
    """loss_weight: of the loss on wild samples."""

    loss_weight: Positive


def _with_own_schedule(start: Start, params: Section) -> Start:
    if not isinstance(params, FineTuned) or params.schedule is None or start.schedule is None:
        return start
    return replace(start, schedule=start.schedule.model_copy(update={"schedule": params.schedule}))


class WildLossMethod(WildTrained):
    """Fine-tunes the ID classifier with a loss on ID and wild logits. The simplest base of a custom rival."""

    def first_network(self, start: Start) -> Classifier:
        """What the training starts from. A method that needs something else before its first loss computes it here."""
        assert start.classifier is not None
        return start.classifier

    @abstractmethod
    def loss(self, id_logits: IdLogits, labels: Labels, wild_logits: WildLogits) -> Loss: ...

    def phases(self, start: Start) -> Phases:
        assert start.wild is not None
        with start.random(f"train-ood/{start.ood}") as generator:
            network, objective = self.first_network(start), partial(_objective, loss=self.loss)
            tuned = _with_own_schedule(start, self.params)
            run = tuned.fine_tuning(network, {"wild": start.wild}, generator, objective=objective)
            yield Phase("", run, self.params.model_dump())
        return network


@method("oe", label="OE", paper="Hendrycks et al., 2019")
class OutlierExposure(WildLossMethod):
    """Wild samples should be predicted as every class alike; scored by MSP."""

    Params = Weighted

    def loss(self, id_logits: IdLogits, labels: Labels, wild_logits: WildLogits) -> Loss:
        """Cross-entropy of ID samples, plus the weighted one of wild samples to the uniform distribution."""
        wild, weight = wild_logits.float(), float(self.params.loss_weight)
        to_uniform = wild.logsumexp(dim=1) - wild.mean(dim=1)
        return cross_entropy(id_logits.float(), labels) + (weight * to_uniform).mean()

    def score(self, network: Classifier, outputs: list[Tensor]) -> Float[Tensor, " n"]:
        return msp(outputs[0])


def _auto_or_number(value: object) -> object:
    if value == "auto":
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise ValueError(f"must be auto or a number, got {value!r}")


Margin = Annotated[float | Literal["auto"], PlainValidator(_auto_or_number)]


@method("energy-oe", label="Energy-OE", paper="Liu et al., 2020")
class EnergyOe(WildLossMethod):
    """The energies of ID and of wild samples should be beyond two margins; scored by Energy."""

    class Params(Weighted):
        """Margins: auto is the mean energy of ID data (m_in) and of noise (m_out) before training."""

        m_in: Margin
        m_out: Margin

    def first_network(self, start: Start) -> Classifier:
        training = start.training.rows
        self.m_in = _mean_energy(start, training) if self.params.m_in == "auto" else self.params.m_in
        self.m_out = _mean_energy(start, _noise_like(training)) if self.params.m_out == "auto" else self.params.m_out
        return super().first_network(start)

    def loss(self, id_logits: IdLogits, labels: Labels, wild_logits: WildLogits) -> Loss:
        """Cross-entropy of ID samples, plus squared hinges on the energies of ID and of wild samples."""
        id_energy, wild_energy = (-logits.float().logsumexp(dim=1) for logits in (id_logits, wild_logits))
        too_high, too_low = (id_energy - self.m_in).relu(), (self.m_out - wild_energy).relu()
        hinges = too_high.square().mean() + too_low.square().mean()
        return cross_entropy(id_logits.float(), labels) + float(self.params.loss_weight) * hinges

    def score(self, network: Classifier, outputs: list[Tensor]) -> Float[Tensor, " n"]:
        return energy(outputs[0])


def _mean_energy(start: Start, rows: Rows) -> float:
    """Of the ID classifier. Energy is −logsumexp here, as its authors define it."""
    assert start.classifier is not None
    return -float(start.logits(start.classifier, rows).logsumexp(1).mean())


def _noise_like(rows: Rows) -> Rows:
    """As many samples (at most N_NOISE) of independent uniform pixels. Test OOD data must not choose a margin."""
    shape = (min(len(rows), N_NOISE), *rows.sample_shape)
    noise = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return Rows((noise,), np.arange(len(noise)))


class EnergyClassifier(Classifier):
    """A classifier whose OOD output is a line in its energy."""

    kind: ClassVar[str] = "energy-classifier"

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self.outlier_line = nn.Linear(1, 1)  # positive for OOD data

    @classmethod
    def with_threshold(cls, classifier: Classifier, threshold: float) -> EnergyClassifier:
        """Start from a trained classifier: OOD is what has a lower energy (logsumexp) than the threshold."""
        network = cls.on_top_of(classifier)
        with torch.no_grad():
            network.outlier_line.weight.fill_(-1)
            network.outlier_line.bias.fill_(threshold)
        return network

    def ood_logit(self, class_logits: Tensor) -> Tensor:
        """The OOD logit (n), higher = more ID-like."""
        energy, line = class_logits.logsumexp(1, keepdim=True), self.outlier_line
        weight, bias = line.weight.detach().to(energy), line.bias.detach().to(energy)
        return -nn.functional.linear(energy, weight, bias).squeeze(1)


@method("energy-vos", label="Energy-VOS", paper="Du et al., 2022")
class EnergyVos(WildLossMethod):
    """A logistic loss on the energies of ID and of wild samples, as in WOODS' published sweeps; scored by Energy."""

    Params = Weighted
    network = EnergyClassifier

    def first_network(self, start: Start) -> EnergyClassifier:
        """As WOODS does."""
        assert start.classifier is not None
        energies = start.logits(start.classifier, start.training.rows).logsumexp(1)
        network = EnergyClassifier.with_threshold(start.classifier, float(energies.quantile(FALSE_ALARMS)))
        self.line = network.outlier_line
        return network

    def loss(self, id_logits: IdLogits, labels: Labels, wild_logits: WildLogits) -> Loss:
        """Cross-entropy of ID samples, plus the logistic loss of telling ID from wild samples by the line."""
        of_id, of_wild = (
            self.line(logits.float().logsumexp(dim=1, keepdim=True)) for logits in (id_logits, wild_logits)
        )
        logistic = (softplus(of_id).mean() + softplus(-of_wild).mean()) / 2
        return cross_entropy(id_logits.float(), labels) + float(self.params.loss_weight) * logistic

    def score(self, network: EnergyClassifier, outputs: list[Tensor]) -> Float[Tensor, " n"]:
        return energy(outputs[0])


@method("woods", label="WOODS", paper="Katz-Samuels et al., 2022")
class Woods(WildTrained):
    """Wild samples should be called OOD, as far as two constraints on ID data allow: false alarms and loss."""

    network = EnergyClassifier

    class Params(FineTuned):
        """Limits of the constraints, and how fast their multipliers and penalties grow."""

        false_alarms: Share
        loss_factor: Positive
        multiplier_lr: Positive
        penalty_growth: Annotated[float, Field(gt=1, allow_inf_nan=False)]
        tolerance: NotNegative

    def phases(self, start: Start) -> Phases:
        """At the start, ID data have as many false alarms as they may."""
        assert start.classifier is not None
        assert start.wild is not None
        with start.random(f"train-ood/{start.ood}") as generator:
            id_logits = start.logits(start.classifier, start.training.rows)
            threshold = float(id_logits.logsumexp(1).quantile(self.params.false_alarms))
            network = EnergyClassifier.with_threshold(start.classifier, threshold)
            start.compute.place(network)
            loss_before = float(cross_entropy(id_logits, start.training.labels))
            loss = ConstrainedEnergyLoss(network.outlier_line, loss_before, self.params)
            best = _BestNetwork(start, network, loss)
            run = _with_own_schedule(start, self.params).fine_tuning(
                network,
                {"wild": start.wild},
                generator,
                objective=partial(_objective, loss=loss),
                stateful={"multipliers": loss, "best": best},
                after_epoch=best.after_epoch,
            )
            yield Phase("", run, self.params.model_dump())
            if note := best.restore():
                with start.progress.task(self.label, 0, "networks") as task:
                    task.note(note)
        return network

    def score(self, network: EnergyClassifier, outputs: list[Tensor]) -> Float[Tensor, " n"]:
        return -network.ood_logit(outputs[0].double())


@method("scone", label="SCONE", paper="Bai et al., 2023")
class Scone(Woods):
    """WOODS with a margin on the energy of wild samples."""

    class Params(Woods.Params):
        """margin: how much lower the energy (here logsumexp) of wild samples should be than WOODS asks for."""

        margin: Number


class _BestNetwork:
    """Checks the constraints after each epoch, and keeps the last network that meets them or comes nearest."""

    def __init__(self, start: Start, network: EnergyClassifier, loss: ConstrainedEnergyLoss) -> None:
        self._start, self._network, self._loss = start, network, loss
        self._epoch, self._best_epoch = 0, 0
        self._best: Constraints | None = None
        self._weights: dict[str, Tensor] = {}

    def after_epoch(self) -> None:
        self._epoch += 1
        training = self._start.training
        found = self._loss.update(self._start.logits(self._network, training.rows), training.labels)
        if self._best is None or self._violation(found) <= self._violation(self._best):
            self._best, self._best_epoch = found, self._epoch
            self._weights = {name: value.cpu().clone() for name, value in self._network.state_dict().items()}

    def restore(self) -> str:
        """Load the best network. Returns a note where it is not the last one, or violates a constraint."""
        best = self._best
        assert best is not None
        self._network.load_state_dict(self._weights)
        if self._violation(best) > 0:
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
            return f"epoch {self._best_epoch} of {self._epoch} is kept, because the later ones violate a constraint"
        return ""

    def _violation(self, found: Constraints) -> float:
        """Beyond what is tolerated. A network with NaN or infinite outputs is worst."""
        if not math.isfinite(found.false_alarms + found.loss):
            return math.inf
        return max(0.0, found.excess - self._loss.params.tolerance)

    def get_state(self) -> dict[str, Any]:
        best = None if self._best is None else tuple(self._best)
        return {"epochs": (self._epoch, self._best_epoch), "best": best, "weights": self._weights}

    def set_state(self, state: dict[str, Any]) -> None:
        self._epoch, self._best_epoch = state["epochs"]
        self._best = None if state["best"] is None else Constraints(*state["best"])
        self._weights = state["weights"]


class ConstrainedEnergyLoss:
    """The loss of WOODS and SCONE: call wild samples OOD while ID false alarms and ID loss stay within limits.

    An augmented Lagrangian: each of the two constraints has a multiplier and a penalty weight, which change after each
    epoch.
    """

    def __init__(self, outlier_line: nn.Linear, loss_before: float, params: Woods.Params) -> None:
        self._outlier_line, self.params = outlier_line, params
        # false alarms first, then the loss
        limits = torch.tensor([params.false_alarms, params.loss_factor]) * torch.tensor([1.0, loss_before])
        self._limits = limits.to(outlier_line.weight.device)
        self._multipliers, self._penalty_weights = torch.zeros_like(self._limits), torch.ones_like(self._limits)

    def __call__(self, id_logits: IdLogits, labels: Labels, wild_logits: WildLogits) -> Loss:
        """The loss with the multipliers as they are now: wild samples taken for ID, and what the constraints add."""
        margin = getattr(self.params, "margin", 0.0)
        missed = torch.sigmoid(-self._outlierness(wild_logits.float(), margin)).mean()
        id_logits = id_logits.float()
        alarms = torch.sigmoid(self._outlierness(id_logits)).mean()
        excess = torch.stack([alarms, cross_entropy(id_logits, labels)]) - self._limits
        multiplier, weight = self._multipliers, self._penalty_weights
        penalty = multiplier * excess + weight / 2 * excess.square()
        at_rest = -multiplier.square() / (2 * weight)  # the least that the penalty can be: a constraint well kept
        return missed + torch.where(weight * excess + multiplier >= 0, penalty, at_rest).sum()

    @torch.no_grad()
    def update(self, id_logits: IdLogits, labels: Labels) -> Constraints:
        """Change multipliers and penalty weights by how far all ID samples together break the constraints."""
        device, multiplier, weight = self._limits.device, self._multipliers, self._penalty_weights
        id_logits, labels = id_logits.to(device), labels.to(device)
        each_alarm = torch.sigmoid(self._outlierness(id_logits))
        each_loss = cross_entropy(id_logits, labels, reduction="none")
        # numpy's mean does not depend on the number of threads
        standing = torch.tensor([each.cpu().numpy().mean() for each in (each_alarm, each_loss)], device=device)
        excess = standing - self._limits
        slope = torch.where(weight * excess + multiplier >= 0, excess, -multiplier / weight)
        self._multipliers = multiplier + self.params.multiplier_lr * slope
        grown = weight * self.params.penalty_growth
        self._penalty_weights = torch.where(excess > self.params.tolerance, grown, weight)
        (alarms, loss), (most_alarms, largest_loss) = standing.tolist(), self._limits.tolist()
        return Constraints(alarms, most_alarms, loss, largest_loss)

    def _outlierness(self, logits: Float[Tensor, "n k"], margin: float = 0.0) -> Float[Tensor, " n"]:
        """φ of the paper: positive for OOD."""
        line: Tensor = self._outlier_line(logits.logsumexp(dim=1, keepdim=True) - margin)
        return line.squeeze(dim=1)

    def get_state(self) -> dict[str, Tensor]:
        return {"multipliers": self._multipliers.cpu().clone(), "penalty_weights": self._penalty_weights.cpu().clone()}

    def set_state(self, state: dict[str, Tensor]) -> None:
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
