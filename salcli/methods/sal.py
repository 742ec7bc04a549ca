"""SAL: τ as the filter's params define it, the OOD classifier g_θ, and τ as a post-hoc score."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Annotated, Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field, PlainValidator, model_validator
from torch import Tensor

from salcli.engine.batches import Batch, Rows, joined
from salcli.engine.device import processes
from salcli.engine.linear_heads import Examples, FullFit
from salcli.engine.training import BatchResult
from salcli.errors import ParamsError, SalError
from salcli.methods.base import (
    LBFGS,
    Count,
    Known,
    Penalty,
    Phase,
    Phases,
    Positive,
    PostHoc,
    Section,
    Share,
    Solver,
    Start,
    TrainParams,
    WildTrained,
    method,
)
from salcli.models.network import OodClassifier
from salcli.sal.gradients import (
    ALONE,
    Gradients,
    Representation,
    RepresentationSource,
    Workers,
    last_layer_residual,
    of_each_sample,
)
from salcli.sal.objective import BinaryLoss, sal_objective
from salcli.sal.seeding import generator
from salcli.sal.tau import CPU, Direction, Spectrum, class_conditional_tau

COMMITTEE = "committee"
TAU = "sal"  # the name of τ among the filter's scores
SAL_PLUS = "sal-plus"
POOL = "pool"
LEAST_TEMPERATURE = 1e-30  # logits are divided by it, and stay finite
MOST_NUMBERS = 100_000_000  # in the singular vectors of a detector's file: 0.8 GB


def _temperature(value: object) -> object:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value == "inf" or (is_number and value >= LEAST_TEMPERATURE):  # type: ignore[operator]
        return "inf" if value in ("inf", float("inf")) else float(value)  # type: ignore[arg-type]
    raise ValueError(f"must be at least {LEAST_TEMPERATURE:g}, or inf, got {value!r}")


class FilterParams(Section):
    """How candidate outliers are separated from the wild data."""

    score: str
    threshold_quantile: Share | None
    fdr: Share | None
    certified: Share | None
    calibration: Literal["holdout", "train", "id-svd"]
    directions: Literal["pool", "wild"]
    temperature: Annotated[float | Literal["inf"], PlainValidator(_temperature)]
    svd: Literal["class-conditional", "class-agnostic"]
    reference: Literal["class-conditional", "global"]
    n_vectors: Count
    gradient: Literal["full", "predicted-row"]
    labels: Literal["predicted", "random-wild", "random"]

    @model_validator(mode="after")
    def _calibration_fits_score(self) -> FilterParams:
        held_out, is_tau = self.calibration == "holdout", self.score == TAU
        if self.calibration == "id-svd" and not is_tau:
            raise ValueError(
                f"calibration id-svd is about singular vectors, which only score sal has, not {self.score}; "
                "use holdout or train"
            )
        if not held_out and is_tau and self.directions == POOL:
            raise ValueError(f"calibration {self.calibration} has no held-out ID data to pool; use directions wild")
        if not held_out and self.score in (SAL_PLUS, COMMITTEE):
            raise ValueError(f"score {self.score} compares wild with held-out ID data; use calibration holdout")
        asked = [name for name in ("fdr", "certified") if getattr(self, name) is not None]
        if len(asked) == 2:
            raise ValueError("fdr and certified are two rules for one list; use one of them")
        if asked and not held_out:
            raise ValueError(f"{asked[0]} needs p-values, which only held-out ID data give; use calibration holdout")
        if asked and is_tau and (self.directions != POOL or self.labels == "random-wild"):
            raise ValueError(
                f"{asked[0]} needs p-values, and τ has them only where calibration and wild samples are treated "
                "alike; use directions pool, and not labels random-wild"
            )
        if self.threshold_quantile is None and not asked and self.score != SAL_PLUS:
            raise ValueError("threshold_quantile null means P(outlier) > ½, which only score sal-plus has; name one")
        return self


class TrainOodParams(TrainParams):
    """How the OOD classifier is trained."""

    solver: Solver
    penalty: Penalty
    loss: BinaryLoss
    loss_weight: Positive
    candidate_id: bool
    review: Annotated[str, Field(min_length=1)] | None

    @model_validator(mode="after")
    def _solver_fits_loss(self) -> TrainOodParams:
        if self.solver == LBFGS and self.loss != "logistic":
            raise ValueError("solver lbfgs fits a logistic regression: set loss to logistic, or solver to sgd")
        return self


@method("sal-posthoc", label="SAL (post-hoc)", paper="Du et al., 2024")
class Tau(PostHoc):
    """τ with ∇̄ and v of the filter; nothing is trained. Its params are the filter section.

    With `directions: pool`, v is of calibration and wild gradients together, contrasted with ID training: all
    of them are treated alike, so p-values are exact. The paper's v is of the wild gradients alone, and fits them.
    """

    needs_wild = True
    directions: OutlierDirections | None = None  # of a compact one

    @classmethod
    def from_params(cls, params: Any) -> Tau:
        return cls(params.filter)

    @property
    def needs_calibration(self) -> bool:  # type: ignore[override]
        return self.params is not None and self.params.directions == POOL

    @property
    def is_exact(self) -> bool:  # type: ignore[override]
        return self.needs_calibration and self.params.labels != "random-wild"

    def fit(self, known: Known) -> None:
        self.known = known

    def scores_of(self, *sources: RepresentationSource) -> list[Float[Tensor, " n"]]:
        """Streamed class by class: no more than one class's vectors are in memory.

        Where no sample is predicted as a class, there is no outlier of that class to look like: τ is 0. That is also
        its value along every direction in which the gradients do not spread.
        """
        gradients = [self._gradients(source) for source in sources]
        found = self._tau(self._spectrum(), gradients)
        n_undefined = sum(int((own.isnan() & _finite_rows(one)).sum()) for own, one in zip(found, sources, strict=True))
        if n_undefined:
            self.known.note(
                f"{self.label}: {n_undefined} samples are of classes that no wild sample is predicted as; "
                "nothing in the wild data speaks against them, so they count as ID"
            )
        return [torch.where(own.isnan() & _finite_rows(one), 0.0, own) for own, one in zip(found, sources, strict=True)]

    def scores(self, source: RepresentationSource, *, fitted_on: bool = False) -> Float[Tensor, " n"]:
        """Training samples have their true labels; with calibration id-svd, on the vectors of their own gradients."""
        if not fitted_on:
            return self.scores_of(source)[0]
        own = self._labeled(source)
        released = self.params.calibration == "id-svd"
        spectrum = replace(self._spectrum(), others=[own]) if released else self._spectrum()
        return self._tau(spectrum, [own])[0]

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        return self.scores_of(x)[0] if self.directions is None else self.directions.tau(x)

    def compact(self, seed: int) -> None:
        self.directions = OutlierDirections.fit(self)
        del self.known

    def settings(self) -> dict[str, Any]:
        """All is in the directions."""
        return {}

    def _gradients(self, source: RepresentationSource) -> Gradients:
        """With predicted labels, or random ones. Held-out ID samples are treated just as wild ones are, except by
        `random-wild`.
        """
        params, known, label = self.params, self.known, source.predicted
        what = "wild" if source is known.wild else "calibration" if source is known.calibration else "test"
        if params.labels == "random" or (params.labels == "random-wild" and what == "wild"):
            drawn = generator(known.seed, f"random-labels, {what}").integers(source.n_classes, size=len(source))
            label = torch.from_numpy(drawn)
        return Gradients(source, label, params.gradient == "predicted-row", float(params.temperature))

    def _labeled(self, source: RepresentationSource) -> Gradients:
        return Gradients(source, source.label, self.params.gradient == "predicted-row", float(self.params.temperature))

    def _spectrum(self) -> Spectrum:
        known, is_pool = self.known, self.params.directions == POOL
        sources = [known.calibration, known.wild] if is_pool else [known.wild]
        others = [self._gradients(one) for one in sources if one is not None]
        return Spectrum(self._labeled(known.id_train), others, is_pool, self.params.n_vectors)

    def _each_class(self, spectrum: Spectrum, classes: Iterable[int]) -> Iterator[tuple[int, Direction]]:
        per_class = self.params.reference == "class-conditional"
        return spectrum.of_classes(classes, class_conditional_reference=per_class, device=self._device)

    def _all_classes(self, spectrum: Spectrum, workers: Workers = ALONE) -> Direction:
        per_class, n = self.params.reference == "class-conditional", self.known.id_train.n_classes
        return spectrum.of_all(n, class_conditional_reference=per_class, device=self._device, workers=workers)

    @property
    def _device(self) -> torch.device:
        """Everything is in float64, which not every GPU has."""
        return self.known.device if self.known.device.type == "cuda" else CPU

    def _tau(self, spectrum: Spectrum, gradients: Sequence[Gradients]) -> list[Float[Tensor, " n"]]:
        if self.params.svd == "class-agnostic":
            direction = self._all_classes(spectrum, processes())
            return [direction.tau(own, processes()) for own in gradients]
        n_classes = self.known.id_train.n_classes
        found = class_conditional_tau(self._each_class(spectrum, self._own_classes(n_classes)), gradients)
        # each process scored some classes and left NaN for the others
        return [reduce(lambda one, other: one.where(~one.isnan(), other), processes().collect(own)) for own in found]

    def _own_classes(self, n_classes: int) -> Iterator[int]:
        """Classes are independent of each other, so each process takes some."""
        for k in range(processes().rank, n_classes, processes().size):
            yield k
            self.known.task.advance(processes().size)


def _finite_rows(source: RepresentationSource) -> Tensor:
    return of_each_sample(source, lambda x: x.feature.isfinite().all(1), torch.bool)


@dataclass(frozen=True)
class OutlierDirections:
    """The directions of all classes, or in a list of one that of all: for a detector's file."""

    vector: Float[Tensor, "c v k d"]  # zero for a class without wild gradients: τ is 0 there
    offset: Float[Tensor, "l v"]  # of each label
    temperature: float
    label_row_only: bool

    @classmethod
    def fit(cls, tau: Tau) -> OutlierDirections:
        params, n_classes = tau.params, tau.known.id_train.n_classes
        if params.labels != "predicted":
            raise ParamsError(f"filter.labels is {params.labels}, so τ of a new sample would be random; use predicted")
        per_class, label_row_only = params.svd == "class-conditional", params.gradient == "predicted-row"
        n_groups = n_classes if per_class else 1
        shape = (1 if label_row_only else n_classes, tau.known.head.weight.shape[1])
        n_numbers = n_groups * params.n_vectors * shape[0] * shape[1]
        if n_numbers > MOST_NUMBERS:
            raise ParamsError(
                f"τ of {n_classes} classes needs {8 * n_numbers / 1e9:.1f} GB of singular vectors, too many for a "
                "file; set filter.gradient to predicted-row, or filter.svd to class-agnostic"
            )
        vector = torch.zeros(n_groups, params.n_vectors, *shape, dtype=torch.float64)
        offset = torch.zeros(n_classes, params.n_vectors, dtype=torch.float64)
        if per_class:
            for k, found in tau._each_class(tau._spectrum(), range(n_classes)):
                vector[k], offset[k] = found.vector.cpu(), found.offset[0].cpu()
        else:
            found = tau._all_classes(tau._spectrum())
            vector[0], offset[:] = found.vector.cpu(), found.offset.cpu()
        return cls(vector, offset, float(params.temperature), label_row_only)

    def tau(self, x: Representation) -> Float[Tensor, " n"]:
        """With predicted labels, as a graph of fixed operations that other programs can run."""
        label = x.predicted
        residual = last_layer_residual(x.logits, label, self.temperature)
        if self.label_row_only:
            residual = residual.gather(1, label[:, None])
        vector = self.vector[label if len(self.vector) > 1 else torch.zeros_like(label)]  # n, v, k, d
        along = torch.einsum("nvkd,nd->nvk", vector, x.feature.double())
        projected = (along * residual.double()[:, None]).sum(dim=2) - self.offset[label]
        return projected.square().mean(dim=1)


