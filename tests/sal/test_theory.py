"""What the theorems speak of, against slow and obvious computations."""

import math

import numpy as np
import pytest
import torch
from helpers.representations import random_factors
from hypothesis import given
from hypothesis import strategies as st

from salcli.sal import theory
from salcli.sal.gradients import mean_gradient
from salcli.sal.spectrum import CentredGradients, top_directions
from salcli.sal.tau import separation_errors


def normal(seed: int, n: int, mean: float = 0.0) -> torch.Tensor:
    return mean + torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(0, 10_000), st.integers(2, 40), st.integers(2, 40))
def test_zeta_is_the_norm_of_the_difference_of_the_dense_mean_gradients(seed: int, n: int, m: int) -> None:
    P, Q = random_factors(n, 3, 5, seed), random_factors(m, 3, 5, seed + 1)
    dense = [factors.dense().double() for factors in (P, Q)]
    found = theory.discrepancy(theory.gradient_moments(P), theory.gradient_moments(Q))
    assert found.zeta == pytest.approx(float((dense[0].mean(0) - dense[1].mean(0)).norm()), rel=1e-6)
    noise = sum(float(one.var(0).sum()) / len(one) for one in dense)
    assert found.noise == pytest.approx(math.sqrt(noise), rel=1e-5)
    assert math.isnan(theory.gradient_moments(P[:1]).mean_square_error), "one sample has no noise estimate"


def test_the_condition_is_that_of_table_5() -> None:
    shown = [round(theory.required_discrepancy(pi), 2) for pi in (0.05, 0.1, 0.2, 0.5, 0.9, 1.0)]
    assert shown == [0.23, 0.32, 0.45, 0.71, 0.96, 1.01]
    assert theory.outlier_mean_bound(2.0, 0.5) == pytest.approx(0.98 * 4 / 0.5)


def test_the_pairwise_distance_is_affine_in_pi_with_an_offset_and_definition_2_has_none() -> None:
    """The slow truth is a double loop. Only the first tells apart two samples of one distribution."""
    P, inliers, outliers = (normal(seed, 600, mean).reshape(-1, 3) for seed, mean in ((0, 0.0), (1, 0.0), (2, 4.0)))
    slow = np.mean([[float((p - q).norm()) for q in outliers[:9]] for p in P[:7]])
    assert theory.mean_pairwise_distance(P[:7], outliers[:9]) == pytest.approx(slow)
    offset, end = (theory.mean_pairwise_distance(P, one) for one in (inliers, outliers))
    half = theory.mean_pairwise_distance(P, torch.cat([inliers, outliers]))
    assert half == pytest.approx((offset + end) / 2)
    assert offset > 2 > float((P.mean(0) - inliers.mean(0)).norm()) * 10


SCORES = st.lists(st.floats(0, 100), min_size=1, max_size=20)


@given(tau=SCORES, at=st.floats(0, 1), slack=st.floats(1, 3))
def test_no_more_outliers_are_missed_than_the_corrected_bound_allows(tau: list[float], at: float, slack: float) -> None:
    """For any scores, any T below their upper bound, and any lower bound on their mean."""
    scores, largest = np.array(tau), slack * max(tau)
    threshold, missed = at * max(tau), float(np.mean(np.array(tau) <= at * max(tau)))
    assert missed <= theory.missed_bound(float(scores.mean()), largest, threshold) + 1e-9
    assert missed <= theory.missed_bound(float(scores.mean()) / slack, largest, threshold) + 1e-9
    if 0 < largest <= 1 and threshold < largest:
        assert missed <= theory.printed_main_error(float(scores.mean()), largest, threshold) + 1e-9


def test_the_printed_main_error_is_no_bound_where_scores_exceed_1_and_the_corrected_one_is_tight() -> None:
    """Seven of ten outliers with τ = 0, three with τ = 4: a mean above 1, so δ(T) = 0."""
    assert theory.printed_main_error(1.2, largest=4.0, threshold=0.0) == 0
    assert theory.missed_bound(1.2, largest=4.0, threshold=0.0) == pytest.approx(0.7)
    assert math.isnan(theory.missed_bound(math.nan, 4.0, 0.0)), "the mean is not known where there are no outliers"
    for scale in (0.01, 1.0, 100.0):  # of features, say
        assert theory.missed_bound(1.2 * scale, 4 * scale, 0.5 * scale) == pytest.approx(0.8)


@given(st.integers(0, 10_000), st.integers(3, 30))
def test_gradients_are_drawn_at_their_own_length_and_angle(seed: int, n: int) -> None:
    wild, id_train = random_factors(n, 3, 5, seed), random_factors(9, 3, 5, seed + 1)
    reference = mean_gradient(id_train)[None]
    G = CentredGradients(wild, reference)
    v = top_directions([(G, 1.0)], 1)
    centred = wild.dense().double() - reference.flatten(1)
    groups = torch.stack([torch.arange(n) < 2, torch.arange(n) >= 2])
    of_means = torch.stack([centred[group].mean(0) for group in groups])
    View = theory.GradientView
    for view, dense in ((View.of(G, v), centred), (View.of_means(G, v, groups), of_means)):
        length, cosine = dense.norm(dim=1), (dense @ v.flatten()).abs() / dense.norm(dim=1)
        torch.testing.assert_close(torch.hypot(view.along, view.across), length, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.rad2deg(cosine.clamp(max=1).acos()), view.angle, rtol=1e-3, atol=0.05)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1))
def test_contamination_is_the_share_of_id_data_among_the_candidates(samples: list[tuple[bool, bool]]) -> None:
    is_candidate, is_ood = (torch.tensor(column) for column in zip(*samples, strict=True))
    errors = separation_errors(is_candidate, is_ood)
    found = theory.contamination(errors.err_in, *(float(one.double().mean()) for one in (is_ood, is_candidate)))
    assert found == pytest.approx(1 - errors.precision, nan_ok=True)


@given(st.integers(0, 10_000), st.integers(1, 30))
def test_the_error_curve_is_the_errors_at_every_threshold(seed: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    scores = torch.from_numpy(rng.integers(0, 5, m).astype(float))  # with ties
    is_ood = torch.from_numpy(rng.random(m) < 0.5)
    threshold = scores.unique()
    curve = theory.error_curve(scores, is_ood, threshold)
    for at, T in enumerate(threshold):
        slow = separation_errors(scores > T, is_ood)
        np.testing.assert_allclose((curve.err_in[at], curve.err_out[at]), (slow.err_in, slow.err_out), atol=1e-12)


def test_the_estimated_errors_are_near_the_true_ones() -> None:
    wild, is_ood = torch.cat([normal(0, 8_000), normal(1, 2_000, 2.0)]), torch.arange(10_000) >= 8_000
    threshold = torch.linspace(-2, 4, 30, dtype=torch.float64)
    true = theory.error_curve(wild, is_ood, threshold)
    found = theory.estimated_error_curve(wild, normal(2, 8_000), 0.2, threshold)
    torch.testing.assert_close(found.err_in, true.err_in, atol=0.02, rtol=0)
    torch.testing.assert_close(found.err_out, true.err_out, atol=0.05, rtol=0)
    assert theory.estimated_error_curve(wild, normal(2, 9), 0.0, threshold).err_out.isnan().all(), "there is no outlier"
