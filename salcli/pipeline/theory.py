"""theory: what the theorems are about, measured on stored gradients (Definitions 2 and 3, Theorems 1, 2 and 4)."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from salcli.conformal.evidence import Share, share_of_outliers, threshold
from salcli.errors import ParamsError
from salcli.methods.base import Known
from salcli.methods.sal import COMMITTEE, TAU
from salcli.params.schema import Params
from salcli.pipeline.loading import classifier, id_representation, known_truth, wild_representation
from salcli.progress import Progress, Silent
from salcli.sal import theory as theorems
from salcli.sal.gradients import Gradients
from salcli.sal.metrics import ID_QUANTILE
from salcli.sal.seeding import generator
from salcli.sal.spectrum import CentredGradients, top_directions
from salcli.sal.tau import reference_gradients
from salcli.store.files import as_json, read_header, write_json
from salcli.store.formats import Candidates, RepresentationFile, read_candidates
from salcli.store.layout import Experiment, Workspace

POINTS_OF_A_CURVE = 200
MOST_ROWS = 10_000  # of each side of the pairwise distances: more only cost time
MOST_DOTS = 1_500  # of the figure of gradients


@dataclass(frozen=True)
class Truth:
    """What only an experiment can know, because it mixed the wild data itself. NaN where a side is empty."""

    pi: float
    mean_tau_id: float
    mean_tau_ood: float
    err_out: float  # of that τ at its T
    errors: theorems.ErrorCurve  # of the filter's own scores
    is_ood: Tensor


@dataclass(frozen=True)
class Tau:
    """τ of Eq. 4–7, which the theorems are about: one ∇̄ and one v for all classes. Without the truth."""

    mean: float  # of all wild data
    mean_held_out: float
    largest: float  # of the wild data; stands for M′
    threshold: float  # the filter's quantile of held-out τ


@dataclass(frozen=True)
class Outliers:
    """Wild gradients around ∇̄ and v (Figure 1), with the outliers on the positive side of v."""

    view: theorems.GradientView
    is_outlier: Tensor  # the truth or, where it is not known, τ > T
    means: theorems.GradientView  # of outliers, of the others
    by_truth: bool


@dataclass(frozen=True)
class TheoryCheck:
    """The theorems' quantities for one experiment. `truth` is None where it is not known."""

    experiment: Experiment
    held_out: theorems.Discrepancy  # Definition 2
    pairwise: float  # what the authors' code calls ζ: training data against wild data
    pairwise_id: float  # the same against held-out ID data: its value at π = 0
    share: Share  # π̂ by the committee, without the truth
    tau: Tau
    outliers: Outliers | None  # None where the gradients do not spread
    estimated: theorems.ErrorCurve | None  # None where the filter's calibration scores are not those of held-out data
    truth: Truth | None
    candidates: Candidates
    written: list[Path]

    @property
    def pi(self) -> float:
        """The true share of OOD data, or the estimated one if the truth is not known."""
        return self.truth.pi if self.truth else self.share.value

    @property
    def required(self) -> float:
        """What ζ has to reach (Theorem 2)."""
        return theorems.required_discrepancy(self.pi)

    @property
    def condition_holds(self) -> bool:
        """Judged without the noise, which would help small samples to pass."""
        return self.held_out.without_noise >= self.required

    @property
    def least_mean(self) -> float:
        """Theorem 4's bound on the mean τ of wild OOD data, in the limit."""
        return theorems.outlier_mean_bound(self.held_out.without_noise, self.pi) if self.pi > 0 else math.nan

    @property
    def mean_tau_ood(self) -> float:
        """Measured where the truth is known, else what held-out ID data leave of the mean of all wild data."""
        if self.truth:
            return self.truth.mean_tau_ood
        left = self.tau.mean - (1 - self.pi) * self.tau.mean_held_out
        return left / self.pi if self.pi > 0 else math.nan

    @property
    def err_out_bounds(self) -> dict[str, float]:
        """On the ERR_out of τ: Theorem 1's δ(T) as printed, and corrected, by ζ and by the mean τ of outliers."""
        tau = self.tau
        return {
            "printed": theorems.printed_main_error(self.least_mean, tau.largest, tau.threshold),
            "by_zeta": theorems.missed_bound(self.least_mean, tau.largest, tau.threshold),
            "by_mean": theorems.missed_bound(self.mean_tau_ood, tau.largest, tau.threshold),
        }

    def errors_at_threshold(self, *, estimated: bool) -> tuple[float, float, float] | None:
        """ERR_in, ERR_out and contamination at the filter's own T, which is one of every curve's points."""
        curve = self.estimated if estimated else self.truth.errors if self.truth else None
        if curve is None:
            return None
        at = int(torch.searchsorted(curve.threshold, self.candidates.threshold))
        err_in, share = float(curve.err_in[at]), len(self.candidates.index) / len(self.candidates.wild_score)
        contaminated = theorems.contamination(err_in, self.share.value if estimated else self.pi, share)
        return err_in, float(curve.err_out[at]), contaminated


