"""Held-out ID scores c (n of them, "calibration") against wild or new scores w (m of them).

Scores are outlier scores: higher = more OOD. If the wild ID samples are exchangeable with the calibration samples, and
the score treats both alike (or has seen neither), everything here that is called exact holds for every n and m.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CERTAINTY = 0.95  # of a certificate
FOUND = 0.025  # largest p-value of a find
HINT = 0.2  # a p-value up to this is a hint that more calibration samples might turn into a find
INTERVAL = 0.9  # of π̂
DRIFT = 0.01  # largest p-value at which the wild data as a whole differ
LABEL_SHIFT = 0.01  # and at which their classes do
LEAST_EXPECTED = 5  # of a class's samples on either side, for chi-square: more than so many
N_DRAWS = 10_000  # for the envelope, and as many to tune it
MOST_RANKS = 64


# -- p-values and the threshold


def p_values(calibration: ArrayLike, scores: ArrayLike) -> Floats:
    """Conformal p-values, (1 + #{c ≥ w}) / (n + 1). Exact: P(p ≤ α) ≤ α for a sample exchangeable with c.

    NaN is above everything.
    """
    p: Floats = (1 + _at_least(calibration, scores)) / (len(np.asarray(calibration)) + 1)
    return p


def smoothed_p_values(calibration: ArrayLike, scores: ArrayLike, rng: np.random.Generator) -> Floats:
    """(#{c > w} + U (1 + #{c = w})) / (n + 1), with U uniform. Exact: each is uniform on [0, 1]."""
    c = np.sort(np.asarray(calibration, float))
    w = np.nan_to_num(np.asarray(scores, float), nan=np.inf, posinf=np.inf, neginf=-np.inf)
    above = len(c) - np.searchsorted(c, w, side="right")
    ties = len(c) - np.searchsorted(c, w, side="left") - above
    p: Floats = (above + (1 - rng.random(len(w))) * (1 + ties)) / (len(c) + 1)
    return p


def _at_least(calibration: ArrayLike, scores: ArrayLike) -> Ints:
    c, w = np.sort(np.asarray(calibration, float)), np.asarray(scores, float)
    return np.where(np.isnan(w), 0, len(c) - np.searchsorted(c, w, side="left"))


def threshold_rank(n: int, alpha: float) -> int:
    """r = ⌊α (n + 1)⌋; 0 where n < 1/α − 1 is too small for the level."""
    return min(n, math.floor(alpha * (n + 1) + 1e-9))  # 0.05 · 20 is slightly less than 1 in floating point


def threshold(calibration: ArrayLike, alpha: float) -> float:
    """T, the r-th largest calibration score; infinite if r is 0. Exact: an ID sample is above T with at most α."""
    c = np.sort(np.asarray(calibration, float))
    rank = threshold_rank(len(c), alpha)
    return float(c[-rank]) if rank else math.inf


def calibration_needed(alpha: float) -> int:
    """The smallest n with a threshold at this level: 1/α − 1."""
    return math.ceil(1 / alpha - 1 - 1e-9)


def excess_p_value(n: int, m: int, rank: int, count: int) -> float:
    """P(at least `count` of m ID samples are above the rank-th largest of n calibration scores).

    Exact for scores without ties, else at most that: the number is beta-binomial (m, r, n + 1 − r).
    """
    return float(_beta_binomial(m, rank, n + 1 - rank)[max(0, count) :].sum())


def _beta_binomial(m: int, a: int, b: int) -> Floats:
    """The probabilities of 0 to m."""
    from scipy.special import betaln, gammaln

    k = np.arange(m + 1)
    log_p = gammaln(m + 1) - gammaln(k + 1) - gammaln(m - k + 1) + betaln(k + a, m - k + b) - betaln(a, b)
    p: Floats = np.exp(log_p)
    return p


# -- the certificate


@dataclass(frozen=True)
class Envelope:
    """How many of m ID samples are above the largest calibration scores, at several ranks at once.

    Draws of the counts (a Dirichlet-multinomial) give the tail of each; as many others say how small the smallest tail
    is by chance. Only n and m matter.
    """

    n: int
    m: int

    @cached_property
    def ranks(self) -> Ints:
        """All small ranks, and fewer from there to half of the calibration data."""
        most = max(1, (self.n + 1) // 2)
        return np.unique(np.geomspace(1, most, MOST_RANKS).round().astype(np.int64))

    @cached_property
    def _draws(self) -> tuple[NDArray[np.int32], Floats]:
        rng = np.random.default_rng(0)  # the same each time
        counts = np.sort(self._counts(rng), axis=0)
        return counts, np.sort(self._tails(counts, self._counts(rng)).min(axis=1))

    def _counts(self, rng: np.random.Generator) -> NDArray[np.int32]:
        """Draws of the number above each rank: shares between neighbouring ranks are gammas, counts binomial."""
        steps = np.diff(self.ranks, prepend=0, append=self.n + 1).astype(float)
        gaps = rng.gamma(steps, size=(N_DRAWS, len(steps)))
        left = np.cumsum(gaps[:, ::-1], axis=1)[:, ::-1]  # of this step and all below
        counts, rest = np.empty((N_DRAWS, len(self.ranks)), np.int32), np.full(N_DRAWS, self.m)
        for j in range(len(self.ranks)):
            drawn = rng.binomial(rest, np.clip(gaps[:, j] / left[:, j], 0, 1))
            rest = rest - drawn
            counts[:, j] = self.m - rest
        return counts

    @staticmethod
    def _tails(sorted_counts: NDArray[np.int32], counts: NDArray[np.int32]) -> Floats:
        """For each count, the share of draws that are at least as large."""
        n = len(sorted_counts)
        below = [np.searchsorted(own, at, side="left") for own, at in zip(sorted_counts.T, counts.T, strict=True)]
        tails: Floats = (1 + n - np.stack(below, axis=-1)) / (n + 1)
        return tails

    def p_value(self, counts: Ints) -> float:
        """Of the smallest tail of all ranks. Exact: a Monte-Carlo test."""
        drawn, smallest = self._draws
        tail = self._tails(drawn, np.asarray(counts, np.int32)[None]).min()
        return float((1 + np.searchsorted(smallest, tail, side="right")) / (len(smallest) + 1))

    def most(self, level: float) -> Ints:
        """K_r: with probability 1 − level, at most K_r ID samples are above the r-th largest, for all r at once."""
        drawn, smallest = self._draws
        tail = smallest[max(0, threshold_rank(len(smallest), level) - 1)]
        # the largest count whose tail is above `tail`
        rank = max(1, math.ceil(tail * (len(drawn) + 1) - 1e-9))
        limits: Ints = drawn[len(drawn) - rank].astype(np.int64)
        return limits


@lru_cache(maxsize=64)
def envelope(n: int, m: int) -> Envelope:
    return Envelope(n, m)


def counts_above(calibration: ArrayLike, wild: ArrayLike, ranks: Ints) -> Ints:
    """How many wild scores are above the r-th largest calibration score, for each r."""
    c, w = np.sort(np.asarray(calibration, float)), np.sort(np.asarray(wild, float))  # NaN comes last: above all
    return len(w) - np.searchsorted(w, c[len(c) - ranks], side="right")


def certificate(calibration: ArrayLike, wild: ArrayLike, listed: Ints | None = None, level: float = 0.05) -> Ints:
    """At least L_k of the first k samples of a list are outliers, for every k at once, with probability 1 − level.

    `listed` are the indices of wild samples in any order, chosen in any way; None: by falling score. L_k is the largest
    of |{first k} ∩ {w > c_(r)}| − K_r over the ranks r, where at most K_r ID samples are above the r-th largest
    calibration score c_(r). Exact for scores that treat calibration and wild samples alike.
    """
    c, w = np.sort(np.asarray(calibration, float)), np.asarray(wild, float)
    own = np.argsort(-np.nan_to_num(w, nan=np.inf), kind="stable") if listed is None else listed
    found = np.zeros(len(own), np.int64)
    if len(c) == 0 or len(w) == 0:
        return found
    limits = envelope(len(c), len(w))
    for cut, most in zip(c[len(c) - limits.ranks], limits.most(level), strict=True):
        np.maximum(found, np.cumsum(~(w[own] <= cut)) - most, out=found)
    return found


# -- the share of outliers


@dataclass(frozen=True)
class Share:
    """π̂ with the ends of its 90% interval."""

    value: float
    low: float
    high: float


def share_of_outliers(calibration: ArrayLike, wild: ArrayLike) -> Share:
    """π̂ = (share of w above c_(r) − r/(n+1)) / (1 − r/(n+1)), at the rank r where the certificate is highest.

    Outliers that score as most ID data do are not counted. The lower end is the certificate of all wild data, exact;
    the upper end allows for the outliers that fewer ID data would hide, and is approximate.
    """
    c, w = np.asarray(calibration, float), np.asarray(wild, float)
    n, m = len(c), len(w)
    if n == 0 or m == 0:
        return Share(0.0, 0.0, 1.0)
    limits = envelope(n, m)
    counts = counts_above(c, w, limits.ranks)
    at = int(np.argmax(counts - limits.most(1 - INTERVAL)))
    rank = int(limits.ranks[at])
    value = float(np.clip((counts[at] / m - rank / (n + 1)) / (1 - rank / (n + 1)), 0, 1))
    tail = (1 - INTERVAL) / 2
    low = max(0, int((counts - limits.most(tail)).max())) / m
    wider = int(limits.ranks[-1])
    high = max(
        most_outliers(n, m, rank, int(counts[at]), tail),
        most_outliers(n, m, wider, int(counts[-1]), 2 * tail),
    )
    return Share(value, min(low, value), max(value, high / m))


def most_outliers(n: int, m: int, rank: int, count: int, level: float = 0.05) -> int:
    """The most outliers that can be among the `count` wild samples above c_(r), with probability 1 − level.

    The other count − k of them are ID samples, so their number is beta-binomial (m − k, r, n + 1 − r).
    """
    low, high = 0, count  # P(as few ID samples) falls with k
    while low < high:
        k = (low + high + 1) // 2
        if _beta_binomial(m - k, rank, n + 1 - rank)[: count - k + 1].sum() > level:
            low = k
        else:
            high = k - 1
    return low


# -- drift


def drift_p_value(calibration: ArrayLike, wild: ArrayLike) -> float:
    """Whether the ID-like half of the wild data scores higher than that of the calibration data (Mann–Whitney).

    Below the median of the calibration scores there are hardly any outliers. If all wild data differ (another camera,
    other writers), that half moves, too. Exact without outliers there; one-sided.
    """
    c, w = np.sort(np.asarray(calibration, float)), np.asarray(wild, float)
    cut = c[len(c) // 2] if len(c) else math.nan
    low, wild_low = c[c < cut], w[w < cut]
    if len(low) == 0 or len(w) == 0:
        return 1.0
    if len(wild_low) == 0:
        return excess_p_value(len(c), len(w), (len(c) + 1) // 2, len(w))
    n, m, ranked = len(low), len(wild_low), np.sort(low)
    # pairs in which the wild sample is higher
    pairs = sum(np.searchsorted(ranked, wild_low, side).sum() for side in ("left", "right")) / 2
    _, ties = np.unique(np.concatenate([low, wild_low]), return_counts=True)
    if n * m <= 400 and ties.max() == 1:
        from scipy.stats import mannwhitneyu  # slow to load

        return float(mannwhitneyu(wild_low, low, alternative="greater", method="exact").pvalue)
    from scipy.special import ndtr

    variance = n * m / 12 * (n + m + 1 - (ties**3 - ties).sum() / ((n + m) * (n + m - 1)))
    return float(ndtr(-(pairs - n * m / 2 - 0.5) / math.sqrt(variance))) if variance > 0 else 1.0


def label_shift_p_value(calibration: Ints, wild: Ints) -> float:
    """Whether classes k have other shares of the wild data: chi-square of both counts (k), approximate.

    Classes with few samples are one; the p-value is 1 where there are too few to tell.
    """
    from scipy.special import chdtrc

    counts = np.stack([calibration, wild])
    for _ in range(2):  # then without the rest, if it is still too small
        total = counts.sum(axis=0)
        is_rare = total * min(counts.sum(axis=1)) <= LEAST_EXPECTED * total.sum()
        rest = counts[:, is_rare].sum(axis=1, keepdims=True)
        counts = np.concatenate([counts[:, ~is_rare], rest], axis=1)
    counts = counts[:, :-1]
    if counts.shape[1] < 2:
        return 1.0
    expected = np.outer(counts.sum(axis=1), counts.sum(axis=0)) / counts.sum()
    differences = np.abs(counts - expected)
    if counts.shape[1] == 2:
        differences = np.maximum(differences - 0.5, 0)  # Yates
    return float(chdtrc(counts.shape[1] - 1, (differences**2 / expected).sum()))


# -- many p-values


def false_discovery_cutoff(p: ArrayLike, fdr: float) -> float:
    """The largest p-value that is flagged by Benjamini and Hochberg; 0 if none is.

    p-values that share a calibration sample depend on each other in a way that the procedure allows: of the flagged
    samples, at most a share `fdr` is ID on average (Bates et al., 2023; for scores fitted on calibration and wild data
    together, Marandon et al., 2024). Exact.
    """
    ranked = np.sort(np.asarray(p, float))
    allowed = fdr * np.arange(1, len(ranked) + 1) / max(1, len(ranked)) * (1 + 1e-12)  # 0.1 · 3 is more than 0.3
    return float(ranked[ranked <= allowed].max(initial=0.0))


def least_flagged(n: int, m: int, fdr: float) -> int:
    """How many of m samples must be above all n calibration scores before Benjamini and Hochberg flag any."""
    return math.ceil(m / (fdr * (n + 1)) - 1e-9)


def holm(p: ArrayLike) -> Floats:
    """p-values adjusted for their number, however they depend on each other. Exact."""
    values = np.asarray(p, float)
    order = np.argsort(values)
    adjusted = np.empty(len(values))
    factors = np.arange(len(values), 0, -1)
    adjusted[order] = np.minimum(1, np.maximum.accumulate(values[order] * factors))
    return adjusted


# -- what a filter found


@dataclass(frozen=True)
class Verdict:
    """What a list of candidates is worth, by an exact score of calibration and wild data."""

    kind: Literal["found", "cannot tell", "nothing found", "drift"]
    n_candidates: int
    n_wild: int
    n_calibration: int
    certified: int  # at least so many of the candidates are outliers …
    certified_of_all: int  # … and of all wild samples
    expected: float  # samples above T if all wild data were ID data
    margin: float  # half of the 95% interval around it
    above: int  # samples above T
    at_most: int  # outliers above T
    needed: int  # calibration samples that would tell; 0 if that is not the question
    p_value: float  # of "there is no outlier", by all thresholds at once
    drift: float  # p-value of "the wild data do not differ as a whole"
    share: Share


def verdict(
    calibration: ArrayLike,
    wild: ArrayLike,
    candidates: Ints,
    alpha: float = 0.05,
    plain: tuple[ArrayLike, ArrayLike] | None = None,
) -> Verdict:
    """Found, nothing found, or cannot tell. Exact: without outliers, "found" has probability FOUND.

    `candidates` are indices of wild samples, chosen in any way. T is the threshold at level α. `plain`: another exact
    score for drift and the share of outliers, where this one has learned to tell wild data.
    """
    c, w = np.sort(np.asarray(calibration, float)), np.asarray(wild, float)
    n, m, rank = len(c), len(w), max(1, threshold_rank(len(c), alpha))
    limits = envelope(n, m)
    p = limits.p_value(counts_above(c, w, limits.ranks))
    above = int(counts_above(c, w, np.array([rank]))[0])
    certified = certificate(c, w, candidates, 1 - CERTAINTY)
    reference = plain or (c, w)
    share, drift = rank / (n + 1), drift_p_value(*reference)
    needed = _calibration_that_tells(n, m, alpha, above) if p > FOUND else 0
    kind: Literal["found", "cannot tell", "nothing found", "drift"] = "nothing found"
    if drift <= DRIFT:
        kind = "drift"
    elif p <= FOUND:
        kind = "found"
    elif needed and min(p, excess_p_value(n, m, rank, above)) <= HINT:
        kind = "cannot tell"
    return Verdict(
        kind=kind,
        n_candidates=len(candidates),
        n_wild=m,
        n_calibration=n,
        certified=int(certified[-1]) if len(certified) else 0,
        certified_of_all=int(certificate(c, w, None, 1 - CERTAINTY)[-1]) if m else 0,
        expected=m * share,
        margin=1.96 * math.sqrt(m * share * (1 - share) * (n + 1 + m) / (n + 2)),
        above=above,
        at_most=most_outliers(n, m, rank, above),
        needed=needed,
        p_value=p,
        drift=drift,
        share=share_of_outliers(*reference),
    )


def _calibration_that_tells(n: int, m: int, alpha: float, above: int, most: int = 20) -> int:
    """How many calibration samples would make as many samples above T a find; 0 if `most` times as many would not."""
    larger = n
    while larger < most * n:
        larger = math.ceil(1.2 * larger)
        rank = threshold_rank(larger, alpha)
        if rank and excess_p_value(larger, m, rank, above) <= FOUND:
            digits = 10 ** max(0, len(str(larger)) - 2)
            return int(-(-larger // digits) * digits)
    return 0


def longest_certified(certified: Ints, share: float) -> int:
    """The length of the longest list of which at least this share is certified."""
    enough = np.flatnonzero(certified >= share * np.arange(1, len(certified) + 1) - 1e-9)
    return int(enough[-1]) + 1 if len(enough) else 0
