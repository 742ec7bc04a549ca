"""filter: separate candidate outliers from the wild data (Eq. 6, 7 and Remark 2), by τ or by another score."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from salcli.artifacts import layout
from salcli.artifacts.atomic import write_text
from salcli.artifacts.candidates import Candidates, write_candidates
from salcli.compute.processes import processes
from salcli.errors import ThresholdError
from salcli.metrics import ood_metrics
from salcli.progress import Silent
from salcli.sal.threshold import SeparationErrors, score_threshold, separation_errors, working_quantiles
from salcli.stages.auto_score import Comparison, Diagnosis, compare
from salcli.stages.diagnosis import known_truth
from salcli.stages.id_fit import IdFit, id_fit
from salcli.stages.separators import Gradients, Separators, made_with

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from salcli.artifacts.layout import Workspace
    from salcli.params import Params
    from salcli.progress import Progress
    from salcli.stages.auto_score import Scores, Trial


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
    comparison: Comparison | None  # of all scores, where filter.score is auto
    written: list[Path]


def run(workspace: Workspace, params: Params, ood: str, seed: int, progress: Progress | None = None) -> Filtered:
    """Filter the wild data of one experiment."""
    gradients = Gradients.open(workspace, ood, seed)
    mixture = gradients.wild.wild
    separators = Separators(workspace, params, ood, seed, gradients, progress or Silent())
    quantile, is_auto = params.filter.threshold_quantile, params.filter.score == "auto"
    chosen: str = params.filter.score
    scores = separators.all_scores() if is_auto else {chosen: separators.scores(chosen)}
    trials: list[Trial] = []
    if is_auto:
        chosen, trials = compare(scores, quantile, ood, seed)
    wild, calibrating = scores[chosen]
    defined = calibrating[~calibrating.isnan()]
    threshold = _threshold(defined, wild, quantile)
    is_candidate = wild > threshold
    index = torch.nonzero(is_candidate).flatten()
    candidates = Candidates(
        index=index.numpy(),
        score=wild[index].numpy(),
        predicted=gradients.wild.predicted[index].numpy(),
        wild_score=wild.numpy(),
        calibration_score=defined.numpy(),
        threshold=threshold,
        score_name=chosen,
        network=gradients.wild.network,
        wild=mixture,
    )
    # the truth, where there is one: after everything is decided
    is_ood = known_truth(workspace, len(wild), ood, seed)
    comparison = Comparison(trials, chosen, _diagnoses(scores, trials, is_ood)) if trials else None
    written = [workspace.target(place(ood, seed)) for place in (layout.candidates, layout.filter_metrics)]
    result = Filtered(
        ood=ood,
        seed=seed,
        candidates=candidates,
        errors=None if is_ood is None else separation_errors(is_candidate, is_ood),
        fit=id_fit(gradients.id_train, gradients.calibration),
        n_unscored=len(calibrating) - len(defined),
        n_id_train=len(gradients.id_train),
        comparison=comparison,
        written=written,
    )
    if processes().is_main:
        read = {key: value for name in scores for key, value in made_with(name, params).items()}
        write_candidates(written[0], candidates, {"seed": seed, "filter": params.filter.model_dump(), **read})
        write_text(written[1], json.dumps(_metrics(result), indent=2) + "\n")
    return result


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
    cure = (
        f"values from {working[0] + half_a_rank:.6g} to {working[1] - half_a_rank:.6g} work"
        if working
        else "no value works: wild and calibration scores do not overlap"
    )
    raise ThresholdError(f"filter.threshold_quantile {quantile:g} leaves {outcome}; {cure}")


def _diagnoses(scores: Scores, trials: list[Trial], is_ood: Tensor | None) -> dict[str, Diagnosis]:
    """Every score beside the truth, where it is known."""
    if is_ood is None:
        return {}
    both = bool(is_ood.any() and not is_ood.all())
    found = {}
    for trial in trials:
        wild = scores[trial.score][0]
        auroc = ood_metrics(-wild[~is_ood].numpy(), -wild[is_ood].numpy()).auroc if both else math.nan
        found[trial.score] = Diagnosis(separation_errors(wild > trial.threshold, is_ood), auroc)
    return found


def _metrics(result: Filtered) -> dict[str, Any]:
    errors = asdict(result.errors) if result.errors else {"err_in": None, "err_out": None}
    figures = {
        "score": result.candidates.score_name,
        "threshold": result.candidates.threshold,
        "n_candidates": len(result.candidates.index),
        "n_wild": len(result.candidates.wild_score),
        "n_calibration": len(result.candidates.calibration_score) + result.n_unscored,
        "n_id_train": result.n_id_train,
        **errors,
        **asdict(result.fit),
    }
    if result.comparison is None:
        return figures
    return {**figures, "auto": _trials(result.comparison)}


def _trials(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """Every score's figures, by its name."""
    found = {}
    for trial in comparison.trials:
        figures = asdict(trial)
        if diagnosis := comparison.diagnosis.get(trial.score):
            figures |= {**asdict(diagnosis.errors), "auroc": diagnosis.auroc}
        found[figures.pop("score")] = figures
    return found
