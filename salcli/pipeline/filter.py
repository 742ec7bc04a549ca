"""filter: separate candidate outliers from the wild data (Eq. 6, 7 and Remark 2), by τ or by another score."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from salcli.engine.batches import Rows
from salcli.engine.device import computing, processes, resolve_device
from salcli.engine.inference import in_batches
from salcli.errors import ParamsError, ThresholdError
from salcli.methods.base import Head, InputScore, Known, find_method
from salcli.methods.sal import TAU, labeled, tau, unlabeled
from salcli.models.network import Classifier
from salcli.params.schema import AUTO, Params, separators
from salcli.pipeline.inputs import (
    IdPart,
    classifier,
    id_representation,
    id_samples,
    known_truth,
    wild_representation,
    wild_samples,
)
from salcli.progress import Progress, Silent, Task
from salcli.sal.filter import SeparationErrors, score_threshold, separation_errors, working_quantiles
from salcli.sal.metrics import ood_metrics
from salcli.sal.seeding import generator
from salcli.sal.unlabeled import chosen_score, excess, resampled_excess, wins_over_first
from salcli.store.files import write_json
from salcli.store.formats import Candidates, RepresentationFile, write_candidates
from salcli.store.layout import Experiment, Workspace

# Below this accuracy on held-out ID data τ was seen to separate no better than chance (docs/method.md).
ACCURACY_THE_THEORY_NEEDS = 0.9
Scores = dict[str, tuple[Tensor, Tensor]]  # outlier scores of wild and of calibrating samples, by the score's name


@dataclass(frozen=True)
class IdFit:
    """How well the classifier fits the ID data: τ separates only where the ID risk is small."""

    train_risk: float  # mean cross-entropy
    train_accuracy: float
    calibration_accuracy: float

    @property
    def is_poor(self) -> bool:
        return min(self.train_accuracy, self.calibration_accuracy) < ACCURACY_THE_THEORY_NEEDS


@dataclass(frozen=True)
class Trial:
    """One score on the wild data. `errors` and `auroc` are known only where the truth is, and only afterwards."""

    score: str
    threshold: float
    n_candidates: int
    excess: float
    excess_std: float  # of the bootstrap
    wins_over_tau: float  # the share of resamples in which its excess is larger than τ's
    errors: SeparationErrors | None = None
    auroc: float = math.nan


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


def run(workspace: Workspace, params: Params, experiment: Experiment, progress: Progress | None = None) -> Filtered:
    """Filter the wild data of one experiment, with the params of its variant."""
    params = params.for_variant(experiment.variant)
    data = _Data(workspace, params, experiment, progress or Silent())
    trials: list[Trial] = []
    quantile, chosen = params.filter.threshold_quantile, params.filter.score
    if chosen == AUTO:
        scores = data.all_scores()
        chosen, trials = compare(scores, quantile, experiment)
    else:
        scores = {chosen: data.scores(chosen)}
    wild, calibrating = scores[chosen]
    defined = calibrating[~calibrating.isnan()]
    threshold = _threshold(defined, wild, quantile)
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
        fit=id_fit(data.id_train, data.calibration),
        n_unscored=len(calibrating) - len(defined),
        n_id_train=len(data.id_train),
        trials=[_diagnosed(trial, scores, is_ood) for trial in trials],
        written=written,
    )
    if processes().is_main:
        how = {"seed": experiment.seed, "filter": params.filter.model_dump()}
        write_candidates(written[0], candidates, workspace.about(experiment.candidates, **how))
        write_json(written[1], _metrics(result))
    return result


@dataclass(frozen=True)
class _Data:
    """One experiment's wild and calibrating samples, and everything that scores them. Higher = outlier."""

    workspace: Workspace
    params: Params
    experiment: Experiment
    progress: Progress

    @cached_property
    def id_train(self) -> RepresentationFile:
        return id_representation(self.workspace, "train", self.experiment)

    @cached_property
    def calibration(self) -> RepresentationFile:
        return id_representation(self.workspace, "calibration", self.experiment)

    @cached_property
    def wild(self) -> RepresentationFile:
        return wild_representation(self.workspace, self.experiment)

    @cached_property
    def classifier(self) -> Classifier:
        return classifier(self.workspace, self.experiment)

    @property
    def calibrates_on_training_data(self) -> bool:
        return self.params.filter.calibration != "holdout"

    @property
    def calibrating(self) -> RepresentationFile:
        return self.id_train if self.calibrates_on_training_data else self.calibration

    def all_scores(self) -> Scores:
        """By every score that needs no pass over samples and works here; only τ has to."""
        found = {TAU: self.scores(TAU)}
        for name in separators()[1:]:
            if issubclass(find_method(name), InputScore):
                continue
            try:
                found[name] = self.scores(name)
            except (ThresholdError, ParamsError) as error:
                with self.progress.task(f"filter, {self.experiment}", 1, "scores") as task:
                    task.note(f"auto leaves out {name}: {error}")
                    task.advance(1)
        return found

    def scores(self, name: str) -> tuple[Tensor, Tensor]:
        """Of the wild data, and of the ID data that the threshold is chosen on."""
        n_samples = len(self.wild) + len(self.calibrating)
        total = (self.wild.n_classes, "classes") if name == TAU else (n_samples, "samples")
        what = "" if self.params.filter.score == TAU else f", {name}"
        with self.progress.task(f"filter, {self.experiment}{what}", *total) as task:
            if name == TAU:
                return self._tau(task)
            method = self.params.method(name)
            if isinstance(method, InputScore):
                wild, calibrating = self._by_input(method, task)
            else:
                head = Head.of(self.classifier.head)
                method.fit(Known(head, self.id_train, seed=self.experiment.seed, note=task.note))
                wild = -method.scores(self.wild)
                calibrating = -method.scores(self.calibrating, fitted_on=self.calibrates_on_training_data)
                task.advance(n_samples)
        for score in (wild, calibrating):
            if n_undefined := int((~score.isfinite()).sum()):
                raise ThresholdError(
                    f"{name} gives NaN or infinity for {n_undefined} of {len(score)} samples; use another score"
                )
        return wild, calibrating

    def _tau(self, task: Task) -> tuple[Tensor, Tensor]:
        own, seed, n_classes = self.params.filter, self.experiment.seed, self.wild.n_classes
        device = resolve_device(self.params.device)
        wild, id_train = unlabeled(self.wild, own, seed, "wild"), labeled(self.id_train, own)
        if own.calibration == "id-svd":
            (wild_tau,) = tau(wild, [wild], id_train, n_classes, own, device, task)
            (id_tau,) = tau(id_train, [id_train], id_train, n_classes, own, device)
            return wild_tau, id_tau
        held_out = own.calibration == "holdout"
        calibrating = unlabeled(self.calibration, own, seed, "calibration") if held_out else id_train
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
                outputs = method.outputs(self.classifier)
                batches = in_batches(self.classifier, outputs, rows, size, compute, task)
                return -method.score(torch.cat([batch for (batch,) in batches]))

            return scored(wild), scored(calibrating)


