"""What held-out ID scores and wild scores say: every promise as a promise, every formula beside a slow one."""

import math
from itertools import combinations
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import betabinom, binom, false_discovery_control, hypergeom

from salcli.conformal.evidence import (
    CERTAINTY,
    DRIFT,
    FOUND,
    LABEL_SHIFT,
    calibration_needed,
    certificate,
    counts_above,
    drift_p_value,
    envelope,
    excess_p_value,
    false_discovery_cutoff,
    holm,
    label_shift_p_value,
    least_flagged,
    longest_certified,
    most_outliers,
    p_values,
    share_of_outliers,
    smoothed_p_values,
    threshold,
    threshold_rank,
    verdict,
)

Scores = np.ndarray
VALUES = st.integers(-3, 3).map(float) | st.floats(-1e6, 1e6) | st.sampled_from([math.inf, -math.inf])
POOLS = st.lists(VALUES, min_size=2, max_size=30).map(np.array)  # few different values, so that ties are common
LEVELS = st.integers(1, 999).map(lambda level: level / 1000)
P_VALUES = st.lists(st.integers(1, 20).map(lambda k: k / 20), min_size=1, max_size=25).map(np.array)


def at_most(level: float, failures: list[bool]) -> bool:
    """Whether failures of a probability of at most `level` are as rare as that, but for one chance in a thousand."""
    return sum(failures) <= binom.ppf(0.999, len(failures), level)


def left_out(pool: Scores) -> list[tuple[Scores, float]]:
    """Each score beside all others. If all are exchangeable, the new one is as likely any of them."""
    return [(np.delete(pool, i), float(pool[i])) for i in range(len(pool))]


def deal(
    rng: np.random.Generator, n: int, m: int, pi: float = 0.0, shift: float = 3.0
) -> tuple[Scores, Scores, Scores]:
    """Calibration scores, wild scores, and which of these are outliers."""
    is_outlier = np.arange(m) < round(pi * m)
    return rng.normal(size=n), rng.normal(size=m) + shift * is_outlier, is_outlier


# -- p-values and the threshold


@given(POOLS, LEVELS)
def test_p_values_and_threshold_keep_their_level_for_any_scores(pool: Scores, alpha: float) -> None:
    """By the argument itself: of all scores of a pool, at most a share α is beyond the level when it is the new one."""
    allowed = alpha * len(pool) + 1e-9
    assert sum(p_values(rest, [new])[0] <= alpha for rest, new in left_out(pool)) <= allowed
    assert sum(new > threshold(rest, alpha) for rest, new in left_out(pool)) <= allowed


@given(POOLS, POOLS, LEVELS)
def test_p_values_are_counted_and_the_threshold_is_where_they_are_below_the_level(
    c: Scores, w: Scores, alpha: float
) -> None:
    p, T = p_values(c, w), threshold(c, alpha)
    np.testing.assert_allclose(p, [(1 + sum(one >= new for one in c)) / (len(c) + 1) for new in w])
    above = w > T
    assert (p[above] <= alpha + 1e-9).all()
    if math.isfinite(T):
        assert (p[w < T] > alpha - 1e-9).all(), "no smaller threshold would do"


def test_over_many_deals_levels_are_kept_and_smoothed_p_values_are_uniform() -> None:
    rng, levels = np.random.default_rng(0), np.array([0.01, 0.05, 0.2, 0.5])
    plain, smooth = np.empty((2, 4000))
    for i in range(4000):
        pool = rng.integers(0, 12, 60) / 4 if i % 2 else rng.normal(size=60)  # ties in every other deal
        plain[i], smooth[i] = p_values(pool[1:], pool[:1])[0], smoothed_p_values(pool[1:], pool[:1], rng)[0]
    for alpha in levels:
        assert at_most(alpha, [*(plain <= alpha)])
        assert np.mean(smooth <= alpha) == pytest.approx(alpha, abs=4 * math.sqrt(alpha / 4000))
    assert smooth.min() > 0


@pytest.mark.parametrize(
    ("n", "alpha", "rank"), [(100, 0.05, 5), (99, 0.05, 5), (19, 0.05, 1), (18, 0.05, 0), (9, 0.3, 3)]
)
def test_the_rank_of_the_threshold_is_the_largest_that_keeps_the_level(n: int, alpha: float, rank: int) -> None:
    """A new ID sample is above the r-th largest of n with probability r / (n + 1): 5.9% for the sixth of 100."""
    assert threshold_rank(n, alpha) == rank
    assert rank / (n + 1) <= alpha + 1e-12 < (rank + 1) / (n + 1) + 1e-12
    scores = np.arange(float(n))
    assert threshold(scores, alpha) == (scores[-rank] if rank else math.inf)
    assert threshold_rank(calibration_needed(alpha), alpha) == 1
    assert threshold_rank(calibration_needed(alpha) - 1, alpha) == 0


