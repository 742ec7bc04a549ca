"""theory: what the theorems are about, measured on stored gradients (Definitions 2 and 3, Theorems 1, 2 and 4)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from salcli.methods.features import Neighbours
from salcli.methods.logits import msp
from salcli.methods.sal import TAU
from salcli.params.schema import Params
from salcli.pipeline.inputs import id_representation, known_truth, wild_representation
from salcli.progress import Progress, Silent
from salcli.sal.filter import class_agnostic_scores, reference_gradients
from salcli.sal.gradients import Gradients, Representation
from salcli.sal.theory import (
    Discrepancy,
    ErrorCurve,
    discrepancy,
    error_curve,
    estimated_error_curve,
    gradient_moments,
    outlier_mean_bound,
    required_discrepancy,
)
from salcli.sal.unlabeled import MixtureEstimate, estimated_share
from salcli.store.files import read_header, write_json
from salcli.store.formats import Candidates, RepresentationFile, read_candidates
from salcli.store.layout import Experiment, Workspace

POINTS_OF_A_CURVE = 200


@dataclass(frozen=True)
class Truth:
    """What only an experiment can know, because it mixed the wild data itself. NaN where a side is empty."""

    pi: float
    mean_tau_id: float  # Theorem 4, with the τ of Eq. 4–7: one ∇̄ and one v for all classes
    mean_tau_ood: float
    errors: ErrorCurve  # of the filter's own scores
    is_ood: Tensor


@dataclass(frozen=True)
class TheoryCheck:
    """The theorems' quantities for one experiment. `truth` is None where it is not known."""

    experiment: Experiment
    held_out: Discrepancy  # P_in: calibration data
    on_training_data: Discrepancy  # P_in: training data
    mixture: MixtureEstimate
    mean_tau: float  # of all wild data
    estimated: ErrorCurve | None  # None where the filter's calibration scores are not those of held-out data
    truth: Truth | None
    candidates: Candidates
    written: list[Path]

    @property
    def pi(self) -> float:
        """The true share of OOD data, or the estimated one if the truth is not known."""
        return self.truth.pi if self.truth else self.mixture.pi

    @property
    def required(self) -> float:
        """What ζ has to reach (Theorem 2)."""
        return required_discrepancy(self.pi)

    @property
    def condition_holds(self) -> bool:
        """Judged without the noise, which would help small samples to pass."""
        return self.held_out.without_noise >= self.required

    @property
    def bound(self) -> float:
        """Theorem 4's bound on the mean τ of wild OOD data, in the limit."""
        return outlier_mean_bound(self.held_out.without_noise, self.pi) if self.pi > 0 else math.nan

    def errors_at_threshold(self, curve: ErrorCurve | None) -> tuple[float, float] | None:
        """ERR_in and ERR_out at the filter's own T, which is one of every curve's points."""
        if curve is None:
            return None
        at = int(torch.searchsorted(curve.threshold, self.candidates.threshold))
        return float(curve.err_in[at]), float(curve.err_out[at])


def run(workspace: Workspace, params: Params, experiment: Experiment, progress: Progress | None = None) -> TheoryCheck:
    """Measure one experiment. Everything but `truth` is computed before the truth is read."""
    id_train, calibration = (id_representation(workspace, part, experiment) for part in ("train", "calibration"))
    wild, found = wild_representation(workspace, experiment), workspace.find(experiment.candidates)
    candidates, is_held_out = read_candidates(found), _scores_held_out_data(read_header(found).about["filter"])
    with (progress or Silent()).task(f"theory, {experiment}", 3, "steps") as task:
        on_training, on_held_out, on_wild = (
            gradient_moments(Gradients(source, source.predicted)) for source in (id_train, calibration, wild)
        )
        task.advance(1)
        scores = _outlier_scores(id_train, calibration, wild, params.methods.of("knn").k)
        if is_held_out:
            name = "τ" if candidates.score_name == TAU else f"filter's {candidates.score_name}"
            scores[name] = torch.from_numpy(candidates.calibration_score), torch.from_numpy(candidates.wild_score)
        mixture = estimated_share(scores)
        task.advance(1)
        reference = reference_gradients(Gradients(id_train, id_train.label), wild.n_classes, class_conditional=False)
        gradients = Gradients(wild, wild.predicted)
        (tau,) = class_agnostic_scores(gradients, [gradients], reference, n_vectors=1)
        task.advance(1)
    threshold, filter_score = _thresholds(candidates), torch.from_numpy(candidates.wild_score)
    estimated = None
    if is_held_out:
        calibration_score = torch.from_numpy(candidates.calibration_score)
        estimated = estimated_error_curve(filter_score, calibration_score, mixture.pi, threshold)
    result = TheoryCheck(
        experiment=experiment,
        held_out=discrepancy(on_held_out, on_wild),
        on_training_data=discrepancy(on_training, on_wild),
        mixture=mixture,
        mean_tau=float(tau.mean()),
        estimated=estimated,
        truth=_truth(known_truth(workspace, len(tau), experiment), filter_score, tau, threshold),
        candidates=candidates,
        written=[workspace.target(experiment.theory("json"))],
    )
    write_json(result.written[0], _metrics(result))
    return result


