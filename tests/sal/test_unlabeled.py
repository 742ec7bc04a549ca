"""What wild data tell without labels: the excess, its bootstrap, the choice between scores, and the share π."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from salcli.sal.filter import score_threshold
from salcli.sal.unlabeled import (
    best_bin,
    chosen_score,
    estimated_share,
    excess,
    resampled_excess,
    wins_over_first,
)

QUANTILES = st.sampled_from([0.05, 0.5, 0.8, 0.9, 0.95, 0.99])


@st.composite
def several_scores(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Few different values, so that ties are common; some calibration scores are undefined."""
    n_scores, n, m = draw(st.integers(1, 4)), draw(st.integers(1, 25)), draw(st.integers(1, 25))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    calibration, wild = (rng.integers(0, 9, size=(n_scores, k)).astype(float) for k in (n, m))
    calibration[rng.random(calibration.shape) < draw(st.sampled_from([0.0, 0.2, 1.0]))] = math.nan
    return torch.from_numpy(calibration), torch.from_numpy(wild)


def slow_excess(calibration: list[float], wild: list[float], quantile: float) -> float:
    """Word by word."""
    defined = sorted(value for value in calibration if not math.isnan(value))
    if not defined:
        return 0.0
    threshold = defined[max(1, math.ceil(quantile * len(defined) - 1e-9)) - 1]
    above = [sum(value > threshold for value in values) / len(values) for values in (wild, defined)]
    return above[0] - above[1]


@given(several_scores(), QUANTILES)
def test_the_excess_is_its_definition(scores: tuple[Tensor, Tensor], quantile: float) -> None:
    for calibration, wild in zip(*scores, strict=True):
        expected = slow_excess(calibration.tolist(), wild.tolist(), quantile)
        assert excess(calibration, wild, quantile) == pytest.approx(expected, abs=1e-12)


@given(several_scores(), QUANTILES, st.integers(0, 99))
@settings(max_examples=60)
def test_the_bootstrap_is_a_loop_over_resamples(scores: tuple[Tensor, Tensor], quantile: float, seed: int) -> None:
    """The same draws, of whole samples that are sorted again each time."""
    calibration, wild = scores
    found = resampled_excess(calibration, wild, quantile, np.random.default_rng(seed), n_resamples=7)
    rng, n, m = np.random.default_rng(seed), calibration.shape[1], wild.shape[1]
    for resample in found:
        own, other = rng.integers(n, size=n), rng.integers(m, size=m)
        expected = [
            slow_excess([row[i] for i in own], [line[i] for i in other], quantile)
            for row, line in zip(calibration.tolist(), wild.tolist(), strict=True)
        ]
        assert resample.tolist() == pytest.approx(expected, abs=1e-12)


@given(several_scores(), QUANTILES)
def test_only_the_order_of_scores_counts(scores: tuple[Tensor, Tensor], quantile: float) -> None:
    calibration, wild = scores
    stretched = [torch.exp(one) * 3 - 100 for one in scores]
    for row in range(len(wild)):
        expected = excess(calibration[row], wild[row], quantile)
        assert excess(stretched[0][row], stretched[1][row], quantile) == pytest.approx(expected)
    same = [resampled_excess(*pair, quantile, np.random.default_rng(0), 3) for pair in (scores, stretched)]
    torch.testing.assert_close(same[0], same[1])


@given(several_scores(), QUANTILES)
def test_a_score_never_beats_itself(scores: tuple[Tensor, Tensor], quantile: float) -> None:
    calibration, wild = (one[:1].repeat(3, 1) for one in scores)
    resampled = resampled_excess(calibration, wild, quantile, np.random.default_rng(0), 5)
    assert wins_over_first(resampled).tolist() == [0, 0, 0]


@pytest.mark.parametrize("pi", [0.0, 0.3])
@pytest.mark.parametrize("shift", [2.0, 6.0])
def test_in_a_known_mixture_the_excess_is_pi_less_the_errors(pi: float, shift: float) -> None:
    """π · (1 − ERR_out − ERR_in), and the bootstrap's spread is that of new samples."""
    n, m, quantile, found = 2000, 4000, 0.95, []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        calibration, wild = rng.normal(size=n), rng.normal(size=m)
        wild[rng.random(m) < pi] += shift
        found.append(excess(torch.from_numpy(calibration), torch.from_numpy(wild), quantile))
    missed = 0.5 * math.erfc(-(1.6448536 - shift) / math.sqrt(2))  # Φ(T − shift)
    assert np.mean(found) == pytest.approx(pi * (0.95 - missed), abs=4 * np.std(found) / math.sqrt(60) + 1e-3)
    own = resampled_excess(
        torch.from_numpy(calibration)[None], torch.from_numpy(wild)[None], quantile, np.random.default_rng(0)
    )
    assert float(own.std()) == pytest.approx(np.std(found), rel=0.4)


