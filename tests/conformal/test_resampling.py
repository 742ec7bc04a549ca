"""The bootstrap beside one that really resamples, and what it says of FPR95 and AUROC without labels."""

import numpy as np
import pytest
from scipy.stats import norm

from salcli.conformal.evidence import Share, share_of_outliers
from salcli.conformal.resampling import (
    COMPARED,
    MOST,
    NO_HOLDOUT,
    Estimates,
    estimated,
    resample_counts,
    resampled,
    widest_deviation,
)
from salcli.sal.metrics import fpr_at_tpr, ood_metrics

Pairs = dict[str, tuple[np.ndarray, np.ndarray]]


def test_resamples_have_the_metrics_that_are_computed_again_on_each() -> None:
    """Up to terms in which both sides deviate; the second score has many ties, the third separates all."""
    rng, kept = np.random.default_rng(0), (0.875, 0.95)
    ids, oods = rng.normal(0, 1, (3, 400)), rng.normal(2, 1, (3, 250))
    ids[1], oods[1], ids[2] = ids[1].round(1), oods[1].round(1), ids[2] - 9
    counts = [resample_counts(n, 200, rng) for n in (400, 250)]
    for one in counts:
        assert (one.sum(axis=1) == one.shape[1]).all()
        one[0] = 1
    auroc, fpr = resampled(ids, oods, *counts, kept)
    found = np.stack([auroc, *fpr.transpose(2, 0, 1)])  # metric, resample, score
    truth = np.empty_like(found)
    for b, (id_count, ood_count) in enumerate(zip(*(one.astype(int) for one in counts), strict=True)):
        for s in range(3):
            own = np.repeat(ids[s], id_count), np.repeat(oods[s], ood_count)
            truth[:, b, s] = ood_metrics(*own).auroc, *(fpr_at_tpr(*own, share) for share in kept)
    np.testing.assert_allclose(found[:, 0], truth[:, 0], atol=1e-6)  # the first is the sample itself
    noise = truth.std(axis=1)
    assert (noise[:, :2] > 0.005).all()
    assert (np.abs(found - truth).mean(axis=1) <= 0.25 * noise + 1e-6).all()
    assert (np.abs((found - truth).mean(axis=1)) <= 0.05 * noise + 1e-6).all()
    assert found.std(axis=1) == pytest.approx(noise, rel=0.07, abs=1e-6)


def test_one_margin_for_all_deviations_is_exceeded_by_any_as_rarely_as_said() -> None:
    rng, spread = np.random.default_rng(1), np.array([1.0, 5.0, 0.1])
    draws = rng.normal(size=(3, 4000)) * spread[:, None]
    margin = widest_deviation(draws, spread, 0.9)
    new = np.abs(rng.normal(size=(3, 4000)))
    assert np.mean(new.max(axis=0) <= margin) == pytest.approx(0.9, abs=0.02)


# -- without labels


def deal(rng: np.random.Generator, n: int, m: int, pi: float, distances: dict[str, float], shift: float = 0.0) -> Pairs:
    """Scores of methods that separate by so many standard deviations; they agree on half of what makes a sample odd.

    `shift` moves all wild data, as another camera would.
    """
    n_ood = rng.binomial(m, pi)

    def normal(k: int) -> np.ndarray:
        return np.sqrt(0.5) * (rng.standard_normal(k) + rng.standard_normal((len(distances), k)))

    known, wild = normal(n), normal(m) + shift
    wild[:, :n_ood] += np.array(list(distances.values()))[:, None]
    return {name: (known[i], wild[i]) for i, name in enumerate(distances)}


def told(pairs: Pairs, incumbent: str, n_resamples: int = 100, share: Share | None = None) -> Estimates:
    """With π̂ of the score that separates best, as evaluate has that of the committee."""
    if share is None:
        share = share_of_outliers(*max(pairs.values(), key=lambda pair: float(pair[1].mean() - pair[0].mean())))
    labels, rng = {name: name.upper() for name in [*pairs, incumbent]}, np.random.default_rng(0)
    return estimated(pairs, share, incumbent, labels, rng, n_resamples)


def truth(distance: float) -> dict[str, float]:
    return {"auroc": norm.cdf(distance / np.sqrt(2)), "fpr95": norm.cdf(norm.ppf(0.95) - distance)}


