"""What the theorems are about, measured on data: the discrepancy ζ, its condition, bounds, and the errors against T.

`docs/theory.md` says which data stand for which distribution, and derives the bound on ERR_out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from salcli.sal.gradients import FactorSource, mean_gradient
from salcli.sal.spectrum import CentredGradients

BLOCK = 1024  # rows of a matrix of distances at a time


@dataclass(frozen=True)
class GradientMoments:
    """∇R of a sample (the mean gradient), and how far that mean is from the distribution's."""

    mean: Float[Tensor, "k d"]
    mean_square_error: float  # E‖sample mean − true mean‖², estimated


@dataclass(frozen=True)
class Discrepancy:
    """Definition 2, from two samples. `noise` is what two samples of one distribution would show."""

    zeta: float
    noise: float  # root of the expected square

    @property
    def without_noise(self) -> float:
        """The distributions' own discrepancy: E ζ² of the samples is its square plus that of the noise."""
        return math.sqrt(max(0.0, self.zeta**2 - self.noise**2))


def gradient_moments(source: FactorSource) -> GradientMoments:
    """Mean and mean square error, streamed. NaN error for one sample."""
    mean, n = mean_gradient(source), len(source)
    squares = sum(float(chunk.squared_norms().sum()) for chunk in source.chunks())
    # rounding may leave the variance of equal gradients a hair below zero
    variance = max(0.0, squares - n * float(mean.square().sum())) / (n - 1) if n > 1 else math.nan
    return GradientMoments(mean, variance / n)


def discrepancy(P: GradientMoments, Q: GradientMoments) -> Discrepancy:
    """Definition 2: d_w(P, Q) = ‖∇R_P(h_w, ĥ) − ∇R_Q(h_w, ĥ)‖₂, gradients taken with predicted labels ĥ.

    The norm is taken last, of the difference of two means: gradients that cancel each other count for nothing.
    """
    return Discrepancy(
        zeta=float((P.mean - Q.mean).norm()),
        noise=math.sqrt(P.mean_square_error + Q.mean_square_error),
    )


def mean_pairwise_distance(P: Float[Tensor, "n d"], Q: Float[Tensor, "m d"]) -> float:
    """What the authors' code prints as ζ: the mean of the distances, not the distance of the means.

    With Q = (1 − π) ID + π OOD it is affine in π, and at π = 0 it is the mean distance of two ID gradients, not 0.
    """
    P, Q = P.double(), Q.double()
    sums = [float(torch.cdist(P[start : start + BLOCK], Q).sum()) for start in range(0, len(P), BLOCK)]
    return math.fsum(sums) / (len(P) * len(Q))


def required_discrepancy(pi: float) -> float:
    """1.011 √π: from here on the main error vanishes (Theorem 2, with the optimal ID risk left out as in Table 5)."""
    return 1.011 * math.sqrt(pi)


def outlier_mean_bound(zeta: float, pi: float) -> float:
    """0.98 ζ² / π: what Theorem 4's bound on the mean τ of wild OOD data tends to (η → 1, no ID risk, much data)."""
    return 0.98 * zeta**2 / pi


def missed_bound(mean: float, largest: float, threshold: float) -> float:
    """Most outliers that can have τ ≤ T, if their mean τ is at least `mean` and none is above `largest`.

    Markov's inequality for largest − τ, which is not negative.
    """
    if math.isnan(mean):  # which max() would swallow
        return math.nan
    return 1.0 if threshold >= largest else min(1.0, max(0.0, largest - mean) / (largest - threshold))


def printed_main_error(mean: float, largest: float, threshold: float) -> float:
    """δ(T) as Theorem 1 prints it. A bound only where `largest` (M′) is at most 1: it takes E[τ] for E[τ / M′]."""
    if math.isnan(mean):
        return math.nan
    return math.inf if threshold >= largest else max(0.0, 1 - mean) / (1 - threshold / largest)


def contamination(err_in: float, pi: float, share: float) -> float:
    """ID data among the candidates, 1 − precision; `share` of the wild data are candidates. NaN without candidates."""
    id_share = (1 - pi) * err_in if pi < 1 else 0.0
    return min(1.0, id_share / share) if share else math.nan


@dataclass(frozen=True)
class GradientView:
    """Gradients as Figure 1 draws them, around ∇̄: their part along v, whose square is τ, and the length of the rest.

    So length, projection and angle to v of each gradient are exact, in any dimension.
    """

    along: Float[Tensor, " n"]
    across: Float[Tensor, " n"]

    @property
    def angle(self) -> Float[Tensor, " n"]:
        """To v, whose sign is arbitrary; in degrees."""
        return torch.rad2deg(torch.atan2(self.across, self.along.abs()))

    @classmethod
    def of(cls, G: CentredGradients, v: Float[Tensor, "1 k d"]) -> GradientView:
        """Of every row, streamed: ‖g − ∇̄‖² = ‖g‖² − 2 ⟨g − ∇̄, ∇̄⟩ − ‖∇̄‖². `G` has one ∇̄."""
        squares = torch.cat([chunk.squared_norms() for chunk in G.source.chunks()])
        along, with_reference = G.project(torch.cat([v, G.reference])).T
        squares = squares - 2 * with_reference - G.reference.square().sum()
        return cls(along, (squares - along.square()).clamp(min=0).sqrt())

    @classmethod
    def of_means(cls, G: CentredGradients, v: Float[Tensor, "1 k d"], groups: Bool[Tensor, "g n"]) -> GradientView:
        """Of the mean gradient of each group; NaN where a group is empty."""
        means = G.combine((groups.double() / groups.sum(dim=1, keepdim=True)).T)  # g, K, D
        along = (means * v).sum(dim=(1, 2))
        return cls(along, (means - along[:, None, None] * v).flatten(1).norm(dim=1))


@dataclass(frozen=True)
class ErrorCurve:
    """ERR_in and ERR_out (Theorem 1) as functions of the threshold T; NaN where a side is empty."""

    threshold: Float[Tensor, " t"]
    err_in: Float[Tensor, " t"]
    err_out: Float[Tensor, " t"]


def error_curve(wild: Float[Tensor, " m"], is_ood: Bool[Tensor, " m"], threshold: Float[Tensor, " t"]) -> ErrorCurve:
    """The true errors of {τ > T} for every T."""
    return ErrorCurve(threshold, _share_above(wild[~is_ood], threshold), 1 - _share_above(wild[is_ood], threshold))


def estimated_error_curve(
    wild: Float[Tensor, " m"], calibration: Float[Tensor, " n"], pi: float, threshold: Float[Tensor, " t"]
) -> ErrorCurve:
    """The same without the truth, from held-out ID scores and an estimate of π.

    Held-out ID data are exchangeable with wild ID data, so they show ERR_in; what is then left of the wild share
    above T, (1 − π) ERR_in + π (1 − ERR_out), is ERR_out.
    """
    err_in = _share_above(calibration, threshold)
    if pi == 0:
        return ErrorCurve(threshold, err_in, torch.full_like(err_in, math.nan))
    found = (_share_above(wild, threshold) - (1 - pi) * err_in) / pi
    return ErrorCurve(threshold, err_in, 1 - found.clamp(0, 1))


def _share_above(scores: Float[Tensor, " n"], threshold: Float[Tensor, " t"]) -> Float[Tensor, " t"]:
    at_or_below = torch.searchsorted(scores.sort().values, threshold, right=True)
    return 1 - at_or_below.double() / len(scores) if len(scores) else torch.full_like(threshold, math.nan)