def of_two(rng: np.random.Generator, shift: float) -> tuple[Tensor, Tensor]:
    """One score that is worth little, and one that moves a tenth of the wild data by `shift`."""
    calibration, wild = rng.normal(size=(2, 400)), rng.normal(size=(2, 1000))
    wild[:, :100] += np.array([[1.0], [shift]])
    return torch.from_numpy(calibration), torch.from_numpy(wild)


def choice(calibration: Tensor, wild: Tensor) -> int:
    observed = torch.tensor([excess(*pair, 0.95) for pair in zip(calibration, wild, strict=True)], dtype=torch.float64)
    wins = wins_over_first(resampled_excess(calibration, wild, 0.95, np.random.default_rng(0), 100))
    return chosen_score(observed, wins, torch.tensor([True, True]))


def test_a_score_that_is_far_better_is_chosen_and_one_that_is_as_good_is_not() -> None:
    rng = np.random.default_rng(0)
    assert sum(choice(*of_two(rng, 5.0)) for _ in range(8)) >= 7
    assert sum(choice(*of_two(rng, 1.0)) for _ in range(8)) <= 2
    assert sum(choice(*of_two(rng, 0.0)) for _ in range(8)) == 0


def test_the_rule_word_by_word() -> None:
    """The first stays unless a usable one wins often enough; then the largest excess, then the first in order."""

    def chosen(observed: list[float], wins: list[float], usable: list[bool]) -> int:
        as_floats = [torch.tensor(values, dtype=torch.float64) for values in (observed, wins)]
        return chosen_score(*as_floats, torch.tensor(usable))

    everything = [True] * 4
    assert chosen([0.1, 0.9, 0.9, 0.9], [0, 0.94, 0.94, 0.94], everything) == 0
    assert chosen([0.1, 0.2, 0.4, 0.3], [0, 0.95, 0.95, 1], everything) == 2
    assert chosen([0.1, 0.2, 0.4, 0.3], [0, 0.95, 0.95, 1], [True, True, False, True]) == 3
    assert chosen([0.1, 0.2, 0.4, 0.4], [0, 1, 1, 1], everything) == 2
    assert chosen([-0.1, 0.2, 0.4, 0.4], [1, 0, 0, 0], [False] * 4) == 0


def test_the_threshold_of_a_resample_without_repetition_is_the_filters() -> None:
    """A resample of one sample is that sample."""
    calibration, wild = torch.tensor([[2.0]]).double(), torch.tensor([[3.0]]).double()
    assert score_threshold(calibration[0], 0.95) == 2.0
    assert resampled_excess(calibration, wild, 0.95, np.random.default_rng(0), 3).flatten().tolist() == [1.0] * 3


# --- π


def normal(seed: int, n: int, mean: float = 0.0) -> Tensor:
    return mean + torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(0, 10_000), st.integers(1, 30), st.integers(1, 30))
def test_best_bin_is_the_best_of_all_bins(seed: int, n: int, m: int) -> None:
    """Slow reference: every position between all scores."""
    rng = np.random.default_rng(seed)
    id_scores, wild_scores = rng.integers(0, 9, n).astype(float), rng.integers(0, 9, m).astype(float)
    width = math.sqrt(math.log(40) / 2 / m) + math.sqrt(math.log(40) / 2 / n)
    best = min(
        (np.mean(wild_scores <= c) / np.mean(id_scores <= c) + 1.01 * width / np.mean(id_scores <= c))
        for c in np.arange(-0.5, 10)
        if np.mean(id_scores <= c) > 0
    )
    pi, bound = best_bin(torch.from_numpy(id_scores), torch.from_numpy(wild_scores))
    assert bound == pytest.approx(best)
    assert 0 <= pi <= 1


@pytest.mark.parametrize("pi", [0.0, 0.05, 0.3, 0.9])
def test_pi_is_found_where_a_score_separates(pi: float) -> None:
    n_ood = int(pi * 10_000)
    wild = torch.cat([normal(0, 10_000 - n_ood), normal(1, n_ood, 6.0)])
    useless = normal(3, 10_000), normal(4, 10_000)
    found = estimated_share({"useless": useless, "good": (normal(2, 10_000), wild)})
    assert found.pi == pytest.approx(pi, abs=0.02)
    if pi > 0.01:
        assert found.score == "good"


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)])
def test_pi_cannot_be_estimated_from_no_scores(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="from no scores"):
        best_bin(*(torch.zeros(n) for n in sizes))
