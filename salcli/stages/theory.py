"""theory: what the theorems speak of, measured on stored gradients (Definitions 2 and 3, Theorems 1, 2 and 4)."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from salcli.artifacts import layout
from salcli.artifacts.atomic import write_text
from salcli.artifacts.candidates import Candidates, read_candidates, read_filter_params
from salcli.artifacts.gradients import GradientFile
from salcli.errors import BadArtifactError
from salcli.progress import Silent
from salcli.rivals.feature_scores import knn
from salcli.sal.mixture import MixtureEstimate, estimated_share
from salcli.sal.scores import class_agnostic_scores, reference_gradients
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
from salcli.stages.diagnosis import known_truth

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from salcli.artifacts.layout import Workspace
    from salcli.params import Params
    from salcli.progress import Progress

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

    ood: str
    seed: int
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
        """The true share of OOD data, or where nobody knows it the estimated one."""
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


@dataclass(frozen=True)
class _Inputs:
    id_train: GradientFile
    calibration: GradientFile
    wild: GradientFile
    candidates: Candidates
    scores_of_held_out: bool  # whether calibration_score is of held-out data, treated just as the wild data are


def run(workspace: Workspace, params: Params, ood: str, seed: int, progress: Progress | None = None) -> TheoryCheck:
    """Measure one experiment. All but `truth` is computed before the truth is looked at."""
    inputs = _open(workspace, ood, seed)
    with (progress or Silent()).task(f"theory, {ood}, seed {seed}", 3, "steps") as task:
        training, held_out, wild = (
            gradient_moments(file.relabelled(file.predicted))
            for file in (inputs.id_train, inputs.calibration, inputs.wild)
        )
        task.advance(1)
        mixture = estimated_share(_outlier_scores(inputs, params.evaluate.knn_k))
        task.advance(1)
        reference = reference_gradients(inputs.id_train, inputs.wild.n_classes, class_conditional=False)
        (tau,) = class_agnostic_scores(inputs.wild, [inputs.wild], reference, n_vectors=1)
        task.advance(1)
    candidates = inputs.candidates
    threshold = _thresholds(candidates)
    filter_score = torch.from_numpy(candidates.wild_score)
    estimated = None
    if inputs.scores_of_held_out:
        calibration_score = torch.from_numpy(candidates.calibration_score)
        estimated = estimated_error_curve(filter_score, calibration_score, mixture.pi, threshold)
    result = TheoryCheck(
        ood=ood,
        seed=seed,
        held_out=discrepancy(held_out, wild),
        on_training_data=discrepancy(training, wild),
        mixture=mixture,
        mean_tau=float(tau.mean()),
        estimated=estimated,
        truth=_truth(workspace, filter_score, tau, threshold, ood, seed),
        candidates=candidates,
        written=[workspace.target(layout.theory_metrics(ood, seed))],
    )
    write_text(result.written[0], json.dumps(_metrics(result), indent=2) + "\n")
    return result


def _open(workspace: Workspace, ood: str, seed: int) -> _Inputs:
    places = (
        layout.id_gradients("train", seed),
        layout.id_gradients("calibration", seed),
        layout.wild_gradients(ood, seed),
    )
    files = [GradientFile.open(workspace.find(place)) for place in places]
    found = workspace.find(layout.candidates(ood, seed))
    candidates = read_candidates(found)
    for file in files:
        if file.network != candidates.network:
            raise BadArtifactError(
                f"{file.found.path} was made with network {file.network}, {found.path} with {candidates.network}; "
                f"make both again: salcli extract-grads --ood {ood} --seed {seed}, then {found.made_by}"
            )
    if files[2].wild != candidates.wild:
        raise BadArtifactError(f"{found.path} and {files[2].found.path} are of different wild data; {found.cure}")
    filtered_with = read_filter_params(found)
    labels_matter = candidates.score_name == "sal"
    alike = filtered_with["labels"] == "predicted" or not labels_matter
    held_out = filtered_with["calibration"] == "holdout" and alike
    return _Inputs(files[0], files[1], files[2], candidates, scores_of_held_out=held_out)


def _outlier_scores(inputs: _Inputs, knn_k: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Scores that the stored factors give, of held-out ID and of wild data; higher = outlier."""
    train = torch.cat([chunk.feature for chunk in inputs.id_train.chunks()])
    k = min(knn_k, len(train))

    def distance(file: GradientFile) -> Tensor:
        return torch.cat([-knn(chunk.feature, train, k) for chunk in file.chunks()])

    scores = {
        "MSP": (_uncertainty(inputs.calibration), _uncertainty(inputs.wild)),
        "KNN": (distance(inputs.calibration), distance(inputs.wild)),
    }
    if inputs.scores_of_held_out:
        candidates = inputs.candidates
        name = "τ" if candidates.score_name == "sal" else f"filter's {candidates.score_name}"
        scores[name] = torch.from_numpy(candidates.calibration_score), torch.from_numpy(candidates.wild_score)
    return scores


def _uncertainty(file: GradientFile) -> Tensor:
    """1 − max softmax: with the predicted label, minus the residual at the label."""
    chunks = file.relabelled(file.predicted).chunks()
    return torch.cat([-chunk.residual.gather(1, chunk.label[:, None]).squeeze(1) for chunk in chunks])


def _thresholds(candidates: Candidates) -> Tensor:
    """Quantiles of all scores, so that no part of the curve is empty, and the T that the filter chose."""
    scores = np.concatenate([candidates.wild_score, candidates.calibration_score])
    at = np.quantile(scores, np.linspace(0, 1, POINTS_OF_A_CURVE), method="inverted_cdf")
    return torch.from_numpy(np.unique(np.append(at, candidates.threshold)))


def _truth(
    workspace: Workspace, filter_score: Tensor, tau: Tensor, threshold: Tensor, ood: str, seed: int
) -> Truth | None:
    """For diagnosis, where the truth is known."""
    is_ood = known_truth(workspace, len(tau), ood, seed)
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
    """JSON knows no NaN."""
    return None if math.isnan(value) else value
