"""Estimates without labels: against a slow reference, on mixtures of known truth, and where nothing can be told."""

import numpy as np
import pytest
from scipy.stats import norm

from salcli.sal.estimates import NO_HOLDOUT, Estimates, estimated
from salcli.sal.metrics import ood_metrics, threshold_that_keeps
from salcli.sal.outlier_share import AT_95, KEPT, resampled

Pairs = dict[str, tuple[np.ndarray, np.ndarray]]


def deal(rng: np.random.Generator, n: int, m: int, pi: float, distances: dict[str, float], shift: float = 0.0) -> Pairs:
    """Scores of methods that separate by so many standard deviations; they agree on half of what makes a sample odd.

    `shift` moves all wild data, as another camera would.
    """
    n_ood = rng.binomial(m, pi)

    def normal(k: int) -> np.ndarray:
        return np.sqrt(0.5) * (rng.standard_normal(k) + rng.standard_normal((len(distances), k)))

    known, wild = normal(n), normal(m) - shift
    wild[:, :n_ood] -= np.array(list(distances.values()))[:, None]
    return {name: (known[i], wild[i]) for i, name in enumerate(distances)}


def test_every_resample_has_the_numbers_of_its_samples_written_out() -> None:
    rng = np.random.default_rng(0)
    known, wild = rng.integers(12, size=(3, 41)) / 4, rng.integers(-4, 10, size=(3, 57)) / 4  # with many ties
    counts = [rng.multinomial(side.shape[1], np.full(side.shape[1], 1 / side.shape[1]), 5) for side in (known, wild)]
    counts[0][0], counts[1][0] = 1, 1
    auc, passing, expected = resampled(known, wild, *counts)
    for b in range(5):
        for s in range(3):
            ids, others = np.repeat(known[s], counts[0][b]), np.repeat(wild[s], counts[1][b])
            assert auc[b, s] == pytest.approx(ood_metrics(ids, others).auroc)
            for k, kept in enumerate(KEPT):
                assert passing[b, s, k] == pytest.approx(np.mean(others >= threshold_that_keeps(ids, kept)))
    assert expected[0, 0, AT_95] == pytest.approx(39 / 42)  # 39 of 41 are kept: 39 of 42 chances for a new one


def test_the_truth_comes_out_of_a_large_mixture() -> None:
    distances = {"sal": 0.2, "msp": 1.0, "knn": 3.0}
    found = estimated(
        deal(np.random.default_rng(1), 40_000, 40_000, 0.2, distances), np.random.default_rng(2), "sal", 20
    )
    assert found.pi.value == pytest.approx(0.2, abs=0.025)
    for name, distance in distances.items():
        auroc, fpr95 = norm.cdf(distance / np.sqrt(2)), 1 - norm.cdf(norm.ppf(0.05) + distance)
        assert found.methods[name]["auroc"].value == pytest.approx(auroc, abs=0.06), name
        assert found.methods[name]["fpr95"].value == pytest.approx(fpr95, abs=0.05), name
    assert found.chosen == "knn"


def test_90_percent_intervals_cover_the_truth_in_90_percent_of_deals() -> None:
    rng, distances, n_deals = np.random.default_rng(0), {"a": 0.5, "b": 2.0}, 200
    truth = {
        name: {"auroc": norm.cdf(d / np.sqrt(2)), "fpr95": 1 - norm.cdf(norm.ppf(0.05) + d)}
        for name, d in distances.items()
    }
    covered = []
    for _ in range(n_deals):
        found = estimated(deal(rng, 400, 500, 0.3, distances), rng, "a", n_resamples=120)
        covered += [
            found.methods[name][metric].low <= value <= found.methods[name][metric].high  # type: ignore[operator]
            for name, own in truth.items()
            if found.methods  # in a few deals nothing can be told
            for metric, value in own.items()
        ]
    assert np.mean(covered) == pytest.approx(0.9, abs=0.03)


def test_nothing_is_told_without_outliers_or_with_few_samples() -> None:
    rng, distances = np.random.default_rng(3), {"sal": 1.0, "knn": 2.0}
    told = [estimated(deal(rng, 500, 500, 0.0, distances), rng, "sal", 100) for _ in range(20)]
    assert sum(bool(found.methods) for found in told) <= 3
    assert all("cannot tell" in found.reason for found in told if not found.methods)
    few = estimated(deal(rng, 500, 12, 0.5, distances), rng, "sal")
    assert (few.methods, few.chosen) == ({}, "sal")
    assert "12 held-out wild samples are too few; at least 50" in few.reason
    nothing = estimated(deal(rng, 99, 0, 0.5, distances), rng, "x")
    assert (nothing.methods, nothing.chosen, nothing.reason) == ({}, "x", NO_HOLDOUT)


def chosen(distances: dict[str, float], seed: int, baseline: str | None = None) -> Estimates:
    rng, labels = np.random.default_rng(seed), {"sal": "SAL (auto)", "knn": "KNN"}
    return estimated(deal(rng, 600, 800, 0.1, distances), rng, "sal", 100, labels, baseline)


def test_sal_stays_unless_another_method_is_surely_better() -> None:
    told = [chosen({"sal": 0.0, "msp": 1.5, "knn": 2.5}, seed) for seed in range(20)]
    bad = [found.chosen for found in told]
    assert bad.count("knn") >= 17
    assert told[bad.index("knn")].reason.startswith("KNN finds more outliers than SAL (auto): ")
    assert "sal" not in bad
    equal = [chosen({"sal": 2.0, "msp": 2.0, "knn": 1.9}, seed).chosen for seed in range(20)]
    assert equal.count("sal") >= 15  # two others, at a level of 5% each


def test_what_is_surely_better_than_the_baseline_competes_with_the_incumbent() -> None:
    """It need not be surely better than the incumbent, which stays where nothing is surely better than the baseline."""
    better = [chosen({"sal": 2.0, "plain": 0.0, "knn": 2.7}, seed, "plain") for seed in range(20)]
    assert [found.chosen for found in better].count("knn") >= 15
    assert "finds more outliers than plain" in better[0].reason
    equal = [chosen({"sal": 2.0, "plain": 1.9, "knn": 2.0}, seed, "plain") for seed in range(20)]
    assert [found.chosen for found in equal].count("sal") >= 15
    pairs = deal(np.random.default_rng(0), 3000, 4000, 0.1, {"sal": 2.0, "plain": 2.0, "msp": 1.0, "knn": 1.5})
    pairs["sal"] = pairs["sal"][0], pairs["sal"][1] - 0.5  # it has learned what all wild data have in common
    assert estimated(pairs, np.random.default_rng(0), "sal", 50, baseline="plain").chosen == "plain"


def test_wild_data_that_differ_as_a_whole_are_not_taken_for_outliers() -> None:
    """Every wild sample has moved, ID samples too: excess everywhere, but none of it says which method is better."""
    rng = np.random.default_rng(0)
    found = estimated(deal(rng, 3000, 4000, 0.0, {"sal": 0.0, "msp": 0.1, "knn": 0.2}, shift=0.7), rng, "sal", 50)
    assert (found.chosen, found.methods) == ("sal", {})
    assert found.reason.startswith("cannot tell: the wild data differ from the calibration data as a whole")
    assert found.pi.value is None
