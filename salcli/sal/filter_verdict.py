"""How many outliers a filter found, without labels. Higher = outlier; calibration scores are of held-out ID data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from salcli.sal.outlier_share import DRIFT, best_bin, drift_of


@dataclass(frozen=True)
class Verdict:
    """How many candidates are more than ID data alone would give, and what share of the candidates are outliers.

    Everything is estimated from the calibration sample and the wild sample alone.
    """

    n_candidates: int
    expected: float  # candidates if all wild data were ID data
    margin: float  # half of the 95% interval of `beyond`
    pi: float  # estimated share of outliers in the wild data
    precision: float  # estimated share of outliers among the candidates
    drift: float  # how much the scores of all wild data have moved, in standard errors; see `drift_of`

    @property
    def beyond(self) -> float:
        return self.n_candidates - self.expected

    @property
    def found_something(self) -> bool:
        return self.beyond > self.margin

    @property
    def looks_like_drift(self) -> bool:
        return self.drift > DRIFT


def verdict(calibration: Float[Tensor, " n"], wild: Float[Tensor, " m"], threshold: float) -> Verdict:
    """Of one separation. The interval has the noise of both samples: T was chosen on few calibration samples."""
    n, m = len(calibration), len(wild)
    n_candidates, n_above = int((wild > threshold).sum()), int((calibration > threshold).sum())
    p = (n_above + 1) / (n + 1)  # a new ID sample is above a calibration score with this probability
    share = n_candidates / m
    variance = m * max(share, p) * (1 - max(share, p)) + m**2 * p * (1 - p) / (n + 2)
    pi, _ = best_bin(calibration, wild)
    pi = max(pi, min(1.0, (share - p) / (1 - p))) if p < 1 else pi  # as many as were found
    false = (1 - pi) * m * p
    precision = max(0.0, 1 - false / n_candidates) if n_candidates else math.nan
    return Verdict(
        n_candidates=n_candidates,
        expected=m * p,
        margin=1.96 * math.sqrt(variance),
        pi=pi,
        precision=precision,
        drift=drift_of(-calibration.numpy(), -wild.numpy()),
    )
