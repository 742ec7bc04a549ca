"""What the theorems speak of, against slow and obvious computations."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from salcli.sal.filter import separation_errors
from salcli.sal.gradients import Factors
from salcli.sal.theory import (
    discrepancy,
    error_curve,
    estimated_error_curve,
    gradient_moments,
    outlier_mean_bound,
    required_discrepancy,
)


def normal(seed: int, n: int, mean: float = 0.0) -> torch.Tensor:
    return mean + torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- ζ


@given(st.integers(0, 10_000), st.integers(2, 40), st.integers(2, 40))
def test_zeta_is_the_norm_of_the_difference_of_the_dense_mean_gradients(
    random_factors: Callable[..., Factors], seed: int, n: int, m: int
) -> None:
    P, Q = random_factors(n, 3, 5, seed), random_factors(m, 3, 5, seed + 1)
    dense = [factors.dense().double() for factors in (P, Q)]
    found = discrepancy(gradient_moments(P), gradient_moments(Q))
    assert found.zeta == pytest.approx(float((dense[0].mean(0) - dense[1].mean(0)).norm()), rel=1e-6)
    noise = sum(float(one.var(0).sum()) / len(one) for one in dense)
    assert found.noise == pytest.approx(math.sqrt(noise), rel=1e-5)
    assert math.isnan(gradient_moments(P[:1]).mean_square_error), "one sample has no noise estimate"


def test_the_condition_is_that_of_table_5() -> None:
    shown = [round(required_discrepancy(pi), 2) for pi in (0.05, 0.1, 0.2, 0.5, 0.9, 1.0)]
    assert shown == [0.23, 0.32, 0.45, 0.71, 0.96, 1.01]
    assert outlier_mean_bound(2.0, 0.5) == pytest.approx(0.98 * 4 / 0.5)


# --- errors against T


@given(st.integers(0, 10_000), st.integers(1, 30))
def test_the_error_curve_is_the_errors_at_every_threshold(seed: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    scores = torch.from_numpy(rng.integers(0, 5, m).astype(float))  # with ties
    is_ood = torch.from_numpy(rng.random(m) < 0.5)
    threshold = scores.unique()
    curve = error_curve(scores, is_ood, threshold)
    for at, T in enumerate(threshold):
        slow = separation_errors(scores > T, is_ood)
        np.testing.assert_allclose((curve.err_in[at], curve.err_out[at]), (slow.err_in, slow.err_out), atol=1e-12)


def test_the_estimated_errors_are_near_the_true_ones() -> None:
    wild, is_ood = torch.cat([normal(0, 8_000), normal(1, 2_000, 2.0)]), torch.arange(10_000) >= 8_000
    threshold = torch.linspace(-2, 4, 30, dtype=torch.float64)
    true = error_curve(wild, is_ood, threshold)
    found = estimated_error_curve(wild, normal(2, 8_000), 0.2, threshold)
    torch.testing.assert_close(found.err_in, true.err_in, atol=0.02, rtol=0)
    torch.testing.assert_close(found.err_out, true.err_out, atol=0.05, rtol=0)
    assert estimated_error_curve(wild, normal(2, 9), 0.0, threshold).err_out.isnan().all(), "there is no outlier"
