"""filter.score auto: try every score on the wild data, and keep τ unless another one surely finds more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from salcli.sal.excess import chosen_score, excess, resampled_excess, wins_over_first
from salcli.sal.threshold import score_threshold
from salcli.seeding import generator

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from salcli.sal.threshold import SeparationErrors

    Scores = Mapping[str, tuple[Tensor, Tensor]]  # for each name those of wild and of calibrating samples


@dataclass(frozen=True)
class Diagnosis:
    """How well a score separates the wild data: only an experiment knows, and only afterwards. NaN: a side is empty."""

    errors: SeparationErrors
    auroc: float


@dataclass(frozen=True)
class Trial:
    """One score on the wild data."""

    score: str
    threshold: float
    n_candidates: int
    excess: float
    excess_std: float  # of the bootstrap
    wins_over_tau: float  # the share of resamples in which its excess is larger than τ's


@dataclass(frozen=True)
class Comparison:
    """Every score's trial, τ's first, and the one that was chosen; the truth about each where it is known."""

    trials: list[Trial]
    chosen: str
    diagnosis: dict[str, Diagnosis]


def compare(scores: Scores, quantile: float, ood: str, seed: int) -> tuple[str, list[Trial]]:
    """The name of the score to separate with, and what speaks for it. The first of `scores` is the one to beat."""
    wild, calibrating = (torch.stack([pair[side] for pair in scores.values()]) for side in (0, 1))
    observed = torch.tensor(
        [excess(calibrating[row], wild[row], quantile) for row in range(len(wild))], dtype=torch.float64
    )
    resampled = resampled_excess(calibrating, wild, quantile, generator(seed, f"filter-auto/{ood}"))
    wins, spread = wins_over_first(resampled), resampled.std(dim=0)
    trials = []
    for row, name in enumerate(scores):
        defined = calibrating[row][~calibrating[row].isnan()]
        threshold = score_threshold(defined, quantile) if len(defined) else torch.inf
        n_candidates = int((wild[row] > threshold).sum())
        trials.append(Trial(name, threshold, n_candidates, float(observed[row]), float(spread[row]), float(wins[row])))
    usable = torch.tensor([0 < trial.n_candidates < wild.shape[1] for trial in trials])
    return trials[chosen_score(observed, wins, usable)].score, trials
