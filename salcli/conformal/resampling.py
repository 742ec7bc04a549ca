"""The bootstrap of FPR95 and AUROC, of labeled and of wild data, and what both are without labels.

Scores are outlier scores: higher = more OOD. A resample is how often it has each sample, so nothing is sorted again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.uint8]


def resample_counts(n: int, n_resamples: int, rng: np.random.Generator) -> Counts:
    """How often each resample has each of n samples."""
    counts = np.empty((n_resamples, n), np.uint8)
    for row in counts:
        row[:] = np.bincount(rng.integers(n, size=n), minlength=n)
    return counts


def resampled(
    ids: Floats, others: Floats, id_counts: Counts, other_counts: Counts, kept: ArrayLike = (0.95,)
) -> tuple[Floats, Floats]:
    """AUROC (b, s) and FPR (b, s, k) of s scores of the same samples in each of b resamples.

    FPR is the share of the others at or below the lowest threshold that keeps at least `kept` of the ID scores. The
    threshold of each resample is exact. All else is linear in the counts: terms in which both sides deviate, of
    relative size 1/√n, are left out.
    """
    (s, n), m, b = ids.shape, others.shape[1], len(id_counts)
    shares = np.atleast_1d(np.asarray(kept, float))
    ranks = np.maximum(1, np.ceil(shares * n - 1e-9)).astype(np.int64) - 1  # of the thresholds, from below
    of_ids, of_others = id_counts.astype(np.float32), other_counts.astype(np.float32)
    auroc, fpr = np.empty((b, s)), np.empty((b, s, len(shares)))
    for column in range(s):
        order = np.argsort(ids[column], kind="stable")
        ranked, others_ranked = ids[column][order], np.sort(others[column])
        # shares of the other side that are above each ID sample, and below each other sample; a tie counts half
        above = 2 * m - sum(np.searchsorted(others_ranked, ids[column], side) for side in ("left", "right"))
        below = sum(np.searchsorted(ranked, others[column], side) for side in ("left", "right"))
        over_ids, over_others = above / (2 * m), below / (2 * n)
        auroc[:, column] = of_ids @ over_ids / n + of_others @ over_others / m - over_ids.mean()
        first, last = int(ranks.min()), int(ranks.max())
        start, stop = max(0, first - _spread(first, n)), min(n, last + _spread(last, n) + 1)
        drawn = np.cumsum(id_counts[:, order[:stop]], axis=1, dtype=np.int32)[:, start:]
        share = np.searchsorted(others_ranked, ranked[start:stop], side="right") / m
        for k, rank in enumerate(ranks):
            at = np.minimum((drawn <= rank).sum(axis=1), stop - start - 1)  # where each resample's threshold is
            passing = (others[column] <= ranked[rank]).astype(np.float32)
            fpr[:, column, k] = share[at] - share[rank - start] + of_others @ passing / m
    return auroc, np.clip(fpr, 0, 1)


def _spread(rank: int, n: int) -> int:
    """No resample's threshold is farther from its rank than this."""
    return 7 * math.isqrt(min(rank, n - rank) + 1) + 10


def interval(level: float, *draws: Floats) -> tuple[float, float]:
    """Union of the intervals of each."""
    ends = [np.quantile(own, [(1 - level) / 2, (1 + level) / 2]) for own in draws]
    return min(float(end[0]) for end in ends), max(float(end[1]) for end in ends)


def widest_deviation(draws: Floats, spread: Floats, level: float) -> float:
    """How many spreads the largest of several deviations is at most, with probability `level`: one margin for all."""
    centred = np.abs(draws - draws.mean(axis=1, keepdims=True)) / spread[:, None]
    return float(np.quantile(centred.max(axis=0, initial=0.0), level))


def unmixed(mixed: Floats | float, base: float, pi: float) -> Floats | float:
    """x of the outliers, where the wild data have (1 − π) · base + π · x."""
    return base + (mixed - base) / pi


__all__: Sequence[str] = ("interval", "resample_counts", "resampled", "unmixed", "widest_deviation")