def run(workspace: Workspace, params: Params, experiment: Experiment, progress: Progress | None = None) -> TheoryCheck:
    """Measure one experiment. Everything but `truth` is computed before the truth is read."""
    id_train, calibration = (id_representation(workspace, part, experiment) for part in ("train", "calibration"))
    if len(calibration) == 0:
        raise ParamsError(
            "theory compares wild with held-out ID data, and there are none; set data.id_shares.calibration above 0"
        )
    wild, found = wild_representation(workspace, experiment), workspace.find(experiment.candidates)
    candidates, filtered_with = read_candidates(found), read_header(found).about["filter"]
    filter_score, calibration_score = map(torch.from_numpy, (candidates.wild_score, candidates.calibration_score))
    # whether the filter's calibration scores are of held-out data, treated just as the wild data are
    alike = filtered_with["labels"] == "predicted" or filtered_with["score"] != TAU
    is_held_out = filtered_with["calibration"] == "holdout" and alike
    with (progress or Silent()).task(f"theory, {experiment}", 4, "steps") as task:
        on_held_out, on_wild = (theorems.gradient_moments(Gradients(one, one.predicted)) for one in (calibration, wild))
        task.advance(1)
        labeled = _label_rows(id_train, id_train.label, experiment)
        pairwise, pairwise_id = (
            theorems.mean_pairwise_distance(labeled, _label_rows(one, one.predicted, experiment))
            for one in (wild, calibration)
        )
        task.advance(1)
        network = classifier(workspace, experiment)
        known = Known.of(network, id_train, wild=wild, calibration=calibration, seed=experiment.seed)
        committee = known.scores(params.method(COMMITTEE), calibration, wild)
        share = share_of_outliers(*(one.numpy() for one in committee))
        task.advance(1)
        reference = reference_gradients(Gradients(id_train, id_train.label), wild.n_classes, class_conditional=False)
        G, held_out = (CentredGradients(Gradients(one, one.predicted), reference) for one in (wild, calibration))
        v = top_directions([(G, 1.0)], 1)
        wild_tau, held_out_tau = (one.project(v).square().sum(dim=1) for one in (G, held_out))
        tau = Tau(
            mean=float(wild_tau.mean()),
            mean_held_out=float(held_out_tau.mean()),
            largest=float(wild_tau.max()),
            threshold=threshold(held_out_tau.numpy(), 1 - (filtered_with["threshold_quantile"] or ID_QUANTILE)),
        )
        view = theorems.GradientView.of(G, v) if len(v) else None
        task.advance(1)
    thresholds, estimated = _thresholds(candidates), None
    if is_held_out:
        estimated = theorems.estimated_error_curve(filter_score, calibration_score, share.value, thresholds)
    is_ood = known_truth(workspace, len(wild), experiment)
    truth = None
    if is_ood is not None:
        truth = Truth(
            pi=float(is_ood.double().mean()),
            mean_tau_id=float(wild_tau[~is_ood].mean()),
            mean_tau_ood=float(wild_tau[is_ood].mean()),
            err_out=float((wild_tau[is_ood] <= tau.threshold).double().mean()),
            errors=theorems.error_curve(filter_score, is_ood, thresholds),
            is_ood=is_ood,
        )
    result = TheoryCheck(
        experiment=experiment,
        held_out=theorems.discrepancy(on_held_out, on_wild),
        pairwise=pairwise,
        pairwise_id=pairwise_id,
        share=share,
        tau=tau,
        outliers=_outliers(G, v, view, wild_tau > tau.threshold, is_ood) if view else None,
        estimated=estimated,
        truth=truth,
        candidates=candidates,
        written=[workspace.target(experiment.theory("json"))],
    )
    write_json(result.written[0], as_json(_metrics(result)))
    return result