def id_fit(id_train: RepresentationFile, calibration: RepresentationFile) -> IdFit:
    """Read off the stored logits."""
    losses = [cross_entropy(chunk.logits.double(), chunk.label, reduction="sum") for chunk in id_train.chunks()]
    return IdFit(
        train_risk=float(sum(losses)) / len(id_train),
        train_accuracy=float((id_train.predicted == id_train.label).double().mean()),
        calibration_accuracy=float((calibration.predicted == calibration.label).double().mean()),
    )


def compare(scores: Scores, quantile: float, experiment: Experiment) -> tuple[str, list[Trial]]:
    """The score to separate with, and the trials of all. The first one stays unless another surely finds more."""
    wild, calibrating = (torch.stack([pair[side] for pair in scores.values()]) for side in (0, 1))
    observed = torch.tensor(
        [excess(calibrating[row], wild[row], quantile) for row in range(len(wild))], dtype=torch.float64
    )
    rng = generator(experiment.seed, f"filter-auto/{experiment.ood}")
    resampled = resampled_excess(calibrating, wild, quantile, rng)
    wins, spread = wins_over_first(resampled), resampled.std(dim=0)
    trials = []
    for row, name in enumerate(scores):
        defined = calibrating[row][~calibrating[row].isnan()]
        threshold = score_threshold(defined, quantile) if len(defined) else torch.inf
        n_candidates = int((wild[row] > threshold).sum())
        trials.append(Trial(name, threshold, n_candidates, float(observed[row]), float(spread[row]), float(wins[row])))
    usable = torch.tensor([0 < trial.n_candidates < wild.shape[1] for trial in trials])
    return trials[chosen_score(observed, wins, usable)].score, trials


def _diagnosed(trial: Trial, scores: Scores, is_ood: Tensor | None) -> Trial:
    """The trial beside the truth, where it is known."""
    if is_ood is None:
        return trial
    wild = scores[trial.score][0]
    has_both = bool(is_ood.any() and not is_ood.all())
    auroc = ood_metrics(-wild[~is_ood].numpy(), -wild[is_ood].numpy()).auroc if has_both else math.nan
    return Trial(**{**vars(trial), "errors": separation_errors(wild > trial.threshold, is_ood), "auroc": auroc})


def _threshold(calibration: Tensor, wild: Tensor, quantile: float) -> float:
    if len(calibration) == 0:
        raise ThresholdError(
            "no calibration sample is predicted as a class that occurs in the wild data; use a larger calibration set"
        )
    threshold = score_threshold(calibration, quantile)
    n_candidates = int((wild > threshold).sum())
    if 0 < n_candidates < len(wild):
        return threshold
    outcome = "no candidate outliers" if n_candidates == 0 else "nothing but candidate outliers"
    working = working_quantiles(calibration, wild)
    half_a_rank = 0.5 / len(calibration)  # inside the range, so that rounding cannot leave it
    fix = (
        f"values from {working[0] + half_a_rank:.6g} to {working[1] - half_a_rank:.6g} work"
        if working
        else "no value works: wild and calibration scores do not overlap"
    )
    raise ThresholdError(f"filter.threshold_quantile {quantile:g} leaves {outcome}; {fix}")


def _metrics(result: Filtered) -> dict[str, Any]:
    errors = asdict(result.errors) if result.errors else {"err_in": None, "err_out": None}
    metrics = {
        "score": result.candidates.score_name,
        "threshold": result.candidates.threshold,
        "n_candidates": len(result.candidates.index),
        "n_wild": len(result.candidates.wild_score),
        "n_calibration": len(result.candidates.calibration_score) + result.n_unscored,
        "n_id_train": result.n_id_train,
        **errors,
        **asdict(result.fit),
    }
    if not result.trials:
        return metrics
    return {**metrics, "auto": {trial.score: _trial_metrics(trial) for trial in result.trials}}


def _trial_metrics(trial: Trial) -> dict[str, Any]:
    metrics = {key: value for key, value in vars(trial).items() if key not in ("score", "errors", "auroc")}
    return metrics if trial.errors is None else {**metrics, **asdict(trial.errors), "auroc": trial.auroc}
