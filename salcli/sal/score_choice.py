"""Which score separates the wild data best (`filter.score: auto`), without labels.

All scores are outlier scores: higher = outlier. Calibration scores are those of held-out ID data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from salcli.sal.outlier_share import DRIFT, MOST_RESAMPLED, drift_of
from salcli.sal.separation import SeparationErrors, score_threshold

N_RESAMPLES = 200
# A score is called better than another if it finds more in this share of the resamples.
CONFIDENCE = 0.95
# The ID quantiles that a separator is judged by: around the one of T, and enough of them to average out the noise.
QUANTILES = torch.linspace(0.8, 0.975, 36, dtype=torch.float64)


def partial_excess(
    calibration: Float[Tensor, " n"], wild: Float[Tensor, " m"], quantiles: Float[Tensor, " q"] = QUANTILES
) -> float:
    """The share of wild samples above T less that of ID samples, mean over T at the ID quantiles 0.8 to 0.975.

    Of wild ID samples about as many are above T as of calibration samples, so what is in excess are outliers: in
    expectation π · (1 − ERR_out − ERR_in). The mean is a part of the area under the ROC of wild against ID data.
    For any score, AUC(wild against ID) = ½ (1 − π) + π · AUROC(OOD against ID), so without any truth it ranks
    separators as the AUROC does. This part of it is about thresholds that a filter would use.
    """
    ranked = calibration[~calibration.isnan()].sort().values
    if len(ranked) == 0:
        return 0.0
    rank = (quantiles * len(ranked) - 1e-9).ceil().long().clamp(min=1) - 1
    threshold = ranked[rank]
    above = 1 - torch.searchsorted(wild.sort().values, threshold, right=True).double() / len(wild)
    id_above = 1 - torch.searchsorted(ranked, threshold, right=True).double() / len(ranked)
    return float((above - id_above).mean())


def resampled_excess(
    calibration: Float[Tensor, "s n"],
    wild: Float[Tensor, "s m"],
    rng: np.random.Generator,
    n_resamples: int = N_RESAMPLES,
) -> Float[Tensor, "b s"]:
    """The mean excess over QUANTILES of every score in each of `n_resamples` bootstrap resamples.

    Both samples are drawn again with replacement, and T is chosen again. All scores see the same resample, because
    their differences matter. A resample is how often it has each sample, so that nothing needs to be sorted again.
    """
    wild = wild[:, :: -(-wild.shape[1] // MOST_RESAMPLED)]
    n, m = calibration.shape[1], wild.shape[1]
    ranked, order = calibration.sort(dim=1)  # NaN comes last
    wild_ranked, wild_order = wild.sort(dim=1)
    defined = ~ranked.isnan()
    # for each ID score: how many ID and wild scores are at most as high
    ranked = ranked.nan_to_num(math.inf, posinf=math.inf, neginf=-math.inf)
    id_up_to = torch.searchsorted(ranked, ranked, right=True)
    wild_up_to = torch.searchsorted(wild_ranked, ranked, right=True)
    found = torch.zeros(n_resamples, len(wild), dtype=torch.float64)
    for one in found:
        id_counts, wild_counts = (torch.from_numpy(np.bincount(rng.integers(k, size=k), minlength=k)) for k in (n, m))
        drawn = (id_counts[order] * defined).cumsum(dim=1)  # s, n: number of samples up to each rank
        wild_drawn = torch.nn.functional.pad(wild_counts[wild_order].cumsum(dim=1), (1, 0))  # s, 1 + m
        total = drawn[:, -1:]
        rank = (QUANTILES * total.double() - 1e-9).ceil().clamp(min=1).long()  # s, q
        threshold = torch.searchsorted(drawn, rank).clamp(max=n - 1)  # its rank among the ID scores
        id_share = drawn.gather(1, (id_up_to.gather(1, threshold) - 1).clamp(min=0)).double() / total.clamp(min=1)
        wild_share = wild_drawn.gather(1, wild_up_to.gather(1, threshold)).double() / m
        one[:] = torch.where(total.squeeze(1) > 0, (id_share - wild_share).mean(dim=1), 0.0)
    return found


@dataclass(frozen=True)
class Trial:
    """One score on the wild data. `errors` and `auroc` are known only where the truth is, and only afterwards."""

    score: str
    threshold: float
    n_candidates: int
    excess: float  # mean over ID quantiles: share of wild samples above T, less that of ID samples
    excess_std: float  # of the bootstrap
    beaten: float  # the share of resamples in which the chosen score has a larger excess
    errors: SeparationErrors | None = None
    auroc: float = math.nan
    is_chosen: bool = False
    drift: float = 0.0  # of the lower half of its scores, in standard errors


def choose_score(
    scores: Mapping[str, tuple[Tensor, Tensor]],
    ranks: tuple[np.ndarray, np.ndarray],
    quantile: float,
    preferred: Sequence[str],
    rng: np.random.Generator,
) -> tuple[str, list[Trial]]:
    """The score to separate with, and the trials of all, from those of the wild and the calibrating samples.

    It is the first preferred one that does not drift; if all do, the score that finds most of those that do not. Among
    all, to take the score that finds most would favour one whose T happens to be low. `ranks` order both sides by
    content, so that the order of rows does not matter.
    """
    # τ of classes that no wild sample is predicted as is not defined: no sample is less of an outlier
    wild, calibrating = (
        torch.stack([pair[side].nan_to_num(0.0) for pair in scores.values()])[:, np.argsort(ranks[side], kind="stable")]
        for side in (0, 1)
    )
    resampled = resampled_excess(calibrating, wild, rng)
    trials = []
    for row, (name, (_, own)) in enumerate(scores.items()):
        defined = own[~own.isnan()]
        threshold = score_threshold(defined, quantile) if len(defined) else torch.inf
        trials.append(
            Trial(
                score=name,
                threshold=threshold,
                n_candidates=int((wild[row] > threshold).sum()),
                excess=partial_excess(calibrating[row], wild[row]),
                excess_std=float(resampled[:, row].std()),
                beaten=0.0,
                drift=drift_of(-calibrating[row].numpy(), -wild[row].numpy()),
            )
        )
    chosen = _choice(trials, preferred)
    beaten = (resampled[:, chosen, None] > resampled).double().mean(dim=0)
    trials = [replace(trial, beaten=float(beaten[row]), is_chosen=row == chosen) for row, trial in enumerate(trials)]
    return trials[chosen].score, trials


def _choice(trials: Sequence[Trial], preferred: Sequence[str]) -> int:
    rows = [row for row, trial in enumerate(trials) if trial.n_candidates > 0] or [0]
    steady = [row for row in rows if trials[row].drift <= DRIFT] or [min(rows, key=lambda row: trials[row].drift)]
    by_name = {trials[row].score: row for row in steady}
    finds_most = max(steady, key=lambda row: trials[row].excess)
    return next((by_name[name] for name in preferred if name in by_name), finds_most)
