"""What wild data tell without labels: the excess, its bootstrap, normal quantiles, the verdict, and the share π."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from salcli.detector.decisions import p_values
from salcli.methods.combined import NormalQuantiles
from salcli.sal.filter_verdict import verdict
from salcli.sal.outlier_share import best_bin, estimated_share
from salcli.sal.score_choice import QUANTILES, partial_excess, resampled_excess
from salcli.sal.separation import discoveries_threshold, score_threshold


def normal(seed: int, n: int, mean: float = 0.0) -> Tensor:
    return mean + torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def several_scores(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Few different values, so that ties are common; some calibration scores are undefined."""
    n_scores, n, m = draw(st.integers(1, 4)), draw(st.integers(1, 25)), draw(st.integers(1, 25))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    calibration, wild = (rng.integers(0, 9, size=(n_scores, k)).astype(float) for k in (n, m))
    calibration[rng.random(calibration.shape) < draw(st.sampled_from([0.0, 0.2, 1.0]))] = math.nan
    return torch.from_numpy(calibration), torch.from_numpy(wild)


def slow_excess(calibration: list[float], wild: list[float]) -> float:
    """Word by word."""
    defined, found = sorted(value for value in calibration if not math.isnan(value)), []
    if not defined:
        return 0.0
    for quantile in QUANTILES.tolist():
        threshold = defined[max(1, math.ceil(quantile * len(defined) - 1e-9)) - 1]
        above = [sum(value > threshold for value in values) / len(values) for values in (wild, defined)]
        found.append(above[0] - above[1])
    return sum(found) / len(found)


@given(several_scores(), st.integers(0, 99))
@settings(max_examples=60)
def test_the_excess_is_its_definition_and_the_bootstrap_a_loop_over_resamples(
    scores: tuple[Tensor, Tensor], seed: int
) -> None:
    """The same draws, of whole samples that are sorted again each time."""
    calibration, wild = scores
    for own, other in zip(calibration, wild, strict=True):
        assert partial_excess(own, other) == pytest.approx(slow_excess(own.tolist(), other.tolist()), abs=1e-12)
    found = resampled_excess(calibration, wild, np.random.default_rng(seed), n_resamples=3)
    rng, n, m = np.random.default_rng(seed), calibration.shape[1], wild.shape[1]
    for resample in found:
        rows, columns = rng.integers(n, size=n), rng.integers(m, size=m)
        expected = [
            slow_excess([row[i] for i in rows], [line[i] for i in columns])
            for row, line in zip(calibration.tolist(), wild.tolist(), strict=True)
        ]
        assert resample.tolist() == pytest.approx(expected, abs=1e-12)


@given(several_scores())
def test_normal_quantiles_keep_the_order_and_have_the_middle_rank_of_ties(scores: tuple[Tensor, Tensor]) -> None:
    calibration, wild = scores[0][0].nan_to_num(4.0), scores[1][0] * 3 - 8  # also far outside
    transform = NormalQuantiles.fit(calibration)
    both = torch.cat([calibration, wild])
    mapped = transform(both)
    assert mapped.isfinite().all()
    larger = both[:, None] > both[None, :]
    assert (mapped[:, None] > mapped[None, :])[larger].all()
    for value, own in zip(calibration.tolist(), transform(calibration).tolist(), strict=True):
        middle = float((calibration < value).sum() + (calibration == value).sum() / 2) / len(calibration)
        assert own == pytest.approx(float(torch.special.ndtri(torch.tensor(middle, dtype=torch.float64))), abs=1e-9)


@given(several_scores(), st.sampled_from([0.05, 0.3, 0.7]))
def test_discoveries_are_those_of_benjamini_and_hochberg(scores: tuple[Tensor, Tensor], fdr: float) -> None:
    calibration, wild = scores[0][0].nan_to_num(4.0), scores[1][0]
    p = p_values(np.sort(-calibration.numpy()), -wild.numpy())
    ranked = np.sort(p)
    passed = np.flatnonzero(ranked <= fdr * np.arange(1, len(p) + 1) / len(p) + 1e-12)
    expected = p <= ranked[passed[-1]] if len(passed) else np.zeros(len(p), bool)
    threshold = discoveries_threshold(calibration, wild, fdr)
    found = (wild > threshold).numpy() if threshold is not None else np.zeros(len(p), bool)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("n_ood", "shift", "n_drift"), [(0, 0.0, 0), (300, 3.0, 0), (0, 0.0, 2700)])
def test_the_verdict_tells_nothing_from_outliers_and_outliers_from_drift(
    n_ood: int, shift: float, n_drift: int
) -> None:
    covered, drifted, found, off = [], [], [], [0.0]
    for seed in range(40):
        calibration = normal(seed, 1000)
        wild = torch.cat([normal(seed + 100, 2700), normal(seed + 200, n_ood, shift)])
        wild[:n_drift] += 0.8
        threshold = score_threshold(calibration, 0.95)
        own = verdict(calibration, wild, threshold)
        is_found = wild > threshold
        above = 0.05 * n_ood  # so many of the outliers would have been above T as ID samples
        covered.append(abs(own.beyond - (float(is_found[2700:].sum()) - above)) <= own.margin)
        drifted.append(own.looks_like_drift)
        found.append(own.found_something)
        if n_ood:
            off.append(own.precision - float(is_found[2700:].sum() / is_found.sum()))
    assert np.mean(drifted) >= 0.9 if n_drift else not any(drifted)
    assert abs(np.mean(off)) < 0.03
    if not n_drift:
        assert np.mean(covered) >= 0.9
        assert all(found) if n_ood else np.mean(found) <= 0.1
    assert verdict(normal(0, 50), normal(1, 50, 100.0), 0.0).drift == math.inf, "without any overlap"


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
