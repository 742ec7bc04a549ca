"""The share π of outliers in wild data, estimated without labels; whether all of them drift; and resamples.

Wild data are a mixture: P(w ≥ t) = (1 − π) · P(ID ≥ t) + π · P(OOD ≥ t). Above a threshold t that no outlier passes,
that gives π; where some pass, it gives less. Scores are higher for ID-like samples; c are held-out ID data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from salcli.sal.metrics import ID_QUANTILE

LEVEL = 0.9  # of all intervals
KEPT = np.linspace(0.3, 0.975, 28)  # shares of ID data that a threshold keeps
AT_95, FEWER = int(np.argmin(abs(KEPT - ID_QUANTILE))), int(np.argmin(abs(KEPT - 0.6)))
N_SPLITS, PENALTY = 10, 3  # standard errors: π̂ is read off where it is surely high
DELTA, GAMMA = 0.1, 0.01  # of Best Bin Estimation: the values of the authors' code
MOST_RESAMPLED = 50_000  # samples of a side: more do not change what the resamples say
AT_ONCE = 4_000_000  # numbers in memory
DRIFT = 4.0  # standard errors, each of at least LEAST_DRIFT: what is smaller does no harm, however surely it is there
LEAST_DRIFT = 0.0075  # in AUC
LEAST_LEFT = 0.3  # of the ID-like half: with less left, most of the wild data are outliers, or nothing is as it was


def share_of_outliers(
    known: Float[np.ndarray, " n"], wild: Float[np.ndarray, " m"], n_resamples: int
) -> tuple[float, float, float]:
    """π̂ by one score, and the ends of its interval. Outliers that score as ID data do are not
    counted, but the interval allows for some.
    """
    rng = np.random.default_rng(0)  # another seed would be another answer to the same question
    known, wild = (side[:: -(-len(side) // MOST_RESAMPLED)][None] for side in (known, wild))
    counts = [resample_counts(side.shape[1], n_resamples, rng) for side in (known, wild)]
    _, passing, expected = resampled(known, wild, *counts)
    shares, most = share_draws(known, wild, 1 - passing / expected, rng)
    pi, low, high = np.clip([shares[0], *interval(shares, most)], 0, 1)
    return float(pi), float(low), float(high)


def share_draws(
    known: Float[np.ndarray, "s n"],
    wild: Float[np.ndarray, "s m"],
    shares: Float[np.ndarray, "b s k"],
    rng: np.random.Generator,
) -> tuple[Float[np.ndarray, " b"], Float[np.ndarray, " b"]]:
    """π̂ in each resample, where `shares` has what each threshold gives; and what π may be at most.

    Outliers that look like most ID data are not seen in π̂. At most: the same method where fewer ID data are kept,
    which is less certain.
    """
    values, at = read_off(known, wild, rng)
    row = np.arange(len(shares))
    draws = shares[:, at[..., 0], at[..., 1]].reshape(len(shares), N_SPLITS, 2, 2).mean(axis=2)  # of both halves
    draws = draws[row, row % N_SPLITS]  # each resample takes the choices of one split: they differ, too
    draws[0] = values.mean(axis=0)
    pi, most = (centred(own) for own in draws.T)
    return pi, np.maximum(pi, most)


def read_off(
    known: Float[np.ndarray, "s n"], wild: Float[np.ndarray, "s m"], rng: np.random.Generator
) -> tuple[Float[np.ndarray, "r 2"], Int[np.ndarray, "r 2 2"]]:
    """π, and the most that it may be, as read off some method's threshold, and which: twice for each split in halves.

    It is read off where it is high for sure. One half of the data says where, the other half how high: the highest of
    many noisy numbers would be too high.
    """
    values, where = [], []
    for _ in range(N_SPLITS):
        halves = [rng.permutation(side.shape[1]) % 2 == 0 for side in (known, wild)]
        both = [_of_half(known[:, own], wild[:, other]) for own, other in (halves, [~half for half in halves])]
        for own, other in (both, both[::-1]):
            rest, (n, m) = 1 - own, (side.shape[1] / 2 for side in (known, wild))
            error = np.sqrt(np.maximum(rest * (1 - KEPT * rest) / m + rest**2 * (1 - KEPT) / n, 1e-12) / KEPT)
            method, kept = (int(i) for i in np.unravel_index((own - PENALTY * error).argmax(), own.shape))
            where.append([[method, kept], [method, min(FEWER, kept)]])
            values.append([other[method, k] for method, k in where[-1]])
    return np.array(values), np.array(where)


def _of_half(known: Float[np.ndarray, "s n"], wild: Float[np.ndarray, "s m"]) -> Float[np.ndarray, "s k"]:
    once = [np.ones((1, side.shape[1]), np.int32) for side in (known, wild)]
    _, passing, expected = resampled(known, wild, *once)
    return 1 - passing[0] / expected[0]  # type: ignore[no-any-return]


# -- by the best bin
#
# There are two estimators, because neither is best at both. As a single number this one is better with few samples (115
# calibration samples, π 0.1, ten runs: mean error 0.03, of the one above 0.06), so filter and theory use it. But it is
# read off the data that its bin is chosen on: without outliers it is too high (60 against 115 normal scores by 0.07,
# the one above by 0.01), and its 90% intervals, less that bias, held the truth in 80 to 98% of deals; those above in 87
# to 100%. So estimates and `monitor`, which need an interval, use the one above.


@dataclass(frozen=True)
class MixtureEstimate:
    """π̂, the score it was read off, and the bound on the ID share that the score was chosen by."""

    pi: float
    score: str
    id_share_bound: float  # lower = the score separates better


def best_bin(id_scores: ArrayLike, wild_scores: ArrayLike) -> tuple[float, float]:
    """Best Bin Estimation (Garg et al., NeurIPS 2021, Algorithm 1): π̂, and an upper bound on the ID share 1 − π.

    Scores are higher for outliers here. For every c, the share of wild samples at or below c is at least 1 − π times
    that of ID samples, with equality where no outlier is below c. The quotient is taken at the c where it is
    smallest after a penalty for the noise, which grows as fewer ID samples are below c.
    """
    id_sorted, wild_sorted = np.sort(id_scores), np.sort(wild_scores)
    n, m = len(id_sorted), len(wild_sorted)
    if n == 0 or m == 0:
        raise ValueError("the share of OOD data cannot be estimated from no scores")
    # between two ID scores only the numerator grows: the best c is at an ID score
    id_below = np.searchsorted(id_sorted, id_sorted, side="right") / n
    wild_below = np.searchsorted(wild_sorted, id_sorted, side="right") / m
    width = math.sqrt(math.log(4 / DELTA) / (2 * m)) + math.sqrt(math.log(4 / DELTA) / (2 * n))
    bound = (wild_below + (1 + GAMMA) * width) / id_below
    best = int(bound.argmin())
    return 1 - min(1.0, float(wild_below[best] / id_below[best])), float(bound[best])


def estimated_share(scores: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> MixtureEstimate:
    """π̂ by the score that separates best: every score's ID share is too high, so the lowest bound is the best.

    `scores` has for every name the outlier scores of held-out ID data and of wild data.
    """
    estimates = []
    for name, (id_scores, wild_scores) in scores.items():
        pi, bound = best_bin(id_scores, wild_scores)
        estimates.append(MixtureEstimate(pi, name, bound))
    return min(estimates, key=lambda estimate: estimate.id_share_bound)


# -- drift


def drift_of(known: Float[np.ndarray, " n"], wild: Float[np.ndarray, " m"]) -> float:
    """How far the ID-like half of the scores has moved down, in standard errors (Mann–Whitney).

    Outliers leave that part of the wild distribution as it is, at 1 − π times that of the ID data. If all wild data
    differ from the labeled data (another camera, say), that part moves, too.
    """
    median = np.sort(known)[len(known) // 2]
    half, wild_half = np.sort(known[known >= median]), wild[wild >= median]
    n, m = len(half), len(wild_half)
    if m < LEAST_LEFT * len(wild) / 2:
        return math.inf
    below = sum(np.searchsorted(half, wild_half, side).mean() for side in ("left", "right")) / (2 * n)
    return float((0.5 - below) / max(LEAST_DRIFT, math.sqrt((n + m + 1) / (12 * n * m))))


# -- resamples; the first is always the sample itself


def resample_counts(n: int, n_resamples: int, rng: np.random.Generator) -> Int[np.ndarray, "b n"]:
    """How often each resample has each sample."""
    drawn = rng.multinomial(n, np.full(n, 1 / n), size=n_resamples).astype(np.int32)
    return np.concatenate([np.ones((1, n), np.int32), drawn])


def resampled(
    known: Float[np.ndarray, "s n"],
    wild: Float[np.ndarray, "s m"],
    known_counts: Int[np.ndarray, "b n"],
    wild_counts: Int[np.ndarray, "b m"],
) -> tuple[Float[np.ndarray, "b s"], Float[np.ndarray, "b s k"], Float[np.ndarray, "b 1 k"]]:
    """In each resample: AUC(c against w), the share of wild data at or above each threshold, and that of new ID data.

    A resample is how often it has each sample, so nothing is sorted again. The thresholds keep KEPT of its ID data,
    as FPR95's does; of new ID data, which did not choose them, slightly fewer are above.
    """
    (s, n), b = known.shape, len(known_counts)
    auc, passing = np.empty((b, s)), np.empty((b, s, len(KEPT)))
    n_known, n_wild = known_counts.sum(axis=1, keepdims=True), wild_counts.sum(axis=1, keepdims=True)
    n_kept = np.maximum(1, np.ceil(KEPT * n_known - 1e-9))  # b, k
    orders = [np.argsort(side, axis=1, kind="stable") for side in (known, wild)]
    size = max(1, AT_ONCE // (n + wild.shape[1]))
    for column in range(s):
        order, wild_order = (one[column] for one in orders)
        ranked, wild_ranked = known[column][order], wild[column][wild_order]
        below, up_to = (np.searchsorted(wild_ranked, ranked, side) for side in ("left", "right"))
        for start in range(0, b, size):
            rows = slice(start, start + size)
            drawn = known_counts[rows][:, order]
            wild_up_to = np.cumsum(wild_counts[rows][:, wild_order], axis=1)
            wild_up_to = np.concatenate([np.zeros((len(drawn), 1), np.int64), wild_up_to], axis=1)
            pairs = (drawn * (wild_up_to[:, below] + wild_up_to[:, up_to])).sum(axis=1)
            auc[rows, column] = pairs / (2 * n_known[rows] * n_wild[rows])[:, 0]
            # the rank of each threshold, found in all resamples at once: each is shifted beyond the one before
            row = np.arange(len(drawn))[:, None]
            shift = row * (n_known.max() + 1)
            cumulated = (np.cumsum(drawn, axis=1) + shift).ravel()
            at = np.searchsorted(cumulated, n_known[rows] - n_kept[rows] + shift, side="right") - row * n
            passing[rows, column] = 1 - wild_up_to[row, below[np.minimum(at, n - 1)]] / n_wild[rows]
    return auc, passing, (n_kept / (n_known + 1))[:, None, :]


def centred(draws: Float[np.ndarray, " b"]) -> Float[np.ndarray, " b"]:
    """Around the first: resamples have ties, so their thresholds are off by half a rank."""
    return draws + np.where(np.arange(len(draws)) > 0, draws[0] - draws[1:].mean(), 0)


def interval(*draws: Float[np.ndarray, " b"]) -> tuple[float, float]:
    """The smallest that has the interval of each."""
    ends = [np.quantile(own[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) for own in draws]
    return min(end[0] for end in ends), max(end[1] for end in ends)
