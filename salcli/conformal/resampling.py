"""The bootstrap of FPR95 and AUROC, of labeled and of wild data, and what both are without labels.

Scores are outlier scores: higher = more OOD. A resample is how often it has each sample, so nothing is sorted again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from salcli.conformal.evidence import DRIFT, INTERVAL, Share, drift_p_value

LEAST, MOST = 50, 50_000  # samples of a side
COMPARED = (0.875, 0.9, 0.925, 0.95, 0.975)  # shares of ID data that are kept: several thresholds against noise
NO_HOLDOUT = "no wild data are held out (data.wild_holdout is 0)"
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


# -- without labels: wild data are a mixture, a share π of which is OOD
#
#     AUC(held-out ID against wild) = ½ (1 − π) + π · AUROC          P(wild ≤ t) = (1 − π) · P(ID ≤ t) + π · P(OOD ≤ t)


@dataclass(frozen=True)
class Estimate:
    """With its 90% interval; None where there is none."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Estimates:
    """FPR95 and AUROC of each method, and the one to use. Methods about which nothing can be said are left out."""

    pi: Estimate
    methods: dict[str, dict[str, Estimate]]
    chosen: str
    reason: str


def estimated(
    scores: Mapping[str, tuple[Floats, Floats]],
    share: Share | None,
    incumbent: str,
    labels: Mapping[str, str],
    rng: np.random.Generator,
    n_resamples: int = 1000,
) -> Estimates:
    """From scores of calibration and of held-out wild data, by method, and the share of outliers.

    The incumbent stays unless another method is significantly better. Approximate: intervals are of the bootstrap, at
    both ends of the interval of π, and outliers that score as most ID data do are not in π̂.
    """
    sizes = [min(map(len, side)) for side in zip(*scores.values(), strict=True)] if scores else [0, 0]
    n_resamples = min(n_resamples, max(200, 4 * 10**8 // max(1, len(scores) * sum(sizes))))
    pi = Estimate(share.value, share.low, share.high) if share else Estimate()
    if sizes[1] == 0:
        return Estimates(pi, {}, incumbent, NO_HOLDOUT)
    if min(sizes) < LEAST:
        return Estimates(
            pi,
            {},
            incumbent,
            f"cannot tell: {sizes[0]:,} held-out ID and {sizes[1]:,} held-out wild samples are too few; at least "
            f"{LEAST} of each are needed (data.id_shares.calibration, data.wild_holdout)",
        )
    defined = {name: [_defined(side, rng) for side in pair] for name, pair in scores.items()}
    drifted = [name for name, pair in defined.items() if drift_p_value(*pair) <= DRIFT]
    if incumbent in drifted or len(drifted) > len(scores) / 2:
        return Estimates(
            pi,
            {},
            incumbent,
            "cannot tell: the wild data differ from the calibration data as a whole, not only in outliers, so "
            f"{labels[incumbent]} stays; calibrate on samples from their source (data.calibration)",
        )
    kept = {name: pair for name, pair in defined.items() if name not in drifted}
    ids, wild = (np.stack([pair[side] for pair in kept.values()]) for side in (0, 1))
    n = ids.shape[1]
    id_counts, wild_counts = (resample_counts(side.shape[1], n_resamples, rng) for side in (ids, wild))
    id_counts[0], wild_counts[0] = 1, 1  # the first is the sample itself
    auc, passing = resampled(ids, wild, id_counts, wild_counts, COMPARED)
    expected = np.ceil(np.array(COMPARED) * n - 1e-9) / (n + 1)  # of new ID data, which did not choose the thresholds
    more = {name: (expected - passing[:, i]).mean(axis=1) for i, name in enumerate(kept)}
    chosen, reason = _choice(more, incumbent, labels, wild.shape[1])
    if share is None or share.low == 0:
        return Estimates(pi, {}, chosen, f"{reason}; cannot tell FPR95 and AUROC: no outliers are certified")
    at_95 = COMPARED.index(0.95)
    found = {
        name: {
            "auroc": _unmixed(auc[:, i], 0.5, share),
            "fpr95": _unmixed(passing[:, i, at_95], float(expected[at_95]), share),
        }
        for i, name in enumerate(kept)
    }
    return Estimates(pi, found, chosen, reason)


def _defined(scores: Floats, rng: np.random.Generator) -> Floats:
    """NaN is above all. Of very many samples some: more do not change what the resamples say."""
    some = scores if len(scores) <= MOST else scores[np.sort(rng.permutation(len(scores))[:MOST])]
    found: Floats = np.nan_to_num(some.astype(float), nan=np.inf, posinf=np.inf, neginf=-np.inf)
    return found


def _unmixed(mixed: Floats, base: float, share: Share) -> Estimate:
    """x of the outliers, where wild data have (1 − π) · base + π · x. The first resample is the sample itself."""
    draws = [base + (mixed[1:] - base) / pi for pi in (share.low, share.value, share.high)]
    ends = [base + (mixed[0] - base) / share.value, *interval(INTERVAL, *draws)]
    return Estimate(*(float(end) for end in np.clip(ends, 0, 1)))


def _choice(more: Mapping[str, Floats], incumbent: str, labels: Mapping[str, str], n_wild: int) -> tuple[str, str]:
    """The method to use, and why: the one that finds most of those that find significantly more than the incumbent.

    `more`: the share of wild data above a threshold less that of ID data, mean over thresholds. It needs no π.
    """
    label = labels[incumbent]
    if incumbent not in more:
        return incumbent, f"{label} stays: it was not evaluated"
    others = [name for name in more if name != incumbent]
    gain = np.array([more[name] - more[incumbent] for name in others]).reshape(-1, len(more[incumbent]))
    spread = np.maximum(gain[:, 1:].std(axis=1), 1e-12)
    # of 15 to 30 methods some seem better by chance: the interval is one for all together
    margin = spread * widest_deviation(gain[:, 1:], spread, INTERVAL) if others else spread
    better = np.flatnonzero(gain[:, 0] > margin)
    if not len(better):
        return incumbent, f"{label} stays: no method finds significantly more in {n_wild:,} held-out wild samples"
    best = max(better, key=lambda i: float(gain[i, 0]))
    low, high = (f"{100 * end:.1f}" for end in (gain[best, 0] - margin[best], gain[best, 0] + margin[best]))
    found = f"{low} to {high}% more of the {n_wild:,} held-out wild samples (90% interval, all methods at once)"
    return others[best], f"{labels[others[best]]} finds more outliers than {label}: {found}"