class Sal(WildTrained):
    """The OOD classifier g_θ: candidate outliers against ID data (Eq. 8). Its params are the train_ood section.

    It is not registered: its rows are the variants that params.yaml names.
    """

    name, label, paper = "sal", "SAL", "Du et al., 2024"
    Params = TrainOodParams
    network = OodClassifier

    def phases(self, start: Start) -> Phases:
        assert start.classifier is not None
        assert start.wild is not None
        assert start.is_candidate is not None
        others = {"outliers": start.wild.select(start.is_candidate)}
        if self.params.candidate_id:
            if start.is_candidate.all():
                raise SalError("train_ood.candidate_id: all wild samples are candidate outliers, so none is left")
            others["wild_id"] = start.wild.select(~start.is_candidate)
        if self.params.solver == LBFGS:
            network, fit = self._full_fit(start, others)
            yield Phase("", fit, self.params.model_dump(exclude={"review"}))
            return network
        with start.random(f"train-ood/{start.ood}") as generator:
            network = OodClassifier.on_top_of(start.classifier)
            objective = partial(_objective, loss_weight=self.params.loss_weight, loss=self.params.loss)
            run = start.fine_tuning(network, others, generator, objective=objective)
            # what counts is what a review says, not where it is stored
            yield Phase("", run, self.params.model_dump(exclude={"review"}))
        return network

    def _full_fit(self, start: Start, others: Mapping[str, Rows]) -> tuple[OodClassifier, FullFit]:
        """On vectors the two heads share nothing, so the class head stays, and the OOD head is fitted to the end."""
        assert start.classifier is not None
        network = OodClassifier.on_top_of(start.classifier)
        start.compute.place(network)
        sides = {"training": start.training.rows, **others}
        is_id = np.repeat([name != "outliers" for name in sides], [len(rows) for rows in sides.values()])
        examples = Examples.of_two_sides(joined([*sides.values()]), is_id)
        device = start.compute.device
        return network, FullFit(network.ood_head, network.features, examples, self.params.penalty, start.seed, device)

    def score(self, network: OodClassifier, outputs: list[Tensor]) -> Float[Tensor, " n"]:
        """Minus the OOD logit, which is higher for ID data (Eq. 8)."""
        return -outputs[1].double()


