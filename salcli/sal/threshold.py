"""The threshold T that separates candidate outliers (Section 3.1), and the errors of the separation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def score_threshold(calibration: Float[Tensor, " n"], quantile: float) -> float:
    """The smallest T with at least a share `quantile` of ID scores at or below it; candidates have τ > T."""
    rank = max(1, math.ceil(quantile * len(calibration) - 1e-9))
    return float(calibration.sort().values[rank - 1])


def working_quantiles(calibration: Float[Tensor, " n"], wild: Float[Tensor, " m"]) -> tuple[float, float] | None:
    """The range of quantiles (low, high] whose threshold leaves some candidates, but not only candidates."""
    low = float((calibration < wild.min()).double().mean())
    high = float((calibration < wild.max()).double().mean())
    return (low, high) if high > low else None


@dataclass(frozen=True)
class SeparationErrors:
    """ERR_in: share of wild ID data taken for outliers; ERR_out: share of wild OOD data missed (Theorem 1)."""

    err_in: float
    err_out: float


def separation_errors(is_candidate: Bool[Tensor, " m"], is_ood: Bool[Tensor, " m"]) -> SeparationErrors:
    """Compare the separation with the truth, which only an experiment knows. NaN where a side is empty."""
    return SeparationErrors(
        err_in=float(is_candidate[~is_ood].double().mean()) if (~is_ood).any() else math.nan,
        err_out=float((~is_candidate)[is_ood].double().mean()) if torch.any(is_ood) else math.nan,
    )