def _label_rows(source: RepresentationFile, label: Tensor, experiment: Experiment) -> Tensor:
    """Gradients as in the authors' code, n × D: of each sample only the row of its label. A sample of many."""
    n = len(source)
    drawn = generator(experiment.seed, f"theory, pairwise, {n}").permutation(n)[:MOST_ROWS]
    rows = torch.from_numpy(np.sort(drawn))
    gradients = Gradients(source.take(rows), label[rows], label_row_only=True)
    return torch.cat([chunk.dense() for chunk in gradients.chunks()])


def _outliers(
    wild: CentredGradients, v: Tensor, view: theorems.GradientView, above: Tensor, is_ood: Tensor | None
) -> Outliers:
    is_outlier = above if is_ood is None else is_ood
    means = theorems.GradientView.of_means(wild, v, torch.stack([is_outlier, ~is_outlier]))
    sign = -1 if means.along[0] < 0 else 1  # that of v is arbitrary
    view, means = (replace(one, along=sign * one.along) for one in (view, means))
    return Outliers(view, is_outlier, means, by_truth=is_ood is not None)


def _thresholds(candidates: Candidates) -> Tensor:
    """Quantiles of all scores, so that no part of the curve is empty, and the T that the filter chose."""
    scores = np.concatenate([candidates.wild_score, candidates.calibration_score])
    at = np.quantile(scores, np.linspace(0, 1, POINTS_OF_A_CURVE), method="inverted_cdf")
    return torch.from_numpy(np.unique(np.append(at, candidates.threshold)))


def _metrics(result: TheoryCheck) -> dict[str, object]:
    truth, errors = result.truth, result.errors_at_threshold(estimated=False)
    return {
        "zeta": result.held_out.zeta,
        "zeta_noise": result.held_out.noise,
        "zeta_without_noise": result.held_out.without_noise,
        "zeta_pairwise": result.pairwise,
        "zeta_pairwise_id": result.pairwise_id,
        "required": result.required,
        "condition_holds": result.condition_holds,
        "pi": truth.pi if truth else None,
        "pi_estimate": asdict(result.share),
        "tau": asdict(result.tau),
        "mean_tau_id": truth.mean_tau_id if truth else None,
        "mean_tau_ood": truth.mean_tau_ood if truth else None,
        "mean_tau_ood_bound": result.least_mean,
        "tau_err_out": truth.err_out if truth else None,
        "tau_err_out_bound": result.err_out_bounds,
        "threshold": result.candidates.threshold,
        "contamination": errors[2] if errors else None,
        "errors": vars(truth.errors) if truth else None,
        "errors_estimated": vars(result.estimated) if result.estimated else None,
        "gradients": _dots(result.outliers, result.experiment) if result.outliers else None,
    }


def _dots(outliers: Outliers, experiment: Experiment) -> dict[str, object]:
    """What a figure of the gradients needs: a sample of them, and the two means."""
    n, view, means = len(outliers.is_outlier), outliers.view, outliers.means
    rows = torch.from_numpy(generator(experiment.seed, "theory, dots").permutation(n)[:MOST_DOTS])
    along, across = ([float(f"{value:.4g}") for value in part[rows].tolist()] for part in (view.along, view.across))
    return {
        "along": along,
        "across": across,
        "is_outlier": outliers.is_outlier[rows],
        "means": {"along": means.along, "across": means.across, "angle": means.angle},
        "by_truth": outliers.by_truth,
    }