def test_the_truth_comes_out_of_a_large_mixture() -> None:
    distances = {"sal": 0.2, "msp": 2.0, "knn": 3.5}
    found = told(deal(np.random.default_rng(1), 40_000, 40_000, 0.2, distances), "sal", 20)
    assert found.pi.value == pytest.approx(0.2, abs=0.025)
    for name, distance in distances.items():
        for metric, value in truth(distance).items():
            assert found.methods[name][metric].value == pytest.approx(value, abs=0.06), (name, metric)
    assert found.chosen == "knn"
    assert found.reason.startswith("KNN finds more outliers than SAL: ")


def test_90_percent_intervals_cover_the_truth_in_90_percent_of_deals() -> None:
    """At least: each is taken at both ends of the interval of π, too."""
    rng, distances, covered = np.random.default_rng(0), {"a": 0.5, "b": 2.0, "c": 4.0}, []
    for _ in range(150):
        found = told(deal(rng, 400, 500, 0.3, distances), "a", 120).methods
        covered += [
            own[metric].low <= value <= own[metric].high  # type: ignore[operator]
            for name, own in found.items()
            for metric, value in truth(distances[name]).items()
        ]
    assert len(covered) > 850  # sometimes a score is left out, because its outliers look like drift
    assert np.mean(covered) >= 0.9


def test_nothing_is_told_without_outliers_with_few_samples_or_without_a_holdout() -> None:
    rng, distances = np.random.default_rng(3), {"sal": 1.0, "knn": 2.0}
    silent = [told(deal(rng, 500, 500, 0.0, distances), "sal") for _ in range(20)]
    assert sum(bool(found.methods) for found in silent) <= 2
    assert all("no outliers are certified" in found.reason for found in silent if not found.methods)
    few = told(deal(rng, 500, 12, 0.5, distances), "sal")
    assert (few.methods, few.chosen) == ({}, "sal")
    assert "12 held-out wild samples are too few; at least 50" in few.reason
    nothing = told(deal(rng, 99, 0, 0.5, distances), "x", share=Share(0.1, 0.05, 0.2))
    assert (nothing.methods, nothing.chosen, nothing.reason) == ({}, "x", NO_HOLDOUT)


def test_the_incumbent_stays_unless_another_method_is_significantly_better() -> None:
    def chosen(distances: dict[str, float], seed: int) -> str:
        return told(deal(np.random.default_rng(seed), 600, 800, 0.1, distances), "sal").chosen

    bad = [chosen({"sal": 0.0, "msp": 1.5, "knn": 2.5}, seed) for seed in range(20)]
    assert bad.count("knn") >= 17
    assert "sal" not in bad
    equal = [chosen({"sal": 2.0, "msp": 2.0, "knn": 1.9, "vim": 2.0}, seed) for seed in range(40)]
    assert equal.count("sal") >= 34, "at 5% for all together"
    assert told({}, "sal", share=Share(0.1, 0.05, 0.2)).chosen == "sal"
    missing = told(deal(np.random.default_rng(0), 100, 100, 0.1, {"knn": 3.0}), "sal")
    assert (missing.chosen, missing.reason) == ("sal", "SAL stays: it was not evaluated")


def test_wild_data_that_differ_as_a_whole_are_not_taken_for_outliers() -> None:
    """Every wild sample has moved, ID samples too: excess everywhere, but none of it says which method is better."""
    pairs = deal(np.random.default_rng(0), 3000, 4000, 0.1, {"sal": 2.0, "msp": 2.1, "knn": 2.2}, shift=0.7)
    found = told(pairs, "sal", 50)
    assert (found.chosen, found.methods) == ("sal", {})
    assert found.reason.startswith("cannot tell: the wild data differ from the calibration data as a whole")
    one = deal(np.random.default_rng(0), 3000, 4000, 0.1, {"sal": 2.0, "msp": 2.1, "knn": 2.2})
    one["knn"] = one["knn"][0], one["knn"][1] + 0.5  # it alone has learned what all wild data have in common
    found = told(one, "sal", 50, share_of_outliers(*one["sal"]))
    assert {*found.methods} == {"sal", "msp"}


def test_undefined_scores_count_as_outliers_and_very_many_are_thinned() -> None:
    pairs = deal(np.random.default_rng(0), 300, 400, 0.2, {"sal": 3.0})
    scores = pairs["sal"][1]
    scores[np.argsort(scores)[-40:]] = np.nan
    assert told(pairs, "sal", share=Share(0.2, 0.15, 0.25)).methods["sal"]["fpr95"].value == pytest.approx(
        0.05, abs=0.1
    )
    many = deal(np.random.default_rng(0), MOST + 1, MOST + 5000, 0.2, {"sal": 3.0})
    assert told(many, "sal", 10).methods["sal"]["auroc"].value == pytest.approx(truth(3.0)["auroc"], abs=0.02)
    assert 0.95 in COMPARED
