"""SAL: τ as the filter's params define it, the OOD classifier g_θ, and τ as a post-hoc score."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Annotated, Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field, PlainValidator, model_validator
from torch import Tensor, nn

from salcli.engine.batches import Batch, Rows, joined
from salcli.engine.device import processes
from salcli.engine.linear_heads import Examples, FullFit
from salcli.engine.training import BatchResult
from salcli.errors import ParamsError, TrainingError
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
from salcli.models.backbones import AUTO
from salcli.models.network import OodClassifier
from salcli.progress import Silent, Task
from salcli.sal.gradients import (
    FactorSource,
    Gradients,
    Representation,
    RepresentationSource,
    last_layer_residual,
    mean_gradient,
)
from salcli.sal.objective import BinaryLoss, sal_objective
from salcli.sal.seeding import generator
from salcli.sal.separation import CPU, class_agnostic_scores, class_conditional_scores, reference_gradients
from salcli.sal.spectrum import CentredGradients, top_singular_vectors

TAU = "sal"  # the name of τ among the filter's scores
BLEND, LEARNED, COMMITTEE = "blend", "learned", "committee"  # as AUTO, made of others: combined.py
PREFERRED = BLEND, COMMITTEE  # by AUTO, if the wild data do not drift by them
LEAST_TEMPERATURE = 1e-30  # logits are divided by it, and stay finite
SOFTENED = 100.0  # the temperature of the second τ among them
START_PENALTY = 2e-2  # of the OOD head that fine-tuning starts from, relative to the variance of the features
MOST_TO_START = 50_000  # samples of a side that it is fitted to
MOST_NUMBERS = 100_000_000  # in the singular vectors of a detector's file: 0.8 GB


def _temperature(value: object) -> object:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value == "inf" or (is_number and value >= LEAST_TEMPERATURE):  # type: ignore[operator]
        return "inf" if value in ("inf", float("inf")) else float(value)  # type: ignore[arg-type]
    raise ValueError(f"must be at least {LEAST_TEMPERATURE:g}, or inf, got {value!r}")


class FilterParams(Section):
    """How candidate outliers are separated from the wild data."""

    score: str
    threshold_quantile: Share
    fdr: Share | None
    calibration: Literal["holdout", "train", "id-svd"]
    temperature: Annotated[float | Literal["inf"], PlainValidator(_temperature)]
    svd: Literal["class-conditional", "class-agnostic"]
    reference: Literal["class-conditional", "global"]
    n_vectors: Count
    gradient: Literal["full", "predicted-row"]
    labels: Literal["predicted", "random-wild", "random"]

    @model_validator(mode="after")
    def _calibration_fits_score(self) -> FilterParams:
        if self.calibration == "id-svd" and self.score != TAU:
            raise ValueError(
                f"calibration id-svd is about singular vectors, which only score sal has, not {self.score}; "
                "use holdout or train"
            )
        if self.calibration == "train" and self.score == AUTO:
            raise ValueError(
                "score auto needs calibration holdout: on the data that scores are fitted to, the one that overfits "
                "most would win"
            )
        if self.calibration == "train" and self.score in (LEARNED, COMMITTEE):
            raise ValueError(f"score {self.score} compares wild with held-out ID data; use calibration holdout")
        if self.calibration != "holdout" and self.fdr is not None:
            raise ValueError("fdr needs p-values, which only held-out ID data give; use calibration holdout")
        return self

    def softened(self, temperature: float) -> FilterParams:
        """For τ at another temperature."""
        return self.model_copy(update={"temperature": temperature})


class TrainOodParams(TrainParams):
    """How the OOD classifier is trained."""

    solver: Solver
    penalty: Penalty
    loss: BinaryLoss
    loss_weight: Positive
    head: Literal["random", "fitted"]
    candidate_id: bool
    review: Annotated[str, Field(min_length=1)] | None

    @model_validator(mode="after")
    def _solver_fits_loss(self) -> TrainOodParams:
        if self.solver == LBFGS and self.loss != "logistic":
            raise ValueError("solver lbfgs fits a logistic regression: set loss to logistic, or solver to sgd")
        return self


def unlabeled_gradients(source: RepresentationSource, params: FilterParams, seed: int, what: str) -> Gradients:
    """Gradients of samples whose labels are not known: predicted, or random. `what` names the samples.

    Held-out ID samples are treated just as wild ones are, except by `random-wild`.
    """
    label = source.predicted
    if params.labels == "random" or (params.labels == "random-wild" and what == "wild"):
        drawn = generator(seed, f"random-labels, {what}").integers(source.n_classes, size=len(source))
        label = torch.from_numpy(drawn)
    return Gradients(source, label, params.gradient == "predicted-row", float(params.temperature))


def labeled_gradients(source: RepresentationSource, params: FilterParams) -> Gradients:
    """Gradients with the true labels."""
    return Gradients(source, source.label, params.gradient == "predicted-row", float(params.temperature))


def tau(
    spectrum_of: FactorSource,
    sources: Sequence[FactorSource],
    id_train: FactorSource,
    n_classes: int,
    params: FilterParams,
    device: torch.device = CPU,
    task: Task | None = None,
) -> list[Float[Tensor, " n"]]:
    """τ of every source (Eq. 6), with ∇̄ of the ID training data and v of the wild data, or of `spectrum_of`.

    Computed in float64: on a CPU, or on a GPU that has it. Class-conditional scores of samples whose class does not
    occur in `spectrum_of` are NaN.
    """
    per_class_reference = params.reference == "class-conditional"
    device = device if device.type == "cuda" else CPU
    if params.svd == "class-agnostic":
        reference = reference_gradients(id_train, n_classes, class_conditional=per_class_reference)
        return class_agnostic_scores(spectrum_of, sources, reference.to(device), params.n_vectors, processes())
    shared = None if per_class_reference else reference_gradients(id_train, n_classes, class_conditional=False)
    scores = class_conditional_scores(
        spectrum_of,
        sources,
        id_train,
        _own_classes(n_classes, task or Silent()),
        params.n_vectors,
        shared_reference=shared,
        device=device,
    )
    # each process scored some classes and left NaN for the others
    return [reduce(lambda one, other: one.where(~one.isnan(), other), processes().collect(own)) for own in scores]


def _own_classes(n_classes: int, task: Task) -> Iterator[int]:
    """Classes are independent of each other, so each process takes some."""
    for k in range(processes().rank, n_classes, processes().size):
        yield k
        task.advance(processes().size)


def known_tau(known: Known, params: FilterParams, source: RepresentationSource) -> Float[Tensor, " n"]:
    """τ of a source; of all known ones at once, because the singular vectors of the wild data take longest."""
    assert known.wild is not None
    sources = {"wild": known.wild, "calibration": known.calibration, "test": known.test}
    is_known, key = any(source is one for one in sources.values()), ("τ", repr(params))
    found: dict[int, Tensor] = known.cache.get(key, {}) if is_known else {}
    if not found:
        asked = {what: one for what, one in sources.items() if one is not None} if is_known else {"test": source}
        wild = unlabeled_gradients(known.wild, params, known.seed, "wild")
        id_train = labeled_gradients(known.id_train, params)
        others = [
            wild if one is known.wild else unlabeled_gradients(one, params, known.seed, what)
            for what, one in asked.items()
        ]
        scores = tau(wild, others, id_train, known.wild.n_classes, params, known.device)
        found = dict(zip(map(id, asked.values()), scores, strict=True))
        if is_known:
            known.cache[key] = found
    return found[id(source)]


@dataclass(frozen=True)
class OutlierDirections:
    """All that τ of new samples needs: v and ⟨∇̄, v⟩, of each class or, in a list of one, of all."""

    vector: Float[Tensor, "c v k d"]  # zero where the wild gradients do not spread: τ is 0 there
    offset: Float[Tensor, "c v"]
    temperature: float
    label_row_only: bool

    @classmethod
    def fit(cls, known: Known, params: FilterParams) -> OutlierDirections:
        assert known.wild is not None
        if params.labels != "predicted":
            raise ParamsError(f"filter.labels is {params.labels}, so τ of a new sample would be random; use predicted")
        wild = unlabeled_gradients(known.wild, params, known.seed, "wild")
        id_train = labeled_gradients(known.id_train, params)
        n_classes = known.wild.n_classes
        n_groups = n_classes if params.svd == "class-conditional" else 1
        per_class = params.reference == "class-conditional"
        shape = (1 if params.gradient == "predicted-row" else n_classes, known.head.weight.shape[1])
        n_numbers = n_groups * params.n_vectors * shape[0] * shape[1]
        if n_numbers > MOST_NUMBERS:
            raise ParamsError(
                f"τ of {n_classes} classes needs {8 * n_numbers / 1e9:.1f} GB of singular vectors, too many for a "
                "file; set filter.gradient to predicted-row, or filter.svd to class-agnostic"
            )
        vector = torch.zeros(n_groups, params.n_vectors, *shape, dtype=torch.float64)
        offset = torch.zeros(n_classes, params.n_vectors, dtype=torch.float64)
        shared = None
        if n_groups == 1 or not per_class:
            shared = reference_gradients(id_train, n_classes, class_conditional=n_groups == 1 and per_class)
        for k in range(n_groups):
            own = wild if n_groups == 1 else wild.of_class(k)
            if len(own) == 0:
                continue
            reference = mean_gradient(id_train.of_class(k))[None] if shared is None else shared
            found = top_singular_vectors(CentredGradients(own, reference), params.n_vectors)
            vector[k, : len(found)] = found
            own_offset = reference.flatten(1) @ vector[k].flatten(1).T  # one row, or one for each class
            offset[slice(None) if n_groups == 1 else k] = own_offset
        return cls(vector, offset, float(params.temperature), params.gradient == "predicted-row")

    def tau(self, x: Representation) -> Float[Tensor, " n"]:
        """With predicted labels."""
        label = x.predicted
        residual = last_layer_residual(x.logits, label, self.temperature)
        if self.label_row_only:
            residual = residual.gather(1, label[:, None])
        vector = self.vector[label if len(self.vector) > 1 else torch.zeros_like(label)]  # n, v, k, d
        along = torch.einsum("nvkd,nd->nvk", vector, x.feature.double())
        projected = (along * residual.double()[:, None]).sum(dim=2) - self.offset[label]
        return projected.square().mean(dim=1)


@method("sal-posthoc", label="SAL (post-hoc)", paper="Du et al., 2024")
class SalPostHoc(PostHoc):
    """−τ of test samples, with ∇̄ and v of the filter; nothing is trained. Its params are the filter section."""

    needs_wild = True
    directions: OutlierDirections | None = None  # of a compact one

    @classmethod
    def from_params(cls, params: Any) -> SalPostHoc:
        return cls(params.filter)

    def fit(self, known: Known) -> None:
        self.known = known

    def compact(self, seed: int) -> None:
        self.directions = OutlierDirections.fit(self.known, self.params)
        del self.known

    def settings(self) -> dict[str, Any]:
        """All is in the directions."""
        return {}

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        return self.scores(x) if self.directions is None else -self.directions.tau(x)

    def scores(self, source: RepresentationSource, *, fitted_on: bool = False) -> Float[Tensor, " n"]:
        """Where no wild sample is predicted as a class, there is no outlier of that class to look like: τ is 0.

        That is also its value along every direction in which the wild gradients do not spread.
        """
        known, outlier_score = self.known, known_tau(self.known, self.params, source)
        is_finite = torch.cat(
            [torch.ones(0, dtype=torch.bool)] + [x.feature.isfinite().all(1) for x in source.chunks()]
        )
        undefined = outlier_score.isnan() & is_finite
        if n_undefined := int(undefined.sum()):
            known.note(
                f"{self.label}: {n_undefined} test samples are of classes that no wild sample is predicted as; "
                "nothing in the wild data speaks against them, so they count as ID"
            )
        return -torch.where(undefined, 0.0, outlier_score)


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
                raise TrainingError("train_ood.candidate_id: all wild samples are candidate outliers, so none is left")
            others["wild_id"] = start.wild.select(~start.is_candidate)
        if self.params.solver == LBFGS:
            network, fit = self._full_fit(start, others)
            yield Phase("", fit, self.params.model_dump(exclude={"review"}))
            return network
        with start.random(f"train-ood/{start.ood}") as generator:
            network = OodClassifier.on_top_of(start.classifier)
            if self.params.head == "fitted":
                self._fit_head(start, network, others)
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

    def _fit_head(self, start: Start, network: OodClassifier, others: Mapping[str, Rows]) -> None:
        rng, features = generator(start.seed, f"rows of the OOD head, {start.ood}"), {}
        for name, rows in {"training": start.training.rows, **others}.items():
            chosen = rows.select(np.sort(rng.permutation(len(rows))[:MOST_TO_START]))
            features[name] = start.features(network, chosen)
        outliers = features.pop("outliers")
        fit_head(network.ood_head, torch.cat([*features.values()]), outliers, start.compute.device)

    def score(self, network: OodClassifier, outputs: list[Tensor]) -> Float[Tensor, " n"]:
        return outputs[1].double()


def fit_head(
    head: nn.Linear, known: Float[Tensor, "n d"], outliers: Float[Tensor, "m d"], device: torch.device
) -> None:
    """Fit the OOD head to features that stay as they are.

    A short fine-tuning is over before a random head is fitted: docs/experiments/separators.md. Sums are in float64,
    which Apple's GPUs do not have.
    """
    features = torch.cat([known, outliers]).numpy()
    examples = Examples.of_two_sides(Rows((features,), np.arange(len(features))), np.arange(len(features)) < len(known))
    penalty = START_PENALTY * float(features.var(axis=0).mean())
    FullFit(head, nn.Identity(), examples, penalty, 0, device if device.type == "cuda" else CPU).run(Silent())


def _objective(network: nn.Module, batch: Batch, *, loss_weight: float, loss: BinaryLoss) -> BatchResult:
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
