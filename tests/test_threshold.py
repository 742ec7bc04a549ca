"""The threshold and what it promises."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_gradients import random_factors
from torch import Tensor

from salcli.errors import ThresholdError
from salcli.sal import spectrum
from salcli.sal.gradients import Factors
from salcli.sal.scores import class_conditional_scores
from salcli.sal.threshold import score_threshold, separation_errors, working_quantiles
from salcli.stages.filter import _threshold

# few different values, so that ties are common, or many
VALUES = st.integers(0, 4).map(float) | st.floats(0, 1e6)
SCORES = st.lists(VALUES, min_size=1, max_size=40).map(lambda values: torch.tensor(values, dtype=torch.float64))
# as a person types them: with up to four digits
QUANTILES = st.integers(1, 9999).map(lambda q: q / 10_000)


def n_candidates(calibration: Tensor, wild: Tensor, quantile: float) -> int:
    return int((wild > score_threshold(calibration, quantile)).sum())


def works(calibration: Tensor, wild: Tensor, quantile: float) -> bool:
    """Whether there are candidates, but not only candidates."""
    return 0 < n_candidates(calibration, wild, quantile) < len(wild)


@given(calibration=SCORES, quantile=QUANTILES)
def test_the_threshold_is_the_smallest_score_with_the_share_at_or_below_it(
    calibration: Tensor, quantile: float
) -> None:
    """In exact arithmetic on the decimal fraction, because 0.55 · 20 is not 11 in floating point."""
    share = Fraction(round(quantile * 10_000), 10_000)
    threshold = score_threshold(calibration, quantile)
    enough = [
        value for value in calibration.tolist() if (calibration <= value).sum().item() >= share * len(calibration)
    ]
    assert threshold == min(enough)


def test_a_share_that_is_a_whole_number_of_samples_takes_just_these() -> None:
    """All n and every percentage: a rounding error must not cost a sample."""
    for n in range(1, 201):
        calibration = torch.arange(1, n + 1, dtype=torch.float64)
        for percent in range(1, 100):
            assert score_threshold(calibration, percent / 100) == math.ceil(Fraction(percent * n, 100))


@given(calibration=SCORES, seed=st.integers(0, 100))
def test_the_order_of_calibration_scores_does_not_matter(calibration: Tensor, seed: int) -> None:
    order = torch.randperm(len(calibration), generator=torch.Generator().manual_seed(seed))
    assert score_threshold(calibration[order], 0.7) == score_threshold(calibration, 0.7)


@given(calibration=SCORES, wild=SCORES)
def test_working_quantiles_work_at_both_ends_and_nowhere_else(calibration: Tensor, wild: Tensor) -> None:
    """The slow truth: try a quantile for every possible rank."""
    n = len(calibration)
    working_ranks = [rank for rank in range(1, n + 1) if works(calibration, wild, (rank - 0.5) / n)]
    found = working_quantiles(calibration, wild)
    if found is None:
        assert not working_ranks
        return
    low, high = found
    assert working_ranks == list(range(round(low * n) + 1, round(high * n) + 1))
    assert works(calibration, wild, high)
    assert works(calibration, wild, low + 1e-6)
    assert high == 1 or n_candidates(calibration, wild, high + 1e-6) == 0
    assert low == 0 or n_candidates(calibration, wild, low) == len(wild)


@given(calibration=SCORES, wild=SCORES, quantile=QUANTILES)
def test_a_threshold_that_leaves_no_choice_is_an_error_that_names_quantiles_that_work(
    calibration: Tensor, wild: Tensor, quantile: float
) -> None:
    """The figures of the message are typed in again: they must work as they stand there."""
    if works(calibration, wild, quantile):
        assert _threshold(calibration, wild, quantile) == score_threshold(calibration, quantile)
        return
    with pytest.raises(ThresholdError) as error:
        _threshold(calibration, wild, quantile)
    message = str(error.value)
    outcome = "no candidate" if n_candidates(calibration, wild, quantile) == 0 else "nothing but candidate"
    assert outcome in message
    named = re.search(r"values from (\S+) to (\S+) work", message)
    if named is None:
        assert "no value works" in message
        assert working_quantiles(calibration, wild) is None
        return
    low, high = float(named[1]), float(named[2])
    assert works(calibration, wild, low)
    assert works(calibration, wild, high)
    assert (low, high) == pytest.approx(working_quantiles(calibration, wild), abs=0.51 / len(calibration))


def test_without_calibration_scores_the_error_says_why() -> None:
    with pytest.raises(ThresholdError, match="use a larger calibration set"):
        _threshold(torch.empty(0, dtype=torch.float64), torch.ones(3, dtype=torch.float64), 0.95)


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.95])
def test_err_in_is_what_the_quantile_promises_for_exchangeable_scores(quantile: float) -> None:
    """Of n exchangeable scores and one more, the new one is above the r-th smallest with probability 1 − r/(n + 1)."""
    n, n_wild, n_deals = 99, 400, 400
    rng = np.random.default_rng(0)
    errors = []
    for _ in range(n_deals):
        scores = torch.from_numpy(rng.exponential(size=n + n_wild))
        is_candidate = scores[n:] > score_threshold(scores[:n], quantile)
        errors.append(separation_errors(is_candidate, torch.zeros(n_wild, dtype=torch.bool)).err_in)
    standard_error = np.std(errors) / math.sqrt(n_deals)
    assert np.mean(errors) == pytest.approx(1 - math.ceil(quantile * n) / (n + 1), abs=4 * standard_error)
    assert np.mean(errors) == pytest.approx(1 - quantile, abs=4 * standard_error + 1 / (n + 1))


def test_err_in_is_what_the_quantile_promises_for_scores_on_the_singular_vectors_of_the_wild_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Held-out ID samples are dealt anew, again and again, to the calibration and to the wild.

    The outliers are strong, so that the vectors are theirs: wild ID samples that bend a vector towards
    themselves are no longer exchangeable with those that cannot.
    """
    monkeypatch.setattr(spectrum, "SMALL_SIDE", 10)  # K·D is 6: the quick way
    n, n_wild_id, n_deals, quantile = 99, 300, 150, 0.9
    pool = random_factors(n + n_wild_id, 2, 3, seed=1)
    id_train, outliers = random_factors(50, 2, 3, seed=2), random_factors(60, 2, 3, seed=3)
    outliers = Factors(outliers.residual, 10 * outliers.feature, outliers.label)
    rng = torch.Generator().manual_seed(0)
    errors = []
    for _ in range(n_deals):
        order = torch.randperm(len(pool), generator=rng)
        calibration, wild = pool[order[:n]], concatenated(pool[order[n:]], outliers)
        wild_tau, tau = class_conditional_scores(wild, [wild, calibration], id_train, classes=range(2), n_vectors=1)
        is_ood = torch.arange(len(wild)) >= n_wild_id
        errors.append(separation_errors(wild_tau > score_threshold(tau, quantile), is_ood).err_in)
    standard_error = np.std(errors) / math.sqrt(n_deals)
    assert standard_error < 0.004
    assert np.mean(errors) == pytest.approx(1 - math.ceil(quantile * n) / (n + 1), abs=4 * standard_error)


def concatenated(one: Factors, other: Factors) -> Factors:
    return Factors(
        *(torch.cat([getattr(one, part), getattr(other, part)]) for part in ("residual", "feature", "label"))
    )


@given(truth=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=20))
def test_separation_errors_are_shares_of_each_side(truth: list[tuple[bool, bool]]) -> None:
    """The slow truth: count."""
    is_candidate, is_ood = torch.tensor(truth).T
    found = separation_errors(is_candidate, is_ood)
    wild_id = [candidate for candidate, ood in truth if not ood]
    wild_ood = [candidate for candidate, ood in truth if ood]
    expected_in = wild_id.count(True) / len(wild_id) if wild_id else math.nan
    expected_out = wild_ood.count(False) / len(wild_ood) if wild_ood else math.nan
    assert (found.err_in, found.err_out) == pytest.approx((expected_in, expected_out), nan_ok=True)
