"""filter: separate candidate outliers from the wild data (Eq. 6, 7 and Remark 2), by τ, by another score or by all."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from salcli.engine.batches import Rows
from salcli.engine.device import computing, processes, resolve_device
from salcli.engine.inference import outputs_of
from salcli.errors import ThresholdError
from salcli.methods import combined
from salcli.methods.base import Head, InputScore, Known, PostHoc
from salcli.methods.sal import (
    BLEND,
    COMMITTEE,
    HELD_OUT,
    LEARNED,
    PREFERRED,
    TAU,
    labeled_gradients,
    protocol,
    tau,
    unlabeled_gradients,
)
from salcli.models.backbones import AUTO
from salcli.models.network import Classifier
from salcli.params.schema import Params
from salcli.pipeline.loading import (
    IdPart,
    classifier,
    id_representation,
    id_samples,
    known_truth,
    wild_representation,
    wild_samples,
)
from salcli.progress import Progress, Silent, Task
from salcli.sal.filter_verdict import Verdict, verdict
from salcli.sal.gradients import of_each_sample
from salcli.sal.metrics import ood_metrics
from salcli.sal.outlier_share import DRIFT
from salcli.sal.score_choice import CONFIDENCE, Trial, choose_score
from salcli.sal.seeding import generator
from salcli.sal.separation import (
    SeparationErrors,
    discoveries_threshold,
    largest_quantile,
    released_threshold,
    score_threshold,
    separation_errors,
)
from salcli.store.files import as_json, write_json
from salcli.store.formats import Candidates, RepresentationFile, write_candidates
from salcli.store.layout import Experiment, Workspace


@dataclass(frozen=True)
class IdFit:
    """How well the classifier fits the ID data: τ separates only where the ID risk is small."""

    train_risk: float  # mean cross-entropy
    train_accuracy: float
    calibration_accuracy: float  # NaN of none

    @classmethod
    def of(cls, id_train: RepresentationFile, calibration: RepresentationFile) -> IdFit:
        losses = of_each_sample(id_train, lambda x: cross_entropy(x.logits.double(), x.label, reduction="none"))
        accuracies = (float((one.predicted == one.label).double().mean()) for one in (id_train, calibration))
        return cls(float(losses.mean()), *accuracies)


@dataclass(frozen=True)
class Filtered:
    """The outcome. `errors` is None where the truth about the wild data is not known."""

    experiment: Experiment
    candidates: Candidates
    errors: SeparationErrors | None
    fit: IdFit
    n_unscored: int  # calibration samples of classes that the wild data lacks
    n_id_train: int
    trials: list[Trial]  # of all scores, τ's first, where filter.score is auto
    written: list[Path]
    protocol: str = HELD_OUT  # whose threshold it is
    notes: list[str] = field(default_factory=list)  # what the fits of its scores had to say

    @cached_property
    def verdict(self) -> Verdict:
        """What was found beyond what ID data alone would give; without the truth."""
        found = self.candidates
        calibration, wild = torch.from_numpy(found.calibration_score), torch.from_numpy(found.wild_score)
        return verdict(calibration, wild, found.threshold)

    @property
    def found_nothing(self) -> bool:
        return self.protocol == HELD_OUT and not self.verdict.found_something

    @property
    def estimated_precision(self) -> float:
        """The share of outliers among the candidates, without the truth; NaN where T is of training data."""
        return self.verdict.precision if self.protocol == HELD_OUT else math.nan

    @property
    def drifted(self) -> list[str]:
        """Scores that the wild data differ by as a whole; `auto` leaves them out if it can."""
        own = [self.candidates.score_name] if self.verdict.looks_like_drift else []
        return [*dict.fromkeys([*own, *(one.score for one in self.trials if one.drift > DRIFT)])]

    @property
    def sentence(self) -> str:
        if self.protocol != HELD_OUT:  # scores of training data do not say what new ID data would give
            n = len(self.candidates.index)
            return f"{n:,} candidates; how many ID data alone would give is not known: T is of training data."
        text = _found_sentence(self.verdict, self.candidates.score_name)
        return f"{text} {_drift_sentence(self.verdict, self.drifted)}" if self.drifted else text

    @property
    def undecided(self) -> list[str]:
        """Scores that the choice of `auto` is not surely better than."""
        return [one.score for one in self.trials if not one.is_chosen and one.beaten < CONFIDENCE]


def _found_sentence(found: Verdict, score: str) -> str:
    name = "τ" if combined.is_tau(score) else score
    if found.found_something:
        return (
            f"{found.n_candidates:,} candidates by {name}, {found.beyond:.0f} ± {found.margin:.0f} more than ID data "
            f"alone would give; an estimated {found.precision:.0%} of them are outliers."
        )
    other = "; filter.score auto may find more" if score not in (BLEND, LEARNED, COMMITTEE) else ""
    alone = f"ID data alone would give {found.expected:.0f} ± {found.margin:.0f}"
    return f"Nothing found by {name}: {found.n_candidates:,} candidates, and {alone}{other}."


def _drift_sentence(found: Verdict, drifted: list[str]) -> str:
    seen = "so many candidates may be ID data" if found.looks_like_drift else f"seen by {', '.join(drifted)}: left out"
    return (
        "The wild data differ from the labeled data as a whole, not only in outliers (another camera or file format?), "
        f"{seen}; calibrate on labeled samples from the source of the wild data."
    )


def run(workspace: Workspace, params: Params, experiment: Experiment, progress: Progress | None = None) -> Filtered:
    """Filter the wild data of one experiment, with the params of its variant."""
    params = params.for_variant(experiment.variant)
    sources = (
        id_representation(workspace, "train", experiment),
        id_representation(workspace, "calibration", experiment),
        wild_representation(workspace, experiment),
    )
    data = _Data(workspace, params, experiment, progress or Silent(), *sources)
    trials: list[Trial] = []
    own, chosen = params.filter, params.filter.score
    if chosen == AUTO:
        scores, rng = data.all_scores(), generator(experiment.seed, f"filter-auto/{experiment.ood}")
        chosen, trials = choose_score(scores, data.ranks, own.threshold_quantile, PREFERRED, rng)
    else:
        found = data.scores(chosen)
        chosen = combined.tau_name(float(own.temperature)) if chosen == TAU else chosen
        scores = {chosen: found}
    wild, calibrating = scores[chosen]
    defined = calibrating[~calibrating.isnan()]
    threshold = _threshold(defined, wild, own.threshold_quantile, own.fdr, is_released=own.calibration == "id-svd")
    is_candidate = wild > threshold
    candidates = Candidates(
        index=torch.nonzero(is_candidate).flatten().numpy(),
        wild_score=wild.numpy(),
        predicted=data.wild.predicted.numpy(),
        calibration_score=defined.numpy(),
        threshold=threshold,
        score_name=chosen,
    )
    # the truth, where it is known: after everything is decided
    is_ood = known_truth(workspace, len(wild), experiment)
    written = [workspace.target(artifact) for artifact in (experiment.candidates, experiment.filter_metrics)]
    result = Filtered(
        experiment=experiment,
        candidates=candidates,
        errors=None if is_ood is None else separation_errors(is_candidate, is_ood),
        fit=IdFit.of(data.id_train, data.calibration),
        n_unscored=len(calibrating) - len(defined),
        n_id_train=len(data.id_train),
        trials=[_diagnosed(trial, scores, is_ood) for trial in trials],
        written=written,
        protocol=protocol(own),
        notes=data.notes,
    )
    if processes().is_main:
        how = {"seed": experiment.seed, "filter": own.model_dump()}
        write_candidates(written[0], candidates, workspace.about(experiment.candidates, **how))
        write_json(written[1], as_json(_metrics(result)))
    return result


@dataclass(frozen=True)
class _Data:
    """One experiment's wild and calibrating samples, and everything that scores them. Higher = outlier."""

    workspace: Workspace
    params: Params
    experiment: Experiment
    progress: Progress
    id_train: RepresentationFile
    calibration: RepresentationFile
    wild: RepresentationFile
    notes: list[str] = field(default_factory=list)

    @cached_property
    def classifier(self) -> Classifier:
        return classifier(self.workspace, self.experiment)

    @property
    def calibrates_on_training_data(self) -> bool:
        return self.params.filter.calibration != "holdout"

    @property
    def calibrating(self) -> RepresentationFile:
        return self.id_train if self.calibrates_on_training_data else self.calibration

    @property
    def ranks(self) -> tuple[np.ndarray, np.ndarray]:
        """The wild and the calibrating samples in an order that does not depend on their rows."""
        seed = self.experiment.seed
        return combined.ranks_by_content(self.wild, seed), combined.ranks_by_content(self.calibration, seed)

    def all_scores(self) -> combined.Scores:
        """By every score that needs no pass over samples and works here; only τ has to."""
        single = self._taus() | self._post_hoc_scores()
        found = {**single, COMMITTEE: combined.committee_scores(single)}
        with self._task(BLEND, 1, "separator") as task:
            try:
                found[BLEND] = combined.blend(self.wild, self.calibration, single, self.experiment.seed)
            except ThresholdError as error:
                self.notes.append(f"auto leaves out {BLEND}: {error}")
            task.advance(1)
        return found

    def scores(self, name: str) -> tuple[Tensor, Tensor]:
        """Of the wild data, and of the ID data that the threshold is chosen on."""
        if name == TAU:
            return self._tau(float(self.params.filter.temperature))
        if name == COMMITTEE:
            return combined.committee_scores(self._post_hoc_scores())
        if name == LEARNED:
            found = self._taus() | self._post_hoc_scores()
            with self._task(LEARNED, 1, "separator") as task:
                learned = combined.learn(self.wild, self.calibration, found, self.experiment.seed)
                task.advance(1)
            return learned.wild, learned.calibration
        method = self.params.method(name)
        n_samples = len(self.wild) + len(self.calibrating)
        with self._task(name, n_samples, "samples") as task:
            if isinstance(method, InputScore):
                return self._by_input(method, task)
            pair = self._by_representation(method)
            task.advance(n_samples)
        return pair

    def _taus(self) -> dict[str, tuple[Tensor, Tensor]]:
        """At every temperature."""
        return {combined.tau_name(one): self._tau(one) for one in combined.temperatures(self.params.filter)}

    def _post_hoc_scores(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By every post-hoc score that works here."""
        asked, sources = combined.members(self.params), [self.wild, self.calibration]
        found = {}
        with self._task("post-hoc scores", len(asked), "scores") as task:
            working = combined.working_scores(self.params.filter.score, asked, self._known(), sources)
            for name, (wild, calibrating) in working:
                found[name] = wild, calibrating
                task.advance(1)
        return found

    def _task(self, name: str, total: int, unit: str) -> AbstractContextManager[Task]:
        what = "" if self.params.filter.score == TAU else f", {name}"
        return self.progress.task(f"filter, {self.experiment}{what}", total, unit)

    def _known(self) -> Known:
        head, as_given, note = Head.of(self.classifier.head), self.classifier.as_given, self.notes.append
        return Known(head, self.id_train, self.wild, self.experiment.seed, note=note, as_given=as_given)

    def _by_representation(self, method: PostHoc) -> tuple[Tensor, Tensor]:
        if not self.calibrates_on_training_data:
            wild, calibrating = combined.outlier_scores(method, self._known(), [self.wild, self.calibration])
            return wild, calibrating
        (wild,) = combined.outlier_scores(method, self._known(), [self.wild])
        return wild, combined.finite(method.name, -method.scores(self.calibrating, fitted_on=True))

    def _tau(self, temperature: float) -> tuple[Tensor, Tensor]:
        own, seed, n_classes = self.params.filter.softened(temperature), self.experiment.seed, self.wild.n_classes
        device = resolve_device(self.params.device)
        wild, id_train = unlabeled_gradients(self.wild, own, seed, "wild"), labeled_gradients(self.id_train, own)
        with self._task(combined.tau_name(temperature), n_classes, "classes") as task:
            if own.calibration == "id-svd":
                (wild_tau,) = tau(wild, [wild], id_train, n_classes, own, device, task)
                (id_tau,) = tau(id_train, [id_train], id_train, n_classes, own, device)
                return wild_tau, id_tau
            held_out = own.calibration == "holdout"
            calibrating = unlabeled_gradients(self.calibration, own, seed, "calibration") if held_out else id_train
            wild_tau, id_tau = tau(wild, [wild, calibrating], id_train, n_classes, own, device, task)
        return wild_tau, id_tau

    def _by_input(self, method: InputScore, task: Task) -> tuple[Tensor, Tensor]:
        """From the samples: needs gradients w.r.t. them."""
        part: IdPart = "train" if self.calibrates_on_training_data else "calibration"
        wild = wild_samples(self.workspace, self.params, self.experiment)
        calibrating = id_samples(self.workspace, self.params, part, self.experiment).rows
        size = self.params.extract_grads.batch_size
        with computing(self.params.device, self.params.numerics) as compute:

            def scored(rows: Rows) -> Tensor:
                outputs = outputs_of(self.classifier, method.outputs(self.classifier), rows, size, compute, task)
                return combined.finite(method.name, -method.score(outputs[0]))

            return scored(wild), scored(calibrating)


def _diagnosed(trial: Trial, scores: combined.Scores, is_ood: Tensor | None) -> Trial:
    """The trial beside the truth, where it is known."""
    if is_ood is None:
        return trial
    wild = scores[trial.score][0]
    has_both = bool(is_ood.any() and not is_ood.all())
    auroc = ood_metrics(-wild[~is_ood].numpy(), -wild[is_ood].numpy()).auroc if has_both else math.nan
    return replace(trial, errors=separation_errors(wild > trial.threshold, is_ood), auroc=auroc)


def _threshold(
    calibration: Tensor, wild: Tensor, quantile: float, fdr: float | None = None, *, is_released: bool = False
) -> float:
    if len(calibration) == 0:
        raise ThresholdError(
            "no calibration sample is predicted as a class that occurs in the wild data; use a larger calibration set"
        )
    if fdr is not None:
        return _discoveries(calibration, wild, fdr)
    threshold = (released_threshold if is_released else score_threshold)(calibration, quantile)
    if bool((wild > threshold).any()):  # all of them, where the wild data have no ID data (π = 1)
        return threshold
    largest = largest_quantile(calibration, wild)
    if largest > 0:
        half_a_rank = 0.5 / len(calibration)  # inside the range, so that rounding cannot leave it
        fix = f"values up to {largest - half_a_rank:.6g} work"
    elif bool((wild == calibration[0]).all()):
        fix = "no value works: all scores are equal, as if the classifier were certain of every sample; train it longer"
    else:
        fix = "no value works: no wild score is above any calibration score"
    raise ThresholdError(f"filter.threshold_quantile {quantile:g} leaves no candidate outliers; {fix}")


def _discoveries(calibration: Tensor, wild: Tensor, fdr: float) -> float:
    threshold = discoveries_threshold(calibration, wild, fdr)
    if threshold is not None:
        return threshold
    n, m = len(calibration), len(wild)
    needed, highest = math.ceil(m / (fdr * (n + 1))), int((wild > calibration.max()).sum())
    raise ThresholdError(
        f"filter.fdr {fdr:g} finds no candidates: p-values of {n:,} calibration samples are at least 1/{n + 1:,}, so "
        f"at least {needed:,} of {m:,} wild samples must be above all of them, and {highest:,} are; use more "
        "calibration samples, a larger fdr, another filter.score (auto), or fdr: null, which takes the quantile"
    )


def _metrics(result: Filtered) -> dict[str, Any]:
    found, trials = result.verdict, result.trials
    return {
        "protocol": result.protocol,
        "score": result.candidates.score_name,
        "threshold": result.candidates.threshold,
        "n_candidates": len(result.candidates.index),
        "n_wild": len(result.candidates.wild_score),
        "n_calibration": len(result.candidates.calibration_score) + result.n_unscored,
        "n_id_train": result.n_id_train,
        **(asdict(result.errors) if result.errors else dict.fromkeys(("err_in", "err_out", "precision"))),
        **asdict(result.fit),
        "verdict": result.sentence,
        **({"estimated": {**asdict(found), "beyond": found.beyond}} if result.protocol == HELD_OUT else {}),
        **({"notes": result.notes} if result.notes else {}),
        **({"auto": {trial.score: _trial_metrics(trial) for trial in trials}} if trials else {}),
    }


def _trial_metrics(trial: Trial) -> dict[str, Any]:
    metrics = {key: value for key, value in vars(trial).items() if key not in ("score", "errors", "auroc")}
    known = {} if trial.errors is None else {**asdict(trial.errors), "auroc": trial.auroc}
    return {**metrics, **known}