def test_nan_is_above_everything_and_minus_infinity_below() -> None:
    c, w = np.array([1.0, 2.0, 3.0]), np.array([np.nan, np.inf, -np.inf, 2.0])
    assert p_values(c, w).tolist() == [0.25, 0.25, 1, 0.75]
    assert (smoothed_p_values(c, w, np.random.default_rng(0))[:2] <= 0.25).all()
    assert counts_above(c, w, np.array([1, 3])).tolist() == [2, 3]
    assert certificate(np.arange(200.0), np.full(50, np.nan))[-1] > 40


# -- how many are above a threshold


@given(st.integers(1, 5), st.integers(1, 5), st.data())
@settings(max_examples=40)
def test_the_excess_p_value_counts_all_ways_to_deal(n: int, m: int, data: st.DataObject) -> None:
    """Without outliers every choice of the m wild samples of the pool is as likely."""
    rank, count = data.draw(st.integers(1, n)), data.draw(st.integers(0, m))
    ways = []
    for wild in combinations(range(n + m), m):
        c = sorted(set(range(n + m)) - set(wild))
        ways.append(sum(w > c[-rank] for w in wild) >= count)
    found = excess_p_value(n, m, rank, count)
    assert found == pytest.approx(np.mean(ways), abs=1e-12)
    assert found == pytest.approx(hypergeom.cdf(rank - 1, n + m, n, rank + count - 1) if count else 1.0)


@given(st.integers(5, 60), st.integers(1, 60), st.data())
@settings(max_examples=40)
def test_most_outliers_is_the_largest_number_that_is_not_refuted(n: int, m: int, data: st.DataObject) -> None:
    rank, count = data.draw(st.integers(1, n)), data.draw(st.integers(0, m))
    possible = [k for k in range(count + 1) if betabinom.cdf(count - k, m - k, rank, n + 1 - rank) > 0.05]
    assert most_outliers(n, m, rank, count) == max(possible, default=0)


@pytest.mark.parametrize(("n", "m"), [(25, 40), (135, 400), (400, 150)])
def test_the_envelope_holds_at_all_thresholds_at_once(n: int, m: int) -> None:
    """Deals of scores; the module itself draws gammas and binomials."""
    rng, limits = np.random.default_rng(1), envelope(n, m)
    beyond: dict[float, list[bool]] = {0.05: [], 0.1: []}
    p = []
    for _ in range(1500):
        counts = counts_above(rng.normal(size=n), rng.normal(size=m), limits.ranks)
        p.append(limits.p_value(counts))
        for level, own in beyond.items():
            own.append(bool((counts > limits.most(level)).any()))
    for level, own in beyond.items():
        assert at_most(level, own)
        assert np.mean(own) > level / 2, "no wider than it has to be"
    for level in (0.01, FOUND, 0.2):
        assert at_most(level, [one <= level for one in p])


def lists(c: Scores, w: Scores, is_outlier: Scores) -> dict[str, np.ndarray]:
    """Ways to choose a list, also by somebody who knows the truth and wants the certificate to be wrong."""
    by_score = np.argsort(-w, kind="stable")
    return {
        "by score": by_score,
        "ID samples first": np.concatenate([by_score[~is_outlier[by_score]], by_score[is_outlier[by_score]]]),
        "only ID samples above some calibration score": by_score[~is_outlier[by_score] & (w[by_score] > np.median(c))],
    }


@pytest.mark.parametrize("pi", [0.0, 0.1, 0.5])
def test_the_certificate_is_right_for_every_list_and_every_length_at_once(pi: float) -> None:
    rng = np.random.default_rng(2)
    wrong: dict[str, list[bool]] = {}
    certified = []
    for _ in range(1000):
        c, w, is_outlier = deal(rng, 150, 200, pi)
        for name, listed in lists(c, w, is_outlier).items():
            found = certificate(c, w, listed)
            wrong.setdefault(name, []).append(bool((found > np.cumsum(is_outlier[listed])).any()))
        certified.append(certificate(c, w)[-1])
    for name, own in wrong.items():
        assert at_most(1 - CERTAINTY, own), name
    assert np.mean(certified) >= 0.4 * pi * 200, "and it certifies much of what is there"


