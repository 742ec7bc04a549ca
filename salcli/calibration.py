"""What calibration scores of held-out ID data say about a new score. A higher score is more ID-like."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Scores = np.ndarray[Any, np.dtype[np.floating[Any]]]
ID_QUANTILE = 0.95  # of ID data are kept, unless someone asks for another share


def threshold_that_keeps(calibration: Scores, id_quantile: float) -> float:
    """The highest threshold with at least a share `id_quantile` of the calibration scores at or above it.

    The same convention as FPR95 (see metrics.py). What scores less is called OOD.
    """
    n_kept = max(1, math.ceil(id_quantile * len(calibration) - 1e-9))
    return float(np.sort(calibration)[len(calibration) - n_kept])


def is_below(scores: Scores, threshold: float) -> NDArray[np.bool_]:
    """Which scores are called OOD. What is no number is not like ID data either."""
    return ~(scores >= threshold)


def p_values(sorted_calibration: Scores, scores: Scores) -> NDArray[np.float64]:
    """Conformal p-values: (1 + calibration scores that are at most as high) / (n + 1).

    For data that are exchangeable with the calibration data, the chance of a p-value of at most α is at most α.
    """
    n_at_most = np.searchsorted(sorted_calibration, scores, side="right")
    n_at_most[np.isnan(scores)] = 0  # sorts last, but is least like ID data
    p: NDArray[np.float64] = (1 + n_at_most) / (len(sorted_calibration) + 1)
    return p
