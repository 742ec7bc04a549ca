"""The share π of OOD data in the wild, estimated from scores alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

# The values of the authors' code.
DELTA, GAMMA = 0.1, 0.01


@dataclass(frozen=True)
class MixtureEstimate:
    """π̂, the score it was read off, and the bound on the ID share that the score was chosen by."""

    pi: float
    score: str
    id_share_bound: float  # lower = the score separates better


def best_bin(id_scores: Float[Tensor, " n"], wild_scores: Float[Tensor, " m"]) -> tuple[float, float]:
    """Best Bin Estimation (Garg et al., NeurIPS 2021, Algorithm 1): π̂, and an upper bound on the ID share 1 − π.

    Scores are higher for outliers. For every c, the share of wild samples at or below c is at least 1 − π times
    that of ID samples, with equality where no outlier is below c. The quotient is taken at the c where it is
    smallest after a penalty for the noise, which grows as fewer ID samples are below c.
    """
    n, m = len(id_scores), len(wild_scores)
    if n == 0 or m == 0:
        raise ValueError("the share of OOD data cannot be estimated from no scores")
    id_sorted = id_scores.sort().values
    # between two ID scores only the numerator grows: the best c is at an ID score
    id_below = torch.searchsorted(id_sorted, id_sorted, right=True).double() / n
    wild_below = torch.searchsorted(wild_scores.sort().values, id_sorted, right=True).double() / m
    width = math.sqrt(math.log(4 / DELTA) / (2 * m)) + math.sqrt(math.log(4 / DELTA) / (2 * n))
    bound = (wild_below + (1 + GAMMA) * width) / id_below
    best = int(bound.argmin())
    return 1 - min(1.0, float(wild_below[best] / id_below[best])), float(bound[best])


def estimated_share(scores: Mapping[str, tuple[Tensor, Tensor]]) -> MixtureEstimate:
    """π̂ by the score that separates best: every score's ID share is too high, so the lowest bound is the best.

    `scores` has for every name the outlier scores of held-out ID data and of wild data.
    """
    estimates = []
    for name, (id_scores, wild_scores) in scores.items():
        pi, bound = best_bin(id_scores.double(), wild_scores.double())
        estimates.append(MixtureEstimate(pi, name, bound))
    return min(estimates, key=lambda estimate: estimate.id_share_bound)