@given(POOLS, st.lists(VALUES | st.just(math.nan), min_size=1, max_size=30).map(np.array), st.randoms())
@settings(max_examples=40)
def test_the_certificate_is_its_formula_and_rises_by_at_most_one(c: Scores, w: Scores, random: Random) -> None:
    listed = np.array(random.sample(range(len(w)), random.randint(0, len(w))), int)
    limits = envelope(len(c), len(w))
    slow = []
    for k in range(1, len(listed) + 1):
        above = [
            sum(math.isnan(w[i]) or w[i] > np.sort(c)[-rank] for i in listed[:k]) - most
            for rank, most in zip(limits.ranks, limits.most(0.05), strict=True)
        ]
        slow.append(max(0, *above))
    found = certificate(c, w, listed)
    assert found.tolist() == slow
    assert set(np.diff(found, prepend=0)) <= {0, 1}
    share = random.randint(1, 10) / 10
    enough = [k for k in range(1, len(listed) + 1) if found[k - 1] >= share * k - 1e-9]
    assert longest_certified(found, share) == max(enough, default=0)


# -- the verdict


@pytest.mark.parametrize(("n", "m"), [(60, 400), (300, 300)])
def test_without_outliers_hardly_anything_is_found(n: int, m: int) -> None:
    rng, found, drift, no_share = np.random.default_rng(3), [], [], []
    for _ in range(400):
        c, w, _ = deal(rng, n, m)
        own = verdict(c, w, np.flatnonzero(w > threshold(c, 0.05)))
        found.append(own.kind == "found")
        drift.append(own.kind == "drift")
        no_share.append(own.share.low > 0)
    assert at_most(FOUND, found)
    assert at_most(DRIFT, drift)
    assert at_most(0.05, no_share)


def test_the_verdict_finds_outliers_and_tells_a_hint_from_nothing() -> None:
    rng, kinds = np.random.default_rng(4), []
    for _ in range(60):
        c, w, _ = deal(rng, 135, 400, 0.1)
        own = verdict(c, w, np.flatnonzero(w > threshold(c, 0.05)))
        kinds.append(own.kind)
        assert own.certified <= own.certified_of_all <= own.above
        assert own.at_most >= own.certified
    assert kinds.count("found") >= 57
    c = np.arange(100.0)
    few = np.concatenate([np.full(11, 95.5), np.linspace(0, 90, 89)])
    hint = verdict(c, few, np.flatnonzero(few > 94))
    assert (hint.kind, hint.above) == ("cannot tell", 11)
    assert excess_p_value(hint.needed, 100, threshold_rank(hint.needed, 0.05), 11) <= FOUND
    none = verdict(c, c - 0.5, np.arange(95, 100))
    assert (none.kind, none.needed == 0 or none.p_value > 0.2) == ("nothing found", True)


def test_the_margin_is_that_of_the_number_of_id_samples_above_the_threshold() -> None:
    own = verdict(np.arange(199.0), np.arange(300.0) / 2, np.arange(0))
    assert own.expected == pytest.approx(300 * 10 / 200)
    assert own.margin == pytest.approx(1.96 * betabinom.std(300, 10, 190))


# -- π̂ and drift


@pytest.mark.parametrize("pi", [0.02, 0.1, 0.3])
def test_the_share_of_well_separated_outliers_has_little_bias_and_its_interval_covers_it(pi: float) -> None:
    rng, off, covered = np.random.default_rng(5), [], []
    for _ in range(300):
        c, w, _ = deal(rng, 300, 1000, pi, shift=5.0)
        found = share_of_outliers(c, w)
        off.append(found.value - pi)
        covered.append(found.low <= pi <= found.high)
    assert abs(np.mean(off)) < 0.015
    assert at_most(0.12, [not one for one in covered])


def test_the_lower_end_of_the_share_is_certified_also_where_outliers_hide() -> None:
    rng, wrong = np.random.default_rng(6), []
    for _ in range(500):
        c, w, _ = deal(rng, 200, 300, 0.2, shift=1.0)
        wrong.append(share_of_outliers(c, w).low > 0.2)
    assert at_most(0.05, wrong)


@pytest.mark.parametrize("pi", [0.0, 0.3])
def test_drift_has_few_false_alarms_also_with_outliers(pi: float) -> None:
    rng, alarms = np.random.default_rng(7), []
    for i in range(1500):
        n, m = [(12, 15), (150, 200), (40, 500)][i % 3]
        c, w, _ = deal(rng, n, m, pi, shift=6.0)
        alarms.append(drift_p_value(c, w) <= DRIFT)
    assert at_most(DRIFT, alarms)


