"""Which score separates best, without the truth: the excess of wild samples beyond T, and how sure it is."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from salcli.sal.threshold import score_threshold

N_RESAMPLES = 200
# In this share of the resamples another score has to exceed the first one's excess before it takes its place.
CONFIDENCE = 0.95


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

    Both samples are drawn anew with replacement, and T is chosen anew. All scores see the same resample, for their
    differences matter. A resample is how often it has each sample, so that nothing needs to be sorted again.
    """
    n, m = calibration.shape[1], wild.shape[1]
    ranked, order = calibration.sort(dim=1)  # NaN comes last
    defined = ~ranked.isnan()
    found = torch.zeros(n_resamples, len(wild), dtype=torch.float64)
    for one in found:
        id_counts, wild_counts = (torch.from_numpy(np.bincount(rng.integers(k, size=k), minlength=k)) for k in (n, m))
        drawn = (id_counts[order] * defined).cumsum(dim=1)  # s, n: samples up to each place
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
    """The place of the score to separate with.

    The first one stays unless a usable one exceeds it in a share `confidence` of the resamples; of several such, the
    one with the largest excess, and of equal ones the first.
    """
    better = usable & (wins >= confidence)
    better[0] = False
    return int(observed.masked_fill(~better, -math.inf).argmax()) if better.any() else 0
