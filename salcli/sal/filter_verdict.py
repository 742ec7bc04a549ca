"""What wild data tell without labels: which score separates best, and how many outliers a filter found.

All scores are outlier scores: higher = outlier. Calibration scores are those of held-out ID data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from salcli.sal.outlier_share import DRIFT, MOST_RESAMPLED, best_bin, drift_of

N_RESAMPLES = 200
# A score is called better than another if it finds more in this share of the resamples.
CONFIDENCE = 0.95
# The ID quantiles that a separator is judged by: around the one of T, and enough of them to average out the noise.
QUANTILES = torch.linspace(0.8, 0.975, 36, dtype=torch.float64)


@dataclass(frozen=True)
class NormalQuantiles:
    """Maps a score to the standard normal quantile of its rank among calibration scores.

    Equal scores have the middle of their ranks, scores in between are interpolated, and scores beyond the largest or
    smallest go on as the logarithm of their distance from it, in units of the spread.
    """

    value: Float[Tensor, " u"]
    quantile: Float[Tensor, " u"]
    spread: float

    @classmethod
    def fit(cls, calibration: Float[Tensor, " n"]) -> NormalQuantiles:
        exact = calibration.double()
        value, count = torch.unique(exact, return_counts=True)
        middle = (count.cumsum(0) - count.double() / 2) / len(exact)
        low, high = np.quantile(exact.numpy(), [0.25, 0.75])
        spread = float(high - low) / 1.349 or float(exact.std(correction=0)) or 1.0  # 1.349: of a normal distribution
        return cls(value, torch.special.ndtri(middle), spread)

    def __call__(self, scores: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
        exact = scores.double()
        inside = _interpolated(exact, self.value, self.quantile)
        above, below = ((exact - self.value[-1]).clamp(min=0), (self.value[0] - exact).clamp(min=0))
        return inside + (above / self.spread).log1p() - (below / self.spread).log1p()


def _interpolated(x: Float[Tensor, " m"], at: Float[Tensor, " u"], value: Float[Tensor, " u"]) -> Float[Tensor, " m"]:
    """Linearly between the points, constant beyond them. A graph for other programs cannot call numpy."""
    if not torch.compiler.is_compiling():
        return torch.from_numpy(np.interp(x.numpy(), at.numpy(), value.numpy()))
    if len(at) == 1:
        return torch.zeros_like(x) + value
    left = ((at <= x[:, None]).sum(dim=1) - 1).clamp(0, len(at) - 2)
    share = ((x - at[left]) / (at[left + 1] - at[left])).clamp(0, 1)
    return value[left] + share * (value[left + 1] - value[left])


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
class Verdict:
    """How many candidates are more than ID data alone would give, and what share of the candidates are outliers.

    Everything is estimated from the calibration sample and the wild sample alone.
    """

    n_candidates: int
    expected: float  # candidates if all wild data were ID data
    margin: float  # half of the 95% interval of `beyond`
    pi: float  # estimated share of outliers in the wild data
    precision: float  # estimated share of outliers among the candidates
    drift: float  # how much the scores of all wild data have moved, in standard errors; see `drift_of`

    @property
    def beyond(self) -> float:
        return self.n_candidates - self.expected

    @property
    def found_something(self) -> bool:
        return self.beyond > self.margin

    @property
    def looks_like_drift(self) -> bool:
        return self.drift > DRIFT


def verdict(calibration: Float[Tensor, " n"], wild: Float[Tensor, " m"], threshold: float) -> Verdict:
    """Of one separation. The interval has the noise of both samples: T was chosen on few calibration samples."""
    n, m = len(calibration), len(wild)
    n_candidates, n_above = int((wild > threshold).sum()), int((calibration > threshold).sum())
    p = (n_above + 1) / (n + 1)  # a new ID sample is above a calibration score with this probability
    share = n_candidates / m
    variance = m * max(share, p) * (1 - max(share, p)) + m**2 * p * (1 - p) / (n + 2)
    pi, _ = best_bin(calibration, wild)
    pi = max(pi, min(1.0, (share - p) / (1 - p))) if p < 1 else pi  # as many as were found
    false = (1 - pi) * m * p
    precision = max(0.0, 1 - false / n_candidates) if n_candidates else math.nan
    return Verdict(
        n_candidates=n_candidates,
        expected=m * p,
        margin=1.96 * math.sqrt(variance),
        pi=pi,
        precision=precision,
        drift=drift_of(-calibration.numpy(), -wild.numpy()),
    )
