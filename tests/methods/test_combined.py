"""Scores made of others: the committee, and SAL+ beside its objective, its promises and its fallback."""

import math
from typing import TypeVar

import numpy as np
import pytest
import torch
from helpers.quick import REPOSITORY
from helpers.representations import InFours
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from salcli.conformal.evidence import p_values
from salcli.errors import ThresholdError
from salcli.methods import LEAST_CALIBRATION, MEMBERS, combined, mixture
from salcli.methods.base import Head, Known, PostHoc, finite
from salcli.methods.combined import CombinedParams, Committee, SalPlus
from salcli.methods.features import Mahalanobis
from salcli.methods.logits import Energy, GradNorm, Msp
from salcli.methods.mixture import Mixture, NormalQuantiles, Samples, fit_mixture, held_out
from salcli.params.schema import load_params
from salcli.sal.gradients import Representation
from salcli.sal.metrics import ood_metrics

P = TypeVar("P", bound=PostHoc)
D, K = 20, 3
HEAD = Head(*(torch.from_numpy(np.random.default_rng(9).normal(size=shape)) for shape in ((K, D), K)))


def samples(seed: int, n: int, n_ood: int = 0, shift: float = 3.0) -> Representation:
    """The last ones are moved along one feature that no head looks at much."""
    feature = np.random.default_rng(seed).normal(size=(n, D)).astype(np.float32)
    feature[n - n_ood :, 0] += shift
    logits = HEAD.logits(torch.from_numpy(feature)).float()
    return Representation(torch.from_numpy(feature), logits, logits.argmax(1))


TRAINING = samples(1000, 200).feature


def members() -> CombinedParams:
    return CombinedParams({"energy": Energy(), "msp": Msp(), "mahalanobis": Mahalanobis()})


def known(calibration: Representation, wild: Representation, **others: object) -> Known:
    return Known(HEAD, samples(1000, 200), wild, calibration=calibration, **others)


def fitted(method: P, calibration: Representation, wild: Representation, **others: object) -> P:
    method.fit(known(calibration, wild, **others))
    return method


def member_scores(x: Representation) -> Tensor:
    columns = []
    for method in members().members.values():
        method.fit(Known(HEAD, samples(1000, 200)))
        columns.append(method.scores(x))
    return torch.stack(columns, dim=1)


def as_samples(x: Representation) -> Samples:
    return Samples(x.feature, x.logits, member_scores(x))


# -- the committee


