"""FPR95 and AUROC without labels, and the method that seems best, from held-out ID data c and held-out wild data w.

Wild data are a mixture: a share π of them is OOD. So for any score, with ID as positive and higher = more ID-like,

    AUC(c against w) = ½ (1 − π) + π · AUROC
    P(w ≥ t) = (1 − π) · P(ID ≥ t) + π · P(OOD ≥ t)

and AUROC and FPR95 follow from π. All intervals come from resamples of both samples, which all methods share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

from salcli.sal.metrics import ID_QUANTILE
from salcli.sal.unlabeled import DRIFT, MOST_RESAMPLED, drift_of

N_RESAMPLES, LEVEL = 1000, 0.9
LEAST = 50  # samples on either side
LEAST_SHARE = 0.01  # of outliers: below, what is divided by π̂ is noise
KEPT = np.linspace(0.3, 0.975, 28)  # shares of ID data that a threshold keeps
AT_95, FEWER = int(np.argmin(abs(KEPT - ID_QUANTILE))), int(np.argmin(abs(KEPT - 0.6)))
COMPARED = KEPT > 0.87  # thresholds by which methods are compared: around that of FPR95, several against noise
N_SPLITS, PENALTY = 10, 3  # standard errors: π̂ is read off where it is surely high
AT_ONCE = 4_000_000  # numbers in memory
MOST_NUMBERS = 4 * 10**8  # drawn for all resamples; with more samples, fewer resamples do
Pairs = Mapping[str, tuple[np.ndarray, np.ndarray]]

NO_HOLDOUT = "no wild data are held out (data.wild_holdout is 0)"


@dataclass(frozen=True)
class Estimate:
    """With its 90% interval; None where there is none."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Estimates:
    """Methods about which nothing can be said are left out."""

    pi: Estimate
    methods: dict[str, dict[str, Estimate]]  # auroc and fpr95
    chosen: str
    reason: str

    def content(self) -> dict[str, Any]:
        """The content of estimates.json."""
        return asdict(self)