def _objective(network: OodClassifier, batch: Batch, *, loss_weight: float, loss: BinaryLoss) -> BatchResult:
    """`batch`: ID samples, their labels, as many outliers, and maybe as many wild samples that count as ID."""
    samples, labels, *others = batch
    n = len(labels)
    # one pass, so that batch norm sees the mixture that it will see in use
    class_logits, ood_logit = network(torch.cat([samples, *others]))
    id_logit, outlier_logit = torch.cat([ood_logit[:n], ood_logit[2 * n :]]), ood_logit[n : 2 * n]
    total = sal_objective(class_logits[:n], labels, id_logit, outlier_logit, loss_weight, loss)
    return BatchResult(total, (class_logits[:n].argmax(1) == labels).sum())


HELD_OUT, PAPERS_TEXT, RELEASED = "held out", "paper's text", "released code"


def protocol(params: FilterParams) -> str:
    """Whose threshold a variant has: ours, that of one reading of the paper's text, or that of the authors' code."""
    if params.calibration != "id-svd":
        return {"holdout": HELD_OUT, "train": PAPERS_TEXT}[params.calibration]
    # their several vectors average signed projections, which cancel
    is_theirs = (params.gradient, params.n_vectors) == ("predicted-row", 1)
    return RELEASED if is_theirs else "released threshold"


def variant_label(variant: str) -> str:
    """What a table calls a variant: sal is SAL, sal-paper is SAL (paper's text), sal-2 is SAL (2)."""
    rest = variant.removeprefix(Sal.name).lstrip("-")
    named = {"paper": PAPERS_TEXT, "released": RELEASED}
    return f"{Sal.label} ({named.get(rest, rest)})" if rest else Sal.label
