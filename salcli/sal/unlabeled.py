"""What wild data tell without labels: which score separates best (its excess), and the share π of OOD data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from salcli.sal.filter import score_threshold

N_RESAMPLES = 200
# Another score replaces the first one if its excess is larger in this share of the resamples.
CONFIDENCE = 0.95
# Best Bin Estimation: the values of the authors' code.
DELTA, GAMMA = 0.1, 0.01


def excess(calibration: Float[Tensor, " n"], wild: Float[Tensor, " m"], quantile: float) -> float:
    """The share of wild samples above T, less that of ID samples, with T chosen on the ID samples.

    Of wild ID samples about as many are above T as of calibration samples, so what is in excess are outliers:
    π · (1 − ERR_out − ERR_in) in expectation. Undefined ID scores (NaN) are left out.
    """
    defined = calibration[~calibration.isnan()]
    if len(defined) == 0:
        return 0.0
    threshold = score_threshold(defined, quantile)
    return float((wild > threshold).double().mean() - (defined > threshold).double().mean())


def resampled_excess(
    calibration: Float[Tensor, "s n"],
    wild: Float[Tensor, "s m"],
    quantile: float,
    rng: np.random.Generator,
    n_resamples: int = N_RESAMPLES,
) -> Float[Tensor, "b s"]:
    """The excess of every score in each of `n_resamples` bootstrap resamples.

    Both samples are drawn again with replacement, and T is chosen again. All scores see the same resample, because
    their differences matter. A resample is how often it has each sample, so that nothing needs to be sorted again.
    """
    n, m = calibration.shape[1], wild.shape[1]
    ranked, order = calibration.sort(dim=1)  # NaN comes last
    defined = ~ranked.isnan()
    found = torch.zeros(n_resamples, len(wild), dtype=torch.float64)
    for one in found:
        id_counts, wild_counts = (torch.from_numpy(np.bincount(rng.integers(k, size=k), minlength=k)) for k in (n, m))
        drawn = (id_counts[order] * defined).cumsum(dim=1)  # s, n: number of samples up to each rank
        total = drawn[:, -1:]
        rank = (quantile * total.double() - 1e-9).ceil().clamp(min=1).long()
        threshold = ranked.gather(1, torch.searchsorted(drawn, rank).clamp(max=n - 1))
        id_share = _share_above(ranked, threshold, id_counts[order] * defined, total)
        wild_share = _share_above(wild, threshold, wild_counts.expand(wild.shape), torch.tensor(m))
        one[:] = torch.where(total.squeeze(1) > 0, wild_share - id_share, 0.0)
    return found


def _share_above(
    scores: Float[Tensor, "s k"], threshold: Float[Tensor, "s 1"], counts: Tensor, total: Tensor
) -> Float[Tensor, " s"]:
    above = ((scores > threshold) * counts).sum(dim=1)
    return above.double() / total.double().flatten().clamp(min=1)


def wins_over_first(resampled: Float[Tensor, "b s"]) -> Float[Tensor, " s"]:
    """For every score, the share of resamples in which its excess is larger than the first one's."""
    return (resampled > resampled[:, :1]).double().mean(dim=0)


def chosen_score(
    observed: Float[Tensor, " s"], wins: Float[Tensor, " s"], usable: Bool[Tensor, " s"], confidence: float = CONFIDENCE
) -> int:
    """The index of the score to separate with.

    The first one stays unless a usable one exceeds it in a share `confidence` of the resamples; of several such, the
    one with the largest excess, and of equal ones the first.
    """
    better = usable & (wins >= confidence)
    better[0] = False
    return int(observed.masked_fill(~better, -math.inf).argmax()) if better.any() else 0


@dataclass(frozen=True)
class MixtureEstimate:
    """π̂, the score it was read off, and the bound on the ID share that the score was chosen by."""

    pi: float
    score: str
    id_share_bound: float  # lower = the score separates better


def best_bin(id_scores: Float[Tensor, " n"], wild_scores: Float[Tensor, " m"]) -> tuple[float, float]:
    """Best Bin Estimation (Garg et al., NeurIPS 2021, Algorithm 1): π̂, and an upper bound on the ID share 1 − π.

    Scores are higher for outliers. For every c, the share of wild samples at or below c is at least 1 − π times
    that of ID samples, with equality where no outlier is below c. The quotient is taken at the c where it is
    smallest after a penalty for the noise, which grows as fewer ID samples are below c.
    """
    n, m = len(id_scores), len(wild_scores)
    if n == 0 or m == 0:
        raise ValueError("the share of OOD data cannot be estimated from no scores")
    id_sorted = id_scores.sort().values
    # between two ID scores only the numerator grows: the best c is at an ID score
    id_below = torch.searchsorted(id_sorted, id_sorted, right=True).double() / n
    wild_below = torch.searchsorted(wild_scores.sort().values, id_sorted, right=True).double() / m
    width = math.sqrt(math.log(4 / DELTA) / (2 * m)) + math.sqrt(math.log(4 / DELTA) / (2 * n))
    bound = (wild_below + (1 + GAMMA) * width) / id_below
    best = int(bound.argmin())
    return 1 - min(1.0, float(wild_below[best] / id_below[best])), float(bound[best])


def estimated_share(scores: Mapping[str, tuple[Tensor, Tensor]]) -> MixtureEstimate:
    """π̂ by the score that separates best: every score's ID share is too high, so the lowest bound is the best.

    `scores` has for every name the outlier scores of held-out ID data and of wild data.
    """
    estimates = []
    for name, (id_scores, wild_scores) in scores.items():
        pi, bound = best_bin(id_scores.double(), wild_scores.double())
        estimates.append(MixtureEstimate(pi, name, bound))
    return min(estimates, key=lambda estimate: estimate.id_share_bound)
