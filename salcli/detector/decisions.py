"""Conformal p-values, and what they decide: which samples of a batch are OOD, and whether a stream has changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from salcli.errors import UsageMistakeError

Floats = NDArray[np.float64]

BLOCK = 1024  # samples of a stream that are compared with each other at once
AT_ONCE = 32  # bets before the stakes are measured in a new unit
JUMP = 0.01  # share of the stakes that is dealt out again with each sample
POWERS = np.array([0.25, 0.5, 0.75])  # bets on small p-values: some samples are outliers
SLOPES = np.array([-1.0, -0.5, 0.5, 1.0])  # bets on all p-values having become smaller, or larger


def p_values(sorted_calibration: NDArray[Any], scores: NDArray[Any]) -> Floats:
    """Conformal p-values: (1 + number of calibration scores that are at most as high) / (c + 1).

    For data that are exchangeable with the calibration data, the chance of a p-value of at most α is at most α.
    """
    n_at_most = np.searchsorted(sorted_calibration, scores, side="right")
    n_at_most[np.isnan(scores)] = 0  # NaN sorts last, but is least like ID data
    p: Floats = (1 + n_at_most) / (len(sorted_calibration) + 1)
    return p


# --- false discoveries


def check_fdr(fdr: float, n_calibration: int) -> None:
    """Refuse a level at which nothing could ever be flagged."""
    if not 0 < fdr < 1:
        raise UsageMistakeError(
            f"the false discovery rate must be greater than 0 and less than 1, got {fdr:g}; for example 0.1"
        )
    if _least_flagged(1, n_calibration, fdr) > 1:
        raise UsageMistakeError(
            f"a false discovery rate of {fdr:g} needs at least {_enough(1, fdr):,} calibration samples, and this "
            f"detector has {n_calibration:,}: none of its p-values is below 1/{n_calibration + 1:,}; "
            "ask for a higher rate, or give data.id_shares.calibration a larger share"
        )


def false_discovery_cutoff(p_values: Floats, fdr: float) -> float:
    """The largest p-value that is flagged, by the procedure of Benjamini and Hochberg; 0 if none is.

    Conformal p-values share the calibration sample, but depend on each other in a way that the procedure allows: among
    the flagged samples, at most a share `fdr` is ID on average (Bates et al., Annals of Statistics 2023).
    """
    from scipy.stats import false_discovery_control  # 0.6 s that other commands do without

    if len(p_values) == 0:
        return 0.0
    adjusted = false_discovery_control(p_values)
    return float(p_values[adjusted <= fdr * (1 + 1e-12)].max(initial=0.0))  # 0.1 · 3 is more than 0.3 in floating point


def too_few_to_flag(n_samples: int, n_calibration: int, fdr: float) -> str:
    """Why few outliers cannot be flagged in a batch of this size, and what would do; empty if even one can be."""
    least = _least_flagged(n_samples, n_calibration, fdr)
    if least <= 1:
        return ""
    return (
        f"with {n_calibration:,} calibration samples no p-value is below 1/{n_calibration + 1:,}, so fewer than "
        f"{least:,} outliers among {n_samples:,} samples cannot be flagged at a false discovery rate of {fdr:g}; "
        f"{_enough(n_samples, fdr):,} would do for one outlier"
    )


def _least_flagged(n_samples: int, n_calibration: int, fdr: float) -> int:
    """Benjamini and Hochberg flag k of m samples if their p-values are at most fdr · k / m."""
    return math.ceil(n_samples / (fdr * (n_calibration + 1)) - 1e-9)


def _enough(n_samples: int, fdr: float) -> int:
    return math.ceil(n_samples / fdr - 1e-9) - 1


def holm(p_values: Floats) -> Floats:
    """Adjusted for their number by Holm's method, which holds however they depend on each other."""
    order = np.argsort(p_values)
    adjusted = np.empty(len(p_values))
    factors = np.arange(len(p_values), 0, -1)
    adjusted[order] = np.minimum(1, np.maximum.accumulate(p_values[order] * factors))
    return adjusted


# --- changes of a stream


def online_p_values(reference: NDArray[Any], stream: NDArray[Any], rng: np.random.Generator) -> Floats:
    """Smoothed conformal p-values of each sample against the reference *and all samples before it*.

    The rank of a sample among those is uniform and independent of all earlier ranks if all are exchangeable, so these
    p-values are independent and uniform (Vovk, Nouretdinov and Gammerman, ICML 2003). Against a fixed sample they
    would not be: they would all share its accidents, and a long stream would find them out.
    """
    p = np.empty(len(stream))
    past = np.sort(reference)
    for start in range(0, len(stream), BLOCK):
        block = stream[start : start + BLOCK]
        n = len(block)
        is_earlier = np.tri(n, k=-1, dtype=bool)
        n_below, n_up_to = (np.searchsorted(past, block, side=side) for side in ("left", "right"))
        n_equal = n_up_to - n_below + ((block == block[:, None]) & is_earlier).sum(1) + 1  # itself
        n_below = n_below + ((block < block[:, None]) & is_earlier).sum(1)
        chance = 1 - rng.random(n)  # never 0
        p[start : start + n] = (n_below + chance * n_equal) / (len(past) + 1 + np.arange(n))
        past = np.sort(np.concatenate([past, block]), kind="stable")
    return p


def log_wealth(p_values: NDArray[Any], advance: Callable[[int], None] = lambda n: None) -> Floats:
    """log10 of the conformal test martingale after each p-value; any leading axes are separate streams.

    It is the capital of a gambler who starts with 1 and bets against uniform p-values. While they are independent and
    uniform, the chance that it ever reaches 1/α is at most α (Ville's inequality), however long one watches.

    The bets: κ p^(κ−1) (Vovk, Nouretdinov and Gammerman, ICML 2003) and 1 + ε (p − ½), between which stakes jump as in
    the Simple Jumper (Vovk et al., "Retrain or not retrain", COPA 2021). Stakes come from a reserve of which
    1/(1 + log(1 + t)) is left after t samples, so that a late change still finds money to bet with. `advance` is told
    how many samples are done.
    """
    n_bets, n, streams = len(POWERS) + len(SLOPES), p_values.shape[-1], p_values.shape[:-1]
    reserve = 1 / (1 + np.log1p(np.arange(n + 1)))
    released = (reserve[:-1] - reserve[1:]) / n_bets
    stakes, total = np.zeros((*streams, n_bets)), np.zeros((*streams, 1))
    log_unit = np.zeros((*streams, 1))  # of the stakes: capital may grow beyond any number
    found = np.empty(p_values.shape)
    for start in range(0, n, AT_ONCE):
        p = p_values[..., start : start + AT_ONCE, None]
        factors = np.concatenate([POWERS * p ** (POWERS - 1), 1 + SLOPES * (p - 0.5)], axis=-1)
        unit, stop = np.exp(-log_unit), start + p.shape[-2]
        for t in range(start, stop):
            stakes *= 1 - JUMP
            stakes += JUMP / n_bets * total + released[t] * unit
            stakes *= factors[..., t - start, :]
            total = stakes.sum(-1, keepdims=True)
            found[..., t] = total[..., 0]
        found[..., start:stop] = log_unit + np.log(found[..., start:stop] + reserve[start + 1 : stop + 1] * unit)
        stakes /= total
        log_unit, total = log_unit + np.log(total), np.ones_like(total)
        advance(stop - start)
    return found / math.log(10)
