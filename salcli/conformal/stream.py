"""Whether a stream of samples has changed: online p-values, and the conformal test martingale on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BLOCK = 1024  # samples of a stream that are compared with each other at once
AT_ONCE = 32  # bets before the stakes are measured in a new unit
JUMP = 0.01  # share of the stakes that is dealt out again with each sample
POWERS = np.array([0.25, 0.5, 0.75])  # bets on small p-values: some samples are outliers
SLOPES = np.array([-1.0, -0.5, 0.5, 1.0])  # bets on all p-values having become smaller, or larger


def online_p_values(reference: NDArray[Any], stream: NDArray[Any], rng: np.random.Generator) -> Floats:
    """Smoothed conformal p-values of each sample against the reference *and all samples before it*.

    The rank of a sample among those is uniform and independent of all earlier ranks if all are exchangeable, so these
    p-values are independent and uniform (Vovk, Nouretdinov and Gammerman, ICML 2003). Against a fixed sample they
    would not be: they would all share its accidents, and a long stream would find them out.
    """
    p = np.empty(len(stream))
    past, stream = np.sort(-reference), -stream  # from the most OOD on
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