@given(st.integers(0, 1000), st.integers(1, 25), st.integers(1, 25))
@settings(max_examples=40)
def test_normal_quantiles_keep_the_order_and_have_the_middle_rank_of_ties(seed: int, n: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    own, others = (torch.from_numpy(rng.integers(0, 9, (k, 1)).astype(float)) for k in (n, m))
    transform = NormalQuantiles.fit(own)
    both = torch.cat([own, others * 3 - 8])  # also far outside
    mapped = transform(both)[:, 0]
    assert mapped.isfinite().all()
    larger = both[:, 0][:, None] > both[:, 0][None, :]
    assert (mapped[:, None] > mapped[None, :])[larger].all()
    for value, found in zip(own[:, 0].tolist(), transform(own)[:, 0].tolist(), strict=True):
        middle = float((own < value).sum() + (own == value).sum() / 2) / len(own)
        assert found == pytest.approx(float(torch.special.ndtri(torch.tensor(middle, dtype=torch.float64))), abs=1e-9)


def test_few_knots_stand_for_many_values() -> None:
    scores = torch.randn(5000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = torch.special.ndtri((scores.argsort(0).argsort(0) + 0.5).double() / 5000)
    torch.testing.assert_close(NormalQuantiles.fit(scores)(scores), exact, atol=0.02, rtol=0)


def test_the_committee_is_the_mean_of_normal_quantiles_of_the_pool() -> None:
    calibration, wild, x = samples(1, 60), samples(2, 80, n_ood=10), samples(3, 40)
    committee = fitted(Committee(members()), calibration, wild)
    pool = torch.cat([member_scores(calibration), member_scores(wild)])
    expected = sum(NormalQuantiles.fit(pool[:, [i]])(member_scores(x)[:, [i]])[:, 0] for i in range(3)) / 3
    torch.testing.assert_close(committee.scores(x), expected)
    torch.testing.assert_close(committee.score(x), expected)


def test_it_does_not_matter_to_the_committee_which_samples_are_calibration() -> None:
    pool, order = samples(1, 140, n_ood=10), torch.from_numpy(np.random.default_rng(0).permutation(140))
    first = fitted(Committee(members()), pool.take(torch.arange(60)), pool.take(torch.arange(60, 140))).scores(pool)
    second = fitted(Committee(members()), pool.take(order[:60]), pool.take(order[60:])).scores(pool)
    torch.testing.assert_close(first, second)


def test_members_are_a_list_of_their_own_and_one_that_fails_is_left_out_with_a_note() -> None:
    params, notes = load_params(REPOSITORY / "params.yaml")[0], []
    committee = Committee.from_params(params)
    assert tuple(committee.params.members) == MEMBERS
    committee.fit(known(samples(1, 30), samples(2, 40), note=notes.append))
    assert {*MEMBERS} - {*committee.members} == set()
    few = CombinedParams({**members().members, "bad": BadScore()})
    committee = fitted(Committee(few), samples(1, 30), samples(2, 40), note=notes.append)
    assert "bad" not in committee.members
    assert notes == ["Committee leaves out bad: bad gives NaN or infinity for 1 of 40 samples; use another score"]


class BadScore(GradNorm):
    name = "bad"

    def score(self, x: Representation) -> Tensor:
        return torch.where(torch.arange(len(x)) == 35, torch.inf, super().score(x))


def test_undefined_scores_are_counted() -> None:
    with pytest.raises(ThresholdError, match="mine gives NaN or infinity for 2 of 3 samples"):
        finite("mine", torch.tensor([math.nan, 1.0, -math.inf]))


# -- SAL+


def test_the_score_is_the_h_of_the_mixture_also_chunk_by_chunk_and_one_by_one() -> None:
    calibration, wild, x = samples(1, 80), samples(2, 200, n_ood=40), samples(3, 50)
    method = fitted(SalPlus(members()), calibration, wild)
    model = fit_mixture(TRAINING, as_samples(calibration), as_samples(wild))
    for source in (x, wild, InFours(**vars(x))):
        torch.testing.assert_close(method.scores(source), model.h(as_samples(Representation(**vars(source)))))
    torch.testing.assert_close(method.score(x), method.scores(x))
    restored = SalPlus.from_settings(method.settings())
    before = method.scores(x)
    method.compact(0)  # as a detector's file has it
    restored.restore(method.state())
    torch.testing.assert_close(restored.score(x), before)


def slow_objective(h: np.ndarray, is_wild: np.ndarray) -> float:
    """−log-likelihood of calibration against wild where p(W|x) / p(C|x) = (m/n) (1 + e^h)."""
    ratio = is_wild.sum() / (~is_wild).sum() * (1 + np.exp(h))
    return float(-np.log(np.where(is_wild, ratio, 1) / (1 + ratio)).sum())


def test_the_coefficients_are_the_most_probable_ones() -> None:
    """No small step from them has a smaller objective, written out; and the direction never counts against itself."""
    rng, n = np.random.default_rng(0), 300
    x, is_wild = np.column_stack([np.ones(n), rng.normal(size=(n, 4))]), np.arange(n) >= 100
    x[is_wild & (np.arange(n) < 160), 2:] += 2.0
    x[is_wild, 1] -= 1.0  # a direction that speaks against the wild data
    u, prior = x[:, 2] / 2, np.r_[1 / 25, 1 / 3, 1.0, 1.0, 1.0]
    found, _ = mixture._fitted(x, u, is_wild, np.log(2.0), prior, np.r_[-5.0, np.zeros(4)])

    def slow(coefficients: np.ndarray) -> float:
        shift = coefficients - np.r_[-5.0, np.zeros(4)]
        return slow_objective(u + x @ coefficients, is_wild) + 0.5 * float(prior @ shift**2)

    assert found[1] == 0
    for step in rng.normal(size=(200, 5)):
        near = found + 0.05 * step
        near[1] = max(0.0, near[1])
        assert slow(near) >= slow(found) - 1e-5


def test_sal_plus_finds_what_no_member_sees_and_is_the_committee_where_there_is_nothing() -> None:
    test = samples(5, 2000, n_ood=1000, shift=2.5)
    gains, losses = [], []
    for seed in range(3):
        calibration, train = samples(seed + 10, 300), known(samples(seed + 10, 300), samples(seed + 20, 900, 120, 2.5))
        for wild, kept in ((train.wild, gains), (samples(seed + 30, 900), losses)):
            scores = [
                fitted(kind(members()), calibration, wild, is_frozen=True).scores(test) for kind in (SalPlus, Committee)
            ]
            plus, plain = (ood_metrics(one[:1000].numpy(), one[1000:].numpy()).auroc for one in scores)
            kept.append(plus - plain)
    assert np.mean(gains) > 0.1
    assert np.mean(losses) > -0.02


def test_p_above_one_half_is_mostly_outliers_and_held_out_scores_keep_the_threshold() -> None:
    """The log-odds are calibrated; scores of models that saw the calibration samples are not, those of folds are."""
    is_ood, precision, errors, seen = torch.arange(600) >= 480, [], [], []
    for seed in range(6):
        calibration, wild = samples(2 * seed, 100), samples(2 * seed + 1, 600, n_ood=120, shift=4.0)
        method = fitted(SalPlus(members()), calibration, wild)
        own = method.held_out_scores()
        precision.append(float(is_ood[own.wild > 0].double().mean()))
        errors.append(np.mean(p_values(own.calibration.numpy(), own.wild[~is_ood].numpy()) <= 0.1))
        seen.append(np.mean(p_values(method.scores(calibration).numpy(), samples_scores(method)) <= 0.1))
    assert np.mean(precision) > 0.75
    assert np.mean(errors) == pytest.approx(0.1, abs=0.05)
    assert np.mean(seen) > np.mean(errors) - 0.02
    committee = fitted(Committee(members()), calibration, wild)
    for pair in method.exact_scores():  # of few calibration samples half would certify less
        torch.testing.assert_close(pair, (committee.scores(calibration), committee.scores(wild)))
    assert (SalPlus.is_exact, Committee.is_exact) == (False, True)


def test_what_certifies_treats_half_of_the_calibration_data_as_wild(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchange a sample of the second half with a wild one: they exchange their scores, and nothing else changes."""
    monkeypatch.setattr(combined, "ENOUGH_TO_SPLIT", 100)
    calibration, wild = samples(1, 120), samples(2, 200, n_ood=40)
    second = np.sort(np.array_split(np.random.default_rng([0, 2]).permutation(120), 2)[1])
    pool = Representation(
        *(torch.cat(sides) for sides in zip(*(vars(x).values() for x in (calibration, wild)), strict=True))
    )
    order = torch.arange(320)
    order[[int(second[7]), 120 + 190]] = order[[120 + 190, int(second[7])]]
    found = []
    for rows in (torch.arange(320), order):
        own = fitted(SalPlus(members()), pool.take(rows[:120]), pool.take(rows[120:]))
        found.append([*own.exact_scores()[0]])
    (c, w), (other_c, other_w) = found
    assert len(c) == 60
    assert float(c[7]) == pytest.approx(float(other_w[190]), abs=1e-2)
    assert float(w[190]) == pytest.approx(float(other_c[7]), abs=1e-2)
    torch.testing.assert_close(torch.cat([c[:7], w[:190]]), torch.cat([other_c[:7], other_w[:190]]), atol=1e-2, rtol=0)


def test_of_large_sides_some_samples_are_fitted_to_and_all_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combined, "MOST_ROWS", 200)
    is_ood, calibration = torch.arange(900) >= 780, samples(1, 300)
    method = fitted(SalPlus(members()), calibration, samples(2, 900, n_ood=120, shift=4.0))
    (held_back, wild), _ = method.exact_scores()
    for own in (method.held_out_scores().wild, wild):
        assert ood_metrics(own[~is_ood].numpy(), own[is_ood].numpy()).auroc > 0.85
    assert (len(method.held_out_scores().calibration), len(held_back)) == (300, 150)
    assert np.mean(p_values(held_back.numpy(), wild[~is_ood].numpy()) <= 0.1) == pytest.approx(0.1, abs=0.06)


def samples_scores(method: SalPlus) -> np.ndarray:
    """Of new ID samples."""
    return method.scores(samples(999, 400)).numpy()


def test_each_sample_is_held_out_of_the_model_that_scores_it() -> None:
    """Changed, it changes its own score by nothing but itself: as a new sample of the model of the other folds."""
    calibration, wild = as_samples(samples(1, 60)), as_samples(samples(2, 150, n_ood=30))
    found = held_out(TRAINING, calibration, wild, seed=3)
    rng = np.random.default_rng([3, 1])
    folds = [rng.permutation(len(one.logits)) % mixture.N_FOLDS for one in (calibration, wild)]
    rest = [one.take(np.flatnonzero(fold != 2)) for one, fold in zip((calibration, wild), folds, strict=True)]
    model = fit_mixture(TRAINING, *rest, seed=3)
    for values, one, fold in zip(found, (calibration, wild), folds, strict=True):
        torch.testing.assert_close(values[torch.from_numpy(fold == 2)], model.h(one.take(np.flatnonzero(fold == 2))))
    again = held_out(TRAINING, calibration, wild, seed=3)
    assert torch.equal(again.wild, found.wild)


def test_with_too_few_calibration_samples_it_is_the_committee_and_says_so() -> None:
    notes: list[str] = []
    calibration, wild, x = samples(1, LEAST_CALIBRATION - 1), samples(2, 100, n_ood=20), samples(3, 30)
    method = fitted(SalPlus(members()), calibration, wild, note=notes.append)
    torch.testing.assert_close(method.scores(x), fitted(Committee(members()), calibration, wild).scores(x))
    assert method.held_out_scores() is None
    assert notes == ["SAL+: fewer than 20 calibration samples to learn from, so it is the committee"]


@pytest.mark.parametrize("case", ["perfect", "constant", "all outliers", "many rows"])
def test_odd_data_give_finite_scores(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n_ood = {"perfect": 50, "all outliers": 200}.get(case, 20)
    wild, calibration = samples(0, 200, n_ood, shift=1000.0), samples(1, 60)
    if case == "constant":
        wild, calibration = (Representation(torch.ones_like(x.feature), x.logits, x.label) for x in (wild, calibration))
    if case == "many rows":
        monkeypatch.setattr(mixture, "MOST_ROWS", 50)
    model = fit_mixture(TRAINING, as_samples(calibration), as_samples(wild), is_frozen=True)
    assert isinstance(model, Mixture)
    assert float(model.evidence.sum()) == pytest.approx(1)
    for x in (wild, calibration, samples(7, 20)):
        assert model.h(as_samples(x)).isfinite().all()
    if case == "perfect":
        assert model.h(as_samples(wild))[150:].min() > model.h(as_samples(calibration)).max()
