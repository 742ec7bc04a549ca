"""Metrics equal scikit-learn's or slow definitions, with ties, one sample and infinities; NaN is an error."""

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from salcli.errors import SalError
from salcli.sal.metrics import fpr_at_tpr, ood_metrics, roc_points, threshold_that_keeps

# few different values, so that ties are common, or many; and infinities, which a network can also give
VALUES = st.integers(-3, 3).map(float) | st.floats(-1e6, 1e6) | st.sampled_from([math.inf, -math.inf])
SCORES = st.lists(VALUES, min_size=1, max_size=60).map(np.array)
SHARES = st.fractions(Fraction(1, 100), 1, max_denominator=100)


@given(id_scores=SCORES, ood_scores=SCORES, share=SHARES)
def test_the_threshold_is_the_lowest_that_keeps_its_share_of_id_scores(
    id_scores: np.ndarray, ood_scores: np.ndarray, share: Fraction
) -> None:
    """Slow reference: try every ID score as the threshold, in exact arithmetic."""
    enough = [x for x in id_scores if Fraction(int((id_scores <= x).sum()), len(id_scores)) >= share]
    assert threshold_that_keeps(id_scores, float(share)) == min(enough)
    assert fpr_at_tpr(id_scores, ood_scores, float(share)) == np.mean(ood_scores <= min(enough))


@given(id_scores=SCORES, ood_scores=SCORES)
def test_metrics_are_scikit_learns(id_scores: np.ndarray, ood_scores: np.ndarray) -> None:
    """FPR95 is at its first threshold that keeps 95%. AUROC is also the share of pairs in the right order."""
    found = ood_metrics(id_scores, ood_scores)
    is_id = np.repeat([1, 0], [len(id_scores), len(ood_scores)])
    # it refuses infinities, so numbers beyond all others stand for them
    scores = -np.nan_to_num(np.concatenate([id_scores, ood_scores]), posinf=1e9, neginf=-1e9)
    fpr, tpr, _ = roc_curve(is_id, scores, drop_intermediate=False)
    assert found.fpr95 == pytest.approx(fpr[np.argmax(tpr >= 0.95)])
    fpr, tpr, _ = roc_curve(1 - is_id, -scores, drop_intermediate=False)  # OpenOOD's: OOD is positive
    assert fpr_at_tpr(-ood_scores, -id_scores) == pytest.approx(fpr[np.argmax(tpr >= 0.95)])
    assert found.auroc == pytest.approx(roc_auc_score(is_id, scores))
    assert found.aupr_in == pytest.approx(average_precision_score(is_id, scores))
    assert found.aupr_out == pytest.approx(average_precision_score(1 - is_id, -scores))
    pairs = list(product(id_scores, ood_scores))
    assert found.auroc == pytest.approx(sum((one < other) + 0.5 * (one == other) for one, other in pairs) / len(pairs))


@given(id_scores=SCORES, ood_scores=SCORES, n_points=st.integers(2, 30))
def test_points_of_the_roc_are_the_best_that_each_fpr_allows(
    id_scores: np.ndarray, ood_scores: np.ndarray, n_points: int
) -> None:
    """Slow reference: the highest TPR of all thresholds whose FPR is no higher."""
    grid, tpr = roc_points(id_scores, ood_scores, n_points)
    rates = [(np.mean(ood_scores <= t), np.mean(id_scores <= t)) for t in (*id_scores, *ood_scores)]
    for x, found in zip(grid, tpr, strict=True):
        allowed = [id_rate for ood_rate, id_rate in rates if ood_rate <= x + 1e-9]
        assert found == pytest.approx(max(allowed, default=0))
    assert (grid[0], grid[-1], tpr[-1]) == (0, 1, 1)


@pytest.mark.parametrize("metric", [fpr_at_tpr, ood_metrics, roc_points])
def test_nan_and_missing_scores_are_errors_that_say_where(metric: Callable[..., object]) -> None:
    fine, bad, none = np.array([1.0, 2.0, 3.0]), np.array([1.0, math.nan, math.nan, math.inf]), np.array([])
    for scores, message in ((bad, "2 of 4 {} scores are NaN"), (none, "no {} scores")):
        with pytest.raises(SalError, match=message.format("ID")):
            metric(scores, fine)
        with pytest.raises(SalError, match=message.format("OOD")):
            metric(fine, scores)
