"""Metrics equal scikit-learn's and slow definitions, with ties, one sample and infinities; NaN is an error."""

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from salcli.errors import MetricsError
from salcli.sal.filter import score_threshold
from salcli.sal.metrics import fpr_at_tpr, is_below, ood_metrics, p_values, roc_points, threshold_that_keeps

# few different values, so that ties are common, or many; and infinities, which a network can also give
VALUES = st.integers(-3, 3).map(float) | st.floats(-1e6, 1e6) | st.sampled_from([math.inf, -math.inf])
SCORES = st.lists(VALUES, min_size=1, max_size=60).map(np.array)
SHARES = st.fractions(Fraction(1, 100), 1, max_denominator=100)


def for_sklearn(id_scores: np.ndarray, ood_scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Labels and scores. scikit-learn refuses infinities, so numbers beyond all others stand for them."""
    is_id = np.repeat([1, 0], [len(id_scores), len(ood_scores)])
    return is_id, np.nan_to_num(np.concatenate([id_scores, ood_scores]), posinf=1e9, neginf=-1e9)


# --- thresholds


@given(id_scores=SCORES, ood_scores=SCORES, share=SHARES)
def test_the_threshold_is_the_highest_that_keeps_its_share_of_id_scores(
    id_scores: np.ndarray, ood_scores: np.ndarray, share: Fraction
) -> None:
    """Slow reference: try every ID score as the threshold, in exact arithmetic."""
    enough = [x for x in id_scores if Fraction(int((id_scores >= x).sum()), len(id_scores)) >= share]
    threshold = threshold_that_keeps(id_scores, float(share))
    assert threshold == max(enough)
    missed = np.mean(~is_below(ood_scores, threshold))
    assert fpr_at_tpr(id_scores, ood_scores, float(share)) == missed == np.mean(ood_scores >= max(enough))


@given(scores=SCORES, share=SHARES)
def test_negated_it_is_the_lowest_that_keeps_its_share_of_outlier_scores(scores: np.ndarray, share: Fraction) -> None:
    enough = [x for x in scores if Fraction(int((scores <= x).sum()), len(scores)) >= share]
    filters = score_threshold(torch.from_numpy(scores), float(share))
    assert filters == -threshold_that_keeps(-scores, float(share)) == min(enough)


@pytest.mark.parametrize("n", [1, 7, 19, 20, 21, 40, 100, 999, 1000, 2000, 10_000, 25_000])
def test_exactly_as_many_scores_are_kept_as_needed(n: int) -> None:
    for percent in range(1, 101):  # 0.55 · 20 is not 11 in floating point
        expected = n - math.ceil(Fraction(percent * n, 100)) + 1
        assert threshold_that_keeps(np.arange(1.0, n + 1), percent / 100) == expected


@given(id_scores=SCORES, ood_scores=SCORES)
def test_fpr95_is_scikit_learns_at_the_first_threshold_that_keeps_95_percent(
    id_scores: np.ndarray, ood_scores: np.ndarray
) -> None:
    fpr, tpr, _ = roc_curve(*for_sklearn(id_scores, ood_scores), drop_intermediate=False)
    assert fpr_at_tpr(id_scores, ood_scores) == pytest.approx(fpr[np.argmax(tpr >= 0.95)])
    assert ood_metrics(id_scores, ood_scores).fpr95 == fpr_at_tpr(id_scores, ood_scores)


# --- areas


@given(id_scores=SCORES, ood_scores=SCORES)
def test_auroc_is_the_share_of_pairs_in_the_right_order(id_scores: np.ndarray, ood_scores: np.ndarray) -> None:
    """Slow reference: compare every ID sample with every OOD sample; a tie counts half."""
    pairs = list(product(id_scores, ood_scores))
    expected = sum((one > other) + 0.5 * (one == other) for one, other in pairs) / len(pairs)
    found = ood_metrics(id_scores, ood_scores)
    assert found.auroc == pytest.approx(expected)
    assert found.auroc == pytest.approx(roc_auc_score(*for_sklearn(id_scores, ood_scores)))


def slow_aupr(positive: np.ndarray, negative: np.ndarray) -> float:
    """Σ precision · Δrecall over falling thresholds, without interpolation."""
    area, recall = 0.0, 0.0
    for threshold in sorted({*positive, *negative}, reverse=True):
        n_right, n_wrong = (positive >= threshold).sum(), (negative >= threshold).sum()
        area += (n_right / len(positive) - recall) * n_right / (n_right + n_wrong)
        recall = n_right / len(positive)
    return area


@given(id_scores=SCORES, ood_scores=SCORES)
def test_aupr_is_the_area_under_precision_and_recall_of_each_side(
    id_scores: np.ndarray, ood_scores: np.ndarray
) -> None:
    found = ood_metrics(id_scores, ood_scores)
    is_id, scores = for_sklearn(id_scores, ood_scores)
    assert found.aupr_in == pytest.approx(slow_aupr(id_scores, ood_scores))
    assert found.aupr_in == pytest.approx(average_precision_score(is_id, scores))
    assert found.aupr_out == pytest.approx(slow_aupr(-ood_scores, -id_scores))
    assert found.aupr_out == pytest.approx(average_precision_score(1 - is_id, -scores))


@given(id_scores=SCORES, ood_scores=SCORES)
def test_only_the_order_of_scores_counts(id_scores: np.ndarray, ood_scores: np.ndarray) -> None:
    assert ood_metrics(id_scores * 8, ood_scores * 8) == ood_metrics(id_scores, ood_scores)  # a power of two is exact


@settings(max_examples=30)
@given(scores=st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=40).map(np.array))
def test_single_precision_scores_give_the_same_metrics(scores: np.ndarray) -> None:
    single = scores.astype(np.float32)
    assert ood_metrics(single[::2], single[1::2]) == ood_metrics(scores[::2], scores[1::2])
    assert ood_metrics(single[::2], scores[1::2]) == ood_metrics(scores[::2], scores[1::2])


@given(id_scores=SCORES, ood_scores=SCORES, n_points=st.integers(2, 30))
def test_points_of_the_roc_are_the_best_that_each_fpr_allows(
    id_scores: np.ndarray, ood_scores: np.ndarray, n_points: int
) -> None:
    """Slow reference: the highest TPR of all thresholds whose FPR is no higher."""
    grid, tpr = roc_points(id_scores, ood_scores, n_points)
    rates = [(np.mean(ood_scores >= t), np.mean(id_scores >= t)) for t in (*id_scores, *ood_scores)]
    for x, found in zip(grid, tpr, strict=True):
        allowed = [id_rate for ood_rate, id_rate in rates if ood_rate <= x + 1e-9]
        assert found == pytest.approx(max(allowed, default=0))
    assert (grid[0], grid[-1], tpr[-1]) == (0, 1, 1)


@pytest.mark.parametrize("metric", [fpr_at_tpr, ood_metrics, roc_points])
def test_nan_and_missing_scores_are_errors_that_say_where(metric: Callable[..., object]) -> None:
    fine, bad, none = np.array([1.0, 2.0, 3.0]), np.array([1.0, math.nan, math.nan, math.inf]), np.array([])
    for scores, message in ((bad, "2 of 4 {} scores are NaN"), (none, "no {} scores")):
        with pytest.raises(MetricsError, match=message.format("ID")):
            metric(scores, fine)
        with pytest.raises(MetricsError, match=message.format("OOD")):
            metric(fine, scores)


# --- p-values


def floats(values: list[int]) -> np.ndarray:
    return np.array(values, np.float32)


INTEGERS = st.lists(st.integers(-4, 4), min_size=1, max_size=40)


@given(calibration=INTEGERS, scores=INTEGERS)
def test_p_values_are_counted(calibration: list[int], scores: list[int]) -> None:
    found = p_values(np.sort(floats(calibration)), floats(scores))
    expected = [(1 + sum(one <= score for one in calibration)) / (len(calibration) + 1) for score in scores]
    np.testing.assert_allclose(found, expected, rtol=1e-15)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_chance_of_a_p_value_of_at_most_alpha_is_at_most_alpha(n: int) -> None:
    """Exactly: each of n + 1 exchangeable scores is equally likely to be the new one. Every order and tie is tried."""
    for values in product(range(n + 1), repeat=n + 1):
        p = [
            p_values(np.sort(floats([*values[:new], *values[new + 1 :]])), floats([values[new]]))[0]
            for new in range(n + 1)
        ]
        for k in range(1, n + 2):  # p-values are multiples of 1 / (n + 1), so no other α has to be tried
            n_at_most = sum(round(one * (n + 1)) <= k for one in p)
            assert n_at_most <= k
            if len(set(values)) == n + 1:
                assert n_at_most == k  # without ties the bound is tight


def test_nan_is_not_like_id_data() -> None:
    scores = np.array([np.nan, -np.inf, np.inf, 2], np.float32)
    calibration = floats([1, 2, 3])
    assert is_below(scores, threshold_that_keeps(calibration, 0.5)).tolist() == [True, True, False, False]
    assert p_values(calibration, scores).tolist() == [0.25, 0.25, 1, 0.75]
