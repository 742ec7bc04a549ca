"""FPR95, AUROC and AUPR: equal to scikit-learn's, with ties, with one sample, with infinities; NaN is an error."""

from __future__ import annotations

import math
from dataclasses import astuple
from fractions import Fraction
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from salcli import metrics
from salcli.errors import MetricsError
from salcli.metrics import fpr_at_tpr, ood_metrics, roc_points

# few different values, so that ties are common, or many; and what a network can also give
VALUES = st.integers(-3, 3).map(float) | st.floats(-1e6, 1e6) | st.sampled_from([math.inf, -math.inf])
SCORES = st.lists(VALUES, min_size=1, max_size=60).map(lambda values: np.array(values))


def for_sklearn(id_scores: np.ndarray, ood_scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Labels and scores; scikit-learn does not take infinities, so numbers beyond all others stand for them."""
    is_id = np.repeat([1, 0], [len(id_scores), len(ood_scores)])
    return is_id, np.nan_to_num(np.concatenate([id_scores, ood_scores]), posinf=1e9, neginf=-1e9)


@given(id_scores=SCORES, ood_scores=SCORES)
def test_fpr95_is_scikit_learns_at_the_first_threshold_that_keeps_95_percent(
    id_scores: np.ndarray, ood_scores: np.ndarray
) -> None:
    fpr, tpr, _ = roc_curve(*for_sklearn(id_scores, ood_scores), drop_intermediate=False)
    assert fpr_at_tpr(id_scores, ood_scores) == pytest.approx(fpr[np.argmax(tpr >= 0.95)])
    assert ood_metrics(id_scores, ood_scores).fpr95 == fpr_at_tpr(id_scores, ood_scores)


@given(id_scores=SCORES, ood_scores=SCORES, percent=st.integers(1, 100))
def test_fpr_is_that_of_the_highest_threshold_that_keeps_enough_id_samples(
    id_scores: np.ndarray, ood_scores: np.ndarray, percent: int
) -> None:
    """The slow truth: try every ID score as the threshold, in exact arithmetic."""
    enough = [x for x in id_scores if Fraction(int((id_scores >= x).sum()), len(id_scores)) >= Fraction(percent, 100)]
    expected = np.mean(ood_scores >= max(enough))
    assert fpr_at_tpr(id_scores, ood_scores, percent / 100) == expected


@pytest.mark.parametrize("n", [1, 7, 19, 20, 21, 40, 100, 999, 1000, 2000, 10_000, 25_000])
def test_just_as_many_id_samples_are_kept_as_needed(n: int) -> None:
    """With ID scores 1 … n, the FPR of one OOD score says whether it is at or above the threshold."""
    id_scores = np.arange(1, n + 1, dtype=float)
    for percent in range(1, 101):  # 0.55 · 20 is not 11 in floating point
        threshold = n - math.ceil(Fraction(percent * n, 100)) + 1
        assert fpr_at_tpr(id_scores, np.array([float(threshold)]), percent / 100) == 1
        assert fpr_at_tpr(id_scores, np.array([threshold - 0.5]), percent / 100) == 0


@given(id_scores=SCORES, ood_scores=SCORES)
def test_auroc_is_the_share_of_pairs_in_the_right_order(id_scores: np.ndarray, ood_scores: np.ndarray) -> None:
    """The slow truth: compare every ID sample with every OOD sample; a tie is half right."""
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
def test_aupr_is_the_area_under_precision_and_recall_of_either_side(
    id_scores: np.ndarray, ood_scores: np.ndarray
) -> None:
    found = ood_metrics(id_scores, ood_scores)
    is_id, scores = for_sklearn(id_scores, ood_scores)
    assert found.aupr_in == pytest.approx(slow_aupr(id_scores, ood_scores))
    assert found.aupr_in == pytest.approx(average_precision_score(is_id, scores))
    assert found.aupr_out == pytest.approx(slow_aupr(-ood_scores, -id_scores))
    assert found.aupr_out == pytest.approx(average_precision_score(1 - is_id, -scores))


@given(id_scores=SCORES, ood_scores=SCORES, piece=st.integers(1, 20))
def test_scores_are_counted_in_pieces_that_do_not_divide_ties(
    id_scores: np.ndarray, ood_scores: np.ndarray, piece: int
) -> None:
    """The truth: all in one piece."""
    expected = ood_metrics(id_scores, ood_scores)
    with patch.object(metrics, "PIECE", piece):
        assert astuple(ood_metrics(id_scores, ood_scores)) == pytest.approx(astuple(expected), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("decimals", [0, 1, 12])
def test_many_scores_with_and_without_ties_have_scikit_learns_metrics(decimals: int) -> None:
    random = np.random.default_rng(decimals)
    id_scores, ood_scores = (random.normal(shift, 1, n).round(decimals) for shift, n in ((1, 50_000), (0, 70_000)))
    is_id, scores = for_sklearn(id_scores, ood_scores)
    found = ood_metrics(id_scores, ood_scores)
    assert found.auroc == pytest.approx(roc_auc_score(is_id, scores), rel=1e-12)
    assert found.aupr_in == pytest.approx(average_precision_score(is_id, scores), rel=1e-12)
    assert found.aupr_out == pytest.approx(average_precision_score(1 - is_id, -scores), rel=1e-12)


@pytest.mark.parametrize(
    ("id_score", "ood_score", "fpr95", "auroc"),
    [(1.0, 0.0, 0, 1), (0.0, 1.0, 1, 0), (1.0, 1.0, 1, 0.5), (math.inf, -math.inf, 0, 1), (math.inf, math.inf, 1, 0.5)],
)
def test_one_sample_of_each_side_is_enough(id_score: float, ood_score: float, fpr95: float, auroc: float) -> None:
    found = ood_metrics(np.array([id_score]), np.array([ood_score]))
    assert (found.fpr95, found.auroc) == (fpr95, auroc)


def test_perfect_scores_are_perfect_and_swapped_ones_are_the_worst() -> None:
    high, low = np.linspace(1, 2, 30), np.linspace(-2, -1, 20)
    assert ood_metrics(high, low) == ood_metrics(high, low - 1e6)
    perfect, worst = ood_metrics(high, low), ood_metrics(low, high)
    assert astuple(perfect) == pytest.approx((0, 1, 1, 1))
    assert (worst.fpr95, worst.auroc) == (1, 0)


@given(id_scores=SCORES, ood_scores=SCORES)
def test_only_the_order_of_scores_counts(id_scores: np.ndarray, ood_scores: np.ndarray) -> None:
    """Multiplied by a power of two, which is exact."""
    assert ood_metrics(id_scores * 8, ood_scores * 8) == ood_metrics(id_scores, ood_scores)


@settings(max_examples=30)
@given(scores=st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=40).map(lambda values: np.array(values)))
def test_single_precision_scores_give_the_same_metrics(scores: np.ndarray) -> None:
    single = scores.astype(np.float32)
    assert ood_metrics(single[::2], single[1::2]) == ood_metrics(scores[::2], scores[1::2])
    assert ood_metrics(single[::2], scores[1::2]) == ood_metrics(scores[::2], scores[1::2])


@given(id_scores=SCORES, ood_scores=SCORES, n_points=st.integers(2, 30))
def test_points_of_the_roc_are_the_best_that_each_fpr_allows(
    id_scores: np.ndarray, ood_scores: np.ndarray, n_points: int
) -> None:
    """The slow truth: the highest TPR of all thresholds whose FPR is no higher."""
    grid, tpr = roc_points(id_scores, ood_scores, n_points)
    thresholds = [*id_scores, *ood_scores]
    rates = [(np.mean(ood_scores >= t), np.mean(id_scores >= t)) for t in thresholds]
    for x, found in zip(grid, tpr, strict=True):
        allowed = [id_rate for ood_rate, id_rate in rates if ood_rate <= x + 1e-9]
        assert found == pytest.approx(max(allowed, default=0))
    assert (grid[0], grid[-1], tpr[-1]) == (0, 1, 1)


@pytest.mark.parametrize("metric", [fpr_at_tpr, ood_metrics, roc_points])
def test_nan_is_an_error_that_says_where_and_how_many(metric: object) -> None:
    fine, bad = np.array([1.0, 2.0, 3.0]), np.array([1.0, math.nan, math.nan, math.inf])
    assert callable(metric)
    with pytest.raises(MetricsError, match="2 of 4 ID scores are NaN"):
        metric(bad, fine)
    with pytest.raises(MetricsError, match="2 of 4 OOD scores are NaN"):
        metric(fine, bad)


@pytest.mark.parametrize("metric", [fpr_at_tpr, ood_metrics, roc_points])
def test_no_scores_are_an_error(metric: object) -> None:
    assert callable(metric)
    with pytest.raises(MetricsError, match="no ID scores"):
        metric(np.array([]), np.array([1.0]))
    with pytest.raises(MetricsError, match="no OOD scores"):
        metric(np.array([1.0]), np.array([]))