def estimated(
    scores: Pairs,
    rng: np.random.Generator,
    incumbent: str,
    n_resamples: int = N_RESAMPLES,
) -> Estimates:
    """`scores`: of held-out ID data and of held-out wild data, by method. The incumbent stays unless one is better."""
    sizes = [min(map(len, side)) for side in zip(*scores.values(), strict=True)] if scores else [0, 0]
    if sizes[1] == 0:
        return Estimates(Estimate(), {}, incumbent, NO_HOLDOUT)
    if min(sizes) < LEAST:
        reason = (
            f"cannot tell: {sizes[0]:,} calibration and {sizes[1]:,} held-out wild samples are too few; at least "
            f"{LEAST} of each are needed (data.id_shares.calibration, data.wild_holdout), and some hundreds to say much"
        )
        return Estimates(Estimate(), {}, incumbent, reason)
    n_resamples = min(n_resamples, max(200, MOST_NUMBERS // (len(scores) * sum(sizes))))
    groups = _by_id_sample({name: (_defined(pair[0]), _defined(pair[1])) for name, pair in scores.items()})
    wild_counts = _counts(groups[0].wild.shape[1], n_resamples, rng)  # the same for all methods
    shares, most = None, None
    found, excess, drifted = {}, {}, []
    for group in groups:
        counts = _counts(group.known.shape[1], n_resamples, rng), wild_counts
        auc, passing, expected = resampled(group.known, group.wild, *counts)
        if shares is None or most is None:  # π̂ is one for all, by the methods of the first group
            shares, most = share_draws(group.known, group.wild, 1 - passing / expected, rng)
        base = float(expected[0, 0, AT_95])
        for column, name in enumerate(group.names):
            excess[name] = (expected[:, 0] - passing[:, column])[:, COMPARED].mean(axis=1)
            if drift_of(*(torch.from_numpy(-side[column]) for side in (group.known, group.wild))) > DRIFT:
                drifted.append(name)
                continue
            found[name] = {
                "auroc": _unmixed(auc[:, column], 0.5, shares, most),
                "fpr95": _unmixed(passing[:, column, AT_95], base, shares, most),
            }
    assert shares is not None
    assert most is not None
    pi = Estimate(*(float(np.clip(x, 0, 1)) for x in (shares[0], *_interval(shares, most))))
    chosen, reason = choose(excess, incumbent, drifted, sizes[1])
    if shares[0] < LEAST_SHARE or pi.low == 0:
        return Estimates(pi, {}, chosen, f"{reason}; {_cannot_tell(shares, sizes[1])}")
    return Estimates(pi, {name: found[name] for name in scores if name in found}, chosen, reason)


@dataclass(frozen=True)
class _Group:
    """Methods whose ID samples are the same."""

    names: list[str]
    known: Float[np.ndarray, "s n"]
    wild: Float[np.ndarray, "s m"]


def _by_id_sample(scores: Pairs) -> list[_Group]:
    """By the number of ID samples: most methods have calibration data, and one that was fitted on them has others."""
    names: dict[int, list[str]] = {}
    for name, (known, _) in scores.items():
        names.setdefault(len(known), []).append(name)
    return [_Group(own, *(np.stack([scores[name][i] for name in own]) for i in (0, 1))) for own in names.values()]


def _defined(scores: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """NaN is least like ID data. Of very many samples some: more do not change what the resamples say."""
    some = scores[:: -(-len(scores) // MOST_RESAMPLED)]
    return np.where(np.isnan(some), -math.inf, some).astype(float)


# -- the mixture, taken apart


def _unmixed(mixed: Float[np.ndarray, " b"], base: float, *shares: Float[np.ndarray, " b"]) -> Estimate:
    """x of OOD data, where the wild data have (1 − π) · base + π · x. The first resample is the sample itself."""
    mixed = _centred(mixed)
    own = [base + (mixed - base) / np.maximum(pi, LEAST_SHARE) for pi in shares]
    value, *interval = np.clip([base + (mixed[0] - base) / shares[0][0], *_interval(*own)], 0, 1)
    return Estimate(float(value), *map(float, interval))


def _centred(draws: Float[np.ndarray, " b"]) -> Float[np.ndarray, " b"]:
    """Around the first, the sample's own: resamples have ties, so their thresholds are off by half a rank."""
    return np.concatenate([draws[:1], draws[1:] - draws[1:].mean() + draws[0]])


def _interval(*draws: Float[np.ndarray, " b"]) -> tuple[float, float]:
    """The smallest that has the interval of each."""
    ends = [np.quantile(own[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) for own in draws]
    return min(end[0] for end in ends), max(end[1] for end in ends)


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


def _counts(n: int, n_resamples: int, rng: np.random.Generator) -> Int[np.ndarray, "b n"]:
    """How often each resample has each sample. The first is the sample itself."""
    drawn = rng.multinomial(n, np.full(n, 1 / n), size=n_resamples).astype(np.int32)
    return np.concatenate([np.ones((1, n), np.int32), drawn])


# -- π


def share_draws(
    known: Float[np.ndarray, "s n"],
    wild: Float[np.ndarray, "s m"],
    shares: Float[np.ndarray, "b s k"],
    rng: np.random.Generator,
) -> tuple[Float[np.ndarray, " b"], Float[np.ndarray, " b"]]:
    """π̂ in each resample, and what it may be at most: outliers that look like most ID data are not seen in π̂.

    At a threshold above which no outlier is, P(w ≥ t) = (1 − π) · P(ID ≥ t). Where some are, that gives less than π.
    So π̂ is one of `shares`, which are read off every method's thresholds: one that is high for sure. One half of the
    data says which, the other half how high: the highest of many noisy numbers would be too high. At most: the same
    where fewer ID data are kept, which is less certain.
    """
    values, draws = [], []
    for _ in range(N_SPLITS):
        halves = [rng.permutation(side.shape[1]) % 2 == 0 for side in (known, wild)]
        both = [_of_half(known[:, own], wild[:, other]) for own, other in (halves, [~half for half in halves])]
        for own, other in (both, both[::-1]):
            rest, (n, m) = 1 - own, (side.shape[1] / 2 for side in (known, wild))
            error = np.sqrt(np.maximum(rest * (1 - KEPT * rest) / m + rest**2 * (1 - KEPT) / n, 1e-12) / KEPT)
            method, kept = np.unravel_index((own - PENALTY * error).argmax(), own.shape)
            fewer = min(FEWER, kept)
            values.append([other[method, kept], other[method, fewer]])
            draws.append([shares[:, method, kept], shares[:, method, fewer]])
    draws = np.mean([draws[::2], draws[1::2]], axis=0)  # of both halves: split, pair, resample
    turn = np.arange(len(shares)) % N_SPLITS  # each resample takes the choices of one split: they differ, too
    pi, most = (
        _centred(np.concatenate([[value], own[turn, np.arange(len(shares))][1:]]))
        for value, own in zip(np.mean(values, axis=0), np.swapaxes(draws, 0, 1), strict=True)
    )
    return pi, np.maximum(pi, most)


def _of_half(known: Float[np.ndarray, "s n"], wild: Float[np.ndarray, "s m"]) -> Float[np.ndarray, "s k"]:
    once = [np.ones((1, side.shape[1]), np.int32) for side in (known, wild)]
    _, passing, expected = resampled(known, wild, *once)
    return 1 - passing[0] / expected[0]  # type: ignore[no-any-return]


def _cannot_tell(shares: Float[np.ndarray, " b"], n_wild: int) -> str:
    text = f"cannot tell FPR95 and AUROC: no share of outliers is surely above 0 in {n_wild:,} held-out wild samples"
    needed = n_wild * (2 * float(shares[1:].std()) / max(shares[0], LEAST_SHARE)) ** 2
    if shares[0] < LEAST_SHARE or needed <= n_wild:
        return text
    return f"{text}; about {math.ceil(needed / 100) * 100:,} would do, and more calibration samples help as much"


# -- the choice


def choose(
    excess: Mapping[str, Float[np.ndarray, " b"]], incumbent: str, drifted: list[str], n_wild: int
) -> tuple[str, str]:
    """The method to use, and why. Needs no π: more outliers below the thresholds are more of them found.

    `excess`: the share of wild data below a threshold less that of ID data, mean over thresholds: π · (TPR − FPR).
    """
    if incumbent not in excess:
        return incumbent, f"{incumbent} stays: it was not evaluated"
    if incumbent in drifted or len(drifted) > len(excess) / 2:
        return incumbent, (
            f"{incumbent} stays: the wild data differ from the calibration data as a whole, not only in outliers "
            f"(seen by {', '.join(drifted)}), so methods cannot be ranked; calibrate on samples from their source"
        )
    ends = {
        name: np.quantile((own - excess[incumbent])[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        for name, own in excess.items()
        if name not in drifted
    }
    better = [name for name, (low, _) in ends.items() if low > 0]
    left_out = f" (without {', '.join(drifted)}: the wild data differ by it as a whole)" if drifted else ""
    if not better:
        return (
            incumbent,
            f"{incumbent} stays: no method finds surely more in {n_wild:,} held-out wild samples{left_out}",
        )
    best = max(better, key=lambda name: float(excess[name][0]))
    low, high = (f"{100 * end:.1f}" for end in ends[best])
    more = f"{low} to {high}% more of the {n_wild:,} held-out wild samples (90% interval)"
    return best, f"{best} finds more outliers than {incumbent}: {more}{left_out}"
