"""FPR95 and AUROC without labels, and the method that seems best, from held-out ID data c and held-out wild data w.

Wild data are a mixture: a share π of them is OOD. So for any score, with ID as positive and higher = more ID-like,

    AUC(c against w) = ½ (1 − π) + π · AUROC
    P(w ≥ t) = (1 − π) · P(ID ≥ t) + π · P(OOD ≥ t)

and AUROC and FPR95 follow from π. All intervals come from resamples of both samples, which all methods share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from salcli.sal.outlier_share import (
    AT_95,
    DRIFT,
    KEPT,
    LEVEL,
    MOST_RESAMPLED,
    centred,
    drift_of,
    interval,
    resample_counts,
    resampled,
    share_draws,
)

N_RESAMPLES = 1000
LEAST = 50  # samples on either side
LEAST_SHARE = 0.01  # of outliers: below, what is divided by π̂ is noise
COMPARED = KEPT > 0.87  # thresholds by which methods are compared: around that of FPR95, several against noise
# Standard errors. Beyond, a method is not chosen; and if the median of all methods is, all wild data have changed. On
# CIFAR-10 with five kinds of outliers (500 to 5,000 wild samples, π up to 0.3) that median was at most 2.1, with 30%
# near OOD 2.7; with JPEG, blur or noise on all images, 2.5 to 6.5 with 1,200 of them.
SOME_DRIFT = 2.2
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
    """The content of estimates.json. Methods about which nothing can be said are left out."""

    pi: Estimate
    methods: dict[str, dict[str, Estimate]]  # auroc and fpr95
    chosen: str
    reason: str


def estimated(
    scores: Pairs,
    rng: np.random.Generator,
    incumbent: str,
    n_resamples: int = N_RESAMPLES,
    labels: Mapping[str, str] | None = None,  # what the reason calls the methods
    baseline: str | None = None,
) -> Estimates:
    """`scores`: of held-out ID data and of held-out wild data, by method.

    The incumbent stays unless a method is surely better than the baseline, which is the incumbent itself if none is
    given.
    """
    baseline = baseline or incumbent
    label = dict(zip(scores, scores, strict=True)) | {incumbent: incumbent} | dict(labels or {})
    sizes = [min(map(len, side)) for side in zip(*scores.values(), strict=True)] if scores else [0, 0]
    if sizes[1] == 0:
        return Estimates(Estimate(), {}, incumbent, NO_HOLDOUT)
    if min(sizes) < LEAST:
        reason = (
            f"cannot tell: {sizes[0]:,} held-out ID and {sizes[1]:,} held-out wild samples are too few; at least "
            f"{LEAST} of each are needed (data.id_shares.calibration, data.wild_holdout), and some hundreds to say much"
        )
        return Estimates(Estimate(), {}, incumbent, reason)
    n_resamples = min(n_resamples, max(200, MOST_NUMBERS // (len(scores) * sum(sizes))))
    pairs = {name: (_defined(pair[0]), _defined(pair[1])) for name, pair in scores.items()}
    drifts = {name: drift_of(*pair) for name, pair in pairs.items()}
    drifted = [name for name, drift in drifts.items() if drift > DRIFT]
    if drifts.get(incumbent, 0.0) > SOME_DRIFT >= drifts.get(baseline, math.inf):
        incumbent = baseline
    if incumbent in drifted or len(drifted) > len(pairs) / 2 or np.median([*drifts.values()]) > SOME_DRIFT:
        most_moved = max(drifts, key=lambda name: drifts[name])
        reason = (
            f"cannot tell: the wild data differ from the calibration data as a whole, not only in some outliers (most "
            f"by {label[most_moved]}), so methods cannot be ranked and {label[incumbent]} stays; calibrate on samples "
            "from their source (data.calibration)"
        )
        return Estimates(Estimate(), {}, incumbent, reason)
    groups = _by_id_sample({name: pair for name, pair in pairs.items() if name not in drifted})
    wild_counts = resample_counts(len(pairs[groups[0][0]][1]), n_resamples, rng)  # the same for all methods
    shares, most = None, None
    found, excess = {}, {}
    for names in groups:
        known, wild = (np.stack([pairs[name][side] for name in names]) for side in (0, 1))
        auc, passing, expected = resampled(known, wild, resample_counts(known.shape[1], n_resamples, rng), wild_counts)
        if shares is None or most is None:  # π̂ is one for all, by the methods of the largest group
            shares, most = share_draws(known, wild, 1 - passing / expected, rng)
        base = float(expected[0, 0, AT_95])
        for column, name in enumerate(names):
            excess[name] = (expected[:, 0] - passing[:, column])[:, COMPARED].mean(axis=1)
            found[name] = {
                "auroc": _unmixed(auc[:, column], 0.5, shares, most),
                "fpr95": _unmixed(passing[:, column, AT_95], base, shares, most),
            }
    assert shares is not None
    assert most is not None
    pi = Estimate(*(float(np.clip(x, 0, 1)) for x in (shares[0], *interval(shares, most))))
    # a method that was trained on wild data may have learned what all of them have in common
    kept = incumbent, baseline
    excess = {name: own for name, own in excess.items() if drifts[name] <= SOME_DRIFT or name in kept}
    chosen, reason = choose(excess, incumbent, baseline, drifted, sizes[1], label)
    if shares[0] < LEAST_SHARE or pi.low == 0:
        return Estimates(pi, {}, chosen, f"{reason}; {_cannot_tell(shares, sizes[1])}")
    return Estimates(pi, {name: found[name] for name in scores if name in found}, chosen, reason)


def _by_id_sample(scores: Pairs) -> list[list[str]]:
    """By the number of ID samples, large groups first: what was fitted on calibration data has other ID samples."""
    names: dict[int, list[str]] = {}
    for name, (known, _) in scores.items():
        names.setdefault(len(known), []).append(name)
    return sorted(names.values(), key=len, reverse=True)


def _defined(scores: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """NaN is least like ID data. Of very many samples some: more do not change what the resamples say."""
    some = scores[:: -(-len(scores) // MOST_RESAMPLED)]
    return np.where(np.isnan(some), -math.inf, some).astype(float)


# -- the mixture, taken apart


def _unmixed(mixed: Float[np.ndarray, " b"], base: float, *shares: Float[np.ndarray, " b"]) -> Estimate:
    """x of OOD data, where the wild data have (1 − π) · base + π · x. The first resample is the sample itself."""
    mixed = centred(mixed)
    own = [base + (mixed - base) / np.maximum(pi, LEAST_SHARE) for pi in shares]
    ends = np.clip([base + (mixed[0] - base) / shares[0][0], *interval(*own)], 0, 1)
    return Estimate(*map(float, ends))


def _cannot_tell(shares: Float[np.ndarray, " b"], n_wild: int) -> str:
    text = f"cannot tell FPR95 and AUROC: no share of outliers is surely above 0 in {n_wild:,} held-out wild samples"
    needed = n_wild * (2 * float(shares[1:].std()) / max(shares[0], LEAST_SHARE)) ** 2
    if shares[0] < LEAST_SHARE or needed <= n_wild:
        return text
    return f"{text}; about {math.ceil(needed / 100) * 100:,} would do, and more calibration samples help as much"


# -- the choice


def choose(
    excess: Mapping[str, Float[np.ndarray, " b"]],
    incumbent: str,
    baseline: str,
    drifted: list[str],
    n_wild: int,
    label: Mapping[str, str],
) -> tuple[str, str]:
    """The method to use, and why. Needs no π: more outliers below the thresholds are more of them found.

    Of those that find surely more than the baseline, the one that finds most; if none does, the incumbent. To ask that
    it is surely better than the incumbent would be too much where that is good, but not the best.

    `excess`: the share of wild data below a threshold less that of ID data, mean over thresholds: π · (TPR − FPR).
    """
    if incumbent not in excess:
        return incumbent, f"{label[incumbent]} stays: it was not evaluated"
    baseline = baseline if baseline in excess else incumbent
    others = [name for name in excess if name != baseline]
    more = np.array([excess[name] - excess[baseline] for name in others]).reshape(-1, len(excess[baseline]))
    spread = np.maximum(more[:, 1:].std(axis=1), 1e-12)
    # Of 15 to 30 methods some seem better by chance: the interval is one for all together.
    widest = np.abs(more[:, 1:] - more[:, 1:].mean(axis=1, keepdims=True)) / spread[:, None]
    margin = spread * np.quantile(widest.max(axis=0, initial=0.0), LEVEL)
    better = np.flatnonzero(more[:, 0] > margin)
    names = ", ".join(label[name] for name in drifted)
    left_out = f" (without {names}: all wild data differ by it)" if drifted else ""
    if not len(better):
        than = "" if baseline == incumbent else f" than {label[baseline]}"
        why = f"no method finds surely more{than} in {n_wild:,} held-out wild samples{left_out}"
        return incumbent, f"{label[incumbent]} stays: {why}"
    best = max(better, key=lambda i: float(more[i, 0]))
    low, high = (f"{100 * end:.1f}" for end in (more[best, 0] - margin[best], more[best, 0] + margin[best]))
    found = f"{low} to {high}% more of the {n_wild:,} held-out wild samples (90% interval, all methods at once)"
    return others[best], f"{label[others[best]]} finds more outliers than {label[baseline]}: {found}{left_out}"
