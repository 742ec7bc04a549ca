"""Thresholds and p-values, against their definitions written out."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from salcli.calibration import is_below, p_values, threshold_that_keeps
from salcli.metrics import fpr_at_tpr

SCORES = st.lists(st.integers(-4, 4), min_size=1, max_size=40)  # few values: many ties
SHARES = st.fractions(Fraction(1, 100), Fraction(99, 100), max_denominator=100)


def floats(values: list[int]) -> np.ndarray:
    return np.array(values, np.float32)


@given(calibration=SCORES, share=SHARES)
def test_the_threshold_is_the_highest_that_keeps_its_share(calibration: list[int], share: Fraction) -> None:
    def kept(threshold: float) -> Fraction:
        return Fraction(sum(score >= threshold for score in calibration), len(calibration))

    threshold = threshold_that_keeps(floats(calibration), float(share))
    assert threshold == max(score for score in calibration if kept(score) >= share)
    assert kept(threshold) >= share > kept(math.nextafter(threshold, math.inf))


@given(calibration=SCORES, ood=SCORES, share=SHARES)
def test_what_is_called_ood_is_what_fpr95_counts(calibration: list[int], ood: list[int], share: Fraction) -> None:
    threshold = threshold_that_keeps(floats(calibration), float(share))
    missed = float(np.mean(~is_below(floats(ood), threshold)))
    assert missed == fpr_at_tpr(floats(calibration), floats(ood), float(share))


@given(calibration=SCORES, scores=SCORES)
def test_p_values_are_counted(calibration: list[int], scores: list[int]) -> None:
    found = p_values(np.sort(floats(calibration)), floats(scores))
    expected = [(1 + sum(one <= score for one in calibration)) / (len(calibration) + 1) for score in scores]
    np.testing.assert_allclose(found, expected, rtol=1e-15)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_chance_of_a_p_value_of_at_most_alpha_is_at_most_alpha(n: int) -> None:
    """Exactly: of n + 1 exchangeable scores, each is as likely to be the new one. Every order and tie is tried."""
    for values in product(range(n + 1), repeat=n + 1):
        p = [
            p_values(np.sort(floats([*values[:new], *values[new + 1 :]])), floats([values[new]]))[0]
            for new in range(n + 1)
        ]
        for k in range(1, n + 2):  # p-values are multiples of 1 / (n + 1): no other α has to be tried
            n_at_most = sum(round(one * (n + 1)) <= k for one in p)
            assert n_at_most <= k
            if len(set(values)) == n + 1:
                assert n_at_most == k  # without ties nothing is given away


def test_what_is_no_number_is_not_like_id_data() -> None:
    scores = np.array([np.nan, -np.inf, np.inf, 2], np.float32)
    calibration = floats([1, 2, 3])
    assert is_below(scores, threshold_that_keeps(calibration, 0.5)).tolist() == [True, True, False, False]
    assert p_values(calibration, scores).tolist() == [0.25, 0.25, 1, 0.75]