def test_drift_finds_that_all_wild_samples_have_moved() -> None:
    rng = np.random.default_rng(8)
    moved = [drift_p_value(rng.normal(size=500), rng.normal(0.7, 1, 800)) <= DRIFT for _ in range(100)]
    assert np.mean(moved) >= 0.9
    assert drift_p_value(np.arange(50.0), np.arange(50.0) + 100) < 1e-9, "nothing is left below the median"
    assert drift_p_value(np.zeros(50), np.zeros(60)) == 1, "and nothing of equal scores"
    assert drift_p_value([], [1.0]) == drift_p_value([1.0], []) == 1


# -- many p-values


@given(P_VALUES, st.sampled_from([0.05, 0.1, 0.3, 0.7]))
def test_what_is_flagged_is_what_benjamini_and_hochberg_flag(p: Scores, fdr: float) -> None:
    np.testing.assert_array_equal(p <= false_discovery_cutoff(p, fdr), false_discovery_control(p) <= fdr * (1 + 1e-9))


def test_the_mean_share_of_false_discoveries_is_at_most_the_level() -> None:
    rng, shares, found = np.random.default_rng(9), [], []
    for _ in range(300):
        c, w, is_outlier = deal(rng, 2000, 200, 0.1, shift=4.0)
        p = p_values(c, w)
        flagged = p <= false_discovery_cutoff(p, 0.1)
        shares.append((flagged & ~is_outlier).sum() / max(1, flagged.sum()))
        found.append(flagged[is_outlier].mean())
    assert 0.05 < np.mean(shares) <= 0.1 + 2 * np.std(shares) / math.sqrt(300)
    assert np.mean(found) > 0.8


@given(st.integers(1, 60), st.integers(1, 60), st.sampled_from([0.05, 0.1, 0.25, 0.5]))
def test_least_flagged_is_the_number_that_is_tried_out(n: int, m: int, fdr: float) -> None:
    def flags(k: int) -> bool:
        return false_discovery_cutoff(np.where(np.arange(m) < k, 1 / (n + 1), 1.0), fdr) > 0

    tried = [k for k in range(1, m + 1) if flags(k)]
    assert least_flagged(n, m, fdr) == (tried[0] if tried else pytest.approx(m + 1, abs=1e9))
    assert bool(tried) == (least_flagged(n, m, fdr) <= m)


@given(P_VALUES)
def test_holm_goes_down_step_by_step(p: Scores) -> None:
    adjusted, rejected = holm(p), np.zeros(len(p), bool)
    for alpha in (0.05, 0.2, 0.6):
        rejected[:] = False
        for step, i in enumerate(np.argsort(p, kind="stable")):
            if p[i] * (len(p) - step) > alpha + 1e-12:
                break
            rejected[i] = True
        np.testing.assert_array_equal(adjusted <= alpha + 1e-12, rejected)


def test_empty_sides_are_no_evidence() -> None:
    none, some = np.zeros(0), np.arange(3.0)
    assert len(p_values(some, none)) == len(certificate(some, none)) == len(holm(none)) == 0
    assert p_values(none, some).tolist() == [1, 1, 1]
    assert certificate(none, some).tolist() == [0, 0, 0]
    assert threshold(none, 0.05) == math.inf
    assert false_discovery_cutoff(none, 0.1) == longest_certified(np.zeros(0, np.int64), 0.5) == 0


# --- label shift


@pytest.mark.parametrize(("k", "n", "m"), [(2, 40, 400), (10, 135, 420), (10, 2000, 8000), (150, 600, 900)])
def test_classes_with_the_same_shares_seem_to_differ_in_1_of_100_deals(k: int, n: int, m: int) -> None:
    """Also where many classes have few samples, or some lose more samples above T than others."""
    rng, alarms, finds = np.random.default_rng(k), [], []
    for _ in range(2000):
        shares, kept = rng.dirichlet(np.full(k, 1.0)), rng.uniform(0.7, 1, k)
        below = shares * kept / (shares @ kept)
        c = rng.multinomial(n, below)
        alarms.append(label_shift_p_value(c, rng.multinomial(m, below)) <= LABEL_SHIFT)
        finds.append(label_shift_p_value(c, rng.multinomial(m, np.roll(below, 1))) <= LABEL_SHIFT)
    assert np.mean(alarms) <= 0.015
    assert np.mean(finds) > 0.5
    none = np.zeros(k, int)
    assert label_shift_p_value(none, c) == label_shift_p_value(none, none) == 1