def _scores_held_out_data(filtered_with: dict[str, str]) -> bool:
    """Whether the filter's calibration scores are of held-out data, treated just as the wild data are."""
    alike = filtered_with["labels"] == "predicted" or filtered_with["score"] != TAU
    return filtered_with["calibration"] == "holdout" and alike


def _outlier_scores(
    id_train: RepresentationFile, calibration: RepresentationFile, wild: RepresentationFile, knn_k: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Scores of held-out ID and of wild data; higher = outlier."""
    known = torch.cat([chunk.feature for chunk in id_train.chunks()])
    nearest = Neighbours.of(known, min(knn_k, len(known))).score

    def pair(score: Callable[[Representation], Tensor]) -> tuple[Tensor, Tensor]:
        held_out, in_the_wild = (
            torch.cat([-score(chunk) for chunk in source.chunks()]) for source in (calibration, wild)
        )
        return held_out, in_the_wild

    return {"MSP": pair(lambda x: msp(x.logits)), "KNN": pair(lambda x: nearest(x.feature))}


def _thresholds(candidates: Candidates) -> Tensor:
    """Quantiles of all scores, so that no part of the curve is empty, and the T that the filter chose."""
    scores = np.concatenate([candidates.wild_score, candidates.calibration_score])
    at = np.quantile(scores, np.linspace(0, 1, POINTS_OF_A_CURVE), method="inverted_cdf")
    return torch.from_numpy(np.unique(np.append(at, candidates.threshold)))


def _truth(is_ood: Tensor | None, filter_score: Tensor, tau: Tensor, threshold: Tensor) -> Truth | None:
    if is_ood is None:
        return None
    return Truth(
        pi=float(is_ood.double().mean()),
        mean_tau_id=float(tau[~is_ood].mean()),
        mean_tau_ood=float(tau[is_ood].mean()),
        errors=error_curve(filter_score, is_ood, threshold),
        is_ood=is_ood,
    )


def _metrics(result: TheoryCheck) -> dict[str, object]:
    truth = result.truth
    return {
        "zeta": result.held_out.zeta,
        "zeta_noise": result.held_out.noise,
        "zeta_without_noise": result.held_out.without_noise,
        "zeta_on_training_data": result.on_training_data.zeta,
        "required": result.required,
        "condition_holds": result.condition_holds,
        "pi": truth.pi if truth else None,
        "pi_estimate": asdict(result.mixture),
        "mean_tau": result.mean_tau,
        "mean_tau_id": _number(truth.mean_tau_id) if truth else None,
        "mean_tau_ood": _number(truth.mean_tau_ood) if truth else None,
        "mean_tau_ood_bound": _number(result.bound),
        "threshold": result.candidates.threshold,
        "errors": _curve(truth.errors) if truth else None,
        "errors_estimated": _curve(result.estimated) if result.estimated else None,
    }


def _curve(curve: ErrorCurve) -> dict[str, list[float | None]]:
    return {name: [_number(value) for value in values.tolist()] for name, values in vars(curve).items()}


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value
