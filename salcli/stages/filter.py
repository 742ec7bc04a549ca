"""filter: separate candidate outliers from the wild data (Eq. 6, 7 and Remark 2)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from salcli.artifacts import layout
from salcli.artifacts.atomic import write_text
from salcli.artifacts.candidates import Candidates, write_candidates
from salcli.artifacts.gradients import GradientFile
from salcli.compute.processes import processes
from salcli.errors import BadArtifactError, ThresholdError
from salcli.progress import Silent
from salcli.sal.scores import gradnorm_outlier_scores
from salcli.sal.threshold import SeparationErrors, score_threshold, separation_errors, working_quantiles
from salcli.stages.diagnosis import known_truth
from salcli.stages.tau import tau, unlabeled

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from salcli.artifacts.layout import Workspace
    from salcli.params import FilterParams
    from salcli.progress import Progress, Task

# Below this accuracy on held-out ID data τ was seen to separate no better than chance (docs/method.md).
ACCURACY_THE_THEORY_NEEDS = 0.9


@dataclass(frozen=True)
class IdFit:
    """How well the classifier fits the ID data: τ separates only where the ID risk is small."""

    train_risk: float  # mean cross-entropy
    train_accuracy: float
    calibration_accuracy: float

    @property
    def is_poor(self) -> bool:
        """Whether the theory promises little."""
        return min(self.train_accuracy, self.calibration_accuracy) < ACCURACY_THE_THEORY_NEEDS


@dataclass(frozen=True)
class Filtered:
    """The outcome. `errors` is None where the truth about the wild data is not known."""

    ood: str
    seed: int
    candidates: Candidates
    errors: SeparationErrors | None
    fit: IdFit
    n_unscored: int  # calibration samples of classes that the wild data lacks
    n_id_train: int
    written: list[Path]


@dataclass(frozen=True)
class _Gradients:
    id_train: GradientFile
    calibration: GradientFile
    wild: GradientFile


def run(workspace: Workspace, params: FilterParams, ood: str, seed: int, progress: Progress | None = None) -> Filtered:
    """Filter the wild data of one experiment."""
    gradients = _open(workspace, ood, seed)
    mixture = gradients.wild.wild
    with (progress or Silent()).task(f"filter, {ood}, seed {seed}", gradients.wild.n_classes, "classes") as task:
        wild_tau, calibration_tau = _score(gradients, params, seed, task)
    defined = calibration_tau[~calibration_tau.isnan()]
    threshold = _threshold(defined, wild_tau, params.threshold_quantile)
    is_candidate = wild_tau > threshold
    index = torch.nonzero(is_candidate).flatten()
    candidates = Candidates(
        index=index.numpy(),
        tau=wild_tau[index].numpy(),
        predicted=gradients.wild.predicted[index].numpy(),
        wild_tau=wild_tau.numpy(),
        calibration_tau=defined.numpy(),
        threshold=threshold,
        network=gradients.wild.network,
        wild=mixture,
    )
    written = [workspace.target(place(ood, seed)) for place in (layout.candidates, layout.filter_metrics)]
    result = Filtered(
        ood=ood,
        seed=seed,
        candidates=candidates,
        errors=_diagnose(workspace, is_candidate, ood, seed),
        fit=id_fit(gradients.id_train, gradients.calibration),
        n_unscored=len(calibration_tau) - len(defined),
        n_id_train=len(gradients.id_train),
        written=written,
    )
    if processes().is_main:
        write_candidates(written[0], candidates, {"seed": seed, "filter": params.model_dump()})
        write_text(written[1], json.dumps(_metrics(result), indent=2) + "\n")
    return result


def id_fit(id_train: GradientFile, calibration: GradientFile) -> IdFit:
    """The fit, read off the gradients: the residual at the true label is p − 1."""
    loss_sum = 0.0
    for chunk in id_train.chunks():
        own = chunk.residual.double().gather(1, chunk.label[:, None])
        loss_sum -= float(torch.log1p(own.clamp(min=-1 + 1e-7)).sum())
    return IdFit(
        train_risk=loss_sum / len(id_train),
        train_accuracy=float((id_train.predicted == id_train.label).double().mean()),
        calibration_accuracy=float((calibration.predicted == calibration.label).double().mean()),
    )


def _open(workspace: Workspace, ood: str, seed: int) -> _Gradients:
    places = (
        layout.id_gradients("train", seed),
        layout.id_gradients("calibration", seed),
        layout.wild_gradients(ood, seed),
    )
    files = [GradientFile.open(workspace.find(place)) for place in places]
    for file in files:
        if file.network != files[0].network:
            raise BadArtifactError(
                f"{file.found.path} was made with network {file.network}, {files[0].found.path} with "
                f"{files[0].network}; make all gradients again: salcli extract-grads --ood {ood} --seed {seed}"
            )
    return _Gradients(*files)


def _score(gradients: _Gradients, params: FilterParams, seed: int, task: Task) -> tuple[Tensor, Tensor]:
    """Outlier scores of the wild data, and of the ID data that the threshold is chosen on."""
    gradients = _Gradients(
        gradients.id_train,
        unlabeled(gradients.calibration, params, seed, "calibration"),
        unlabeled(gradients.wild, params, seed, "wild"),
    )
    held_out = params.calibration == "holdout"
    reference_sample = gradients.calibration if held_out else gradients.id_train
    if params.score == "gradnorm":
        return gradnorm_outlier_scores(gradients.wild), gradnorm_outlier_scores(reference_sample)
    if params.calibration == "id-svd":
        (wild_tau,) = tau(gradients.wild, [gradients.wild], gradients.id_train, params, task)
        (id_tau,) = tau(gradients.id_train, [gradients.id_train], gradients.id_train, params, Silent())
        return wild_tau, id_tau
    wild_tau, id_tau = tau(gradients.wild, [gradients.wild, reference_sample], gradients.id_train, params, task)
    return wild_tau, id_tau


def _threshold(calibration_tau: Tensor, wild_tau: Tensor, quantile: float) -> float:
    if len(calibration_tau) == 0:
        raise ThresholdError(
            "no calibration sample is predicted as a class that occurs in the wild data; use a larger calibration set"
        )
    threshold = score_threshold(calibration_tau, quantile)
    n_candidates = int((wild_tau > threshold).sum())
    if 0 < n_candidates < len(wild_tau):
        return threshold
    outcome = "no candidate outliers" if n_candidates == 0 else "nothing but candidate outliers"
    working = working_quantiles(calibration_tau, wild_tau)
    half_a_rank = 0.5 / len(calibration_tau)  # inside the range, so that rounding cannot leave it
    cure = (
        f"values from {working[0] + half_a_rank:.6g} to {working[1] - half_a_rank:.6g} work"
        if working
        else "no value works: wild and calibration scores do not overlap"
    )
    raise ThresholdError(f"filter.threshold_quantile {quantile:g} leaves {outcome}; {cure}")


def _diagnose(workspace: Workspace, is_candidate: Tensor, ood: str, seed: int) -> SeparationErrors | None:
    """Compare with the truth, where there is one, after everything is decided."""
    is_ood = known_truth(workspace, len(is_candidate), ood, seed)
    return None if is_ood is None else separation_errors(is_candidate, is_ood)


def _metrics(result: Filtered) -> dict[str, object]:
    errors = asdict(result.errors) if result.errors else {"err_in": None, "err_out": None}
    return {
        "threshold": result.candidates.threshold,
        "n_candidates": len(result.candidates.index),
        "n_wild": len(result.candidates.wild_tau),
        "n_calibration": len(result.candidates.calibration_tau) + result.n_unscored,
        "n_id_train": result.n_id_train,
        **errors,
        **asdict(result.fit),
    }
