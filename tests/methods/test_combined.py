"""Separators made of other scores: the committee, the learned one, the choice between them, and what T promises."""

import math

import numpy as np
import pytest
import torch
from helpers.representations import InFours
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from salcli.errors import ThresholdError
from salcli.methods import combined
from salcli.methods.base import Head, Known
from salcli.methods.combined import (
    CombinedParams,
    Committee,
    NormalQuantiles,
    Separator,
    blend,
    committee_scores,
    learn,
    ranks_by_content,
)
from salcli.methods.features import Mahalanobis
from salcli.methods.logits import Energy, GradNorm, Msp
from salcli.methods.sal import PREFERRED, FilterParams
from salcli.sal.gradients import Representation
from salcli.sal.score_choice import Trial, choose_score
from salcli.sal.separation import score_threshold

FILTER = FilterParams(
    score="learned", threshold_quantile=0.95, fdr=None, calibration="holdout", temperature=1.0, svd="class-conditional",
    reference="class-conditional", n_vectors=1, gradient="full", labels="predicted",
)  # fmt: skip
D, K = 20, 3
HEAD = Head(*(torch.from_numpy(np.random.default_rng(9).normal(size=shape)) for shape in ((K, D), K)))


def samples(seed: int, n: int, n_ood: int = 0, shift: float = 3.0) -> Representation:
    """The last ones are moved along one feature that no head looks at much."""
    feature = np.random.default_rng(seed).normal(size=(n, D)).astype(np.float32)
    feature[n - n_ood :, 0] += shift
    logits = HEAD.logits(torch.from_numpy(feature)).float()
    return Representation(torch.from_numpy(feature), logits, logits.argmax(1))


def scores_of(wild: Representation, calibration: Representation) -> dict[str, tuple[Tensor, Tensor]]:
    train = samples(1000, 200)
    found = {}
    for name, method in (("energy", Energy()), ("msp", Msp()), ("mahalanobis", Mahalanobis())):
        method.fit(Known(HEAD, train))
        found[name] = -method.scores(wild), -method.scores(calibration)
    return found


def choice(
    scores: dict[str, tuple[Tensor, Tensor]], wild: Representation, calibration: Representation
) -> tuple[str, list[Trial]]:
    ranks = ranks_by_content(wild, 0), ranks_by_content(calibration, 0)
    return choose_score(scores, ranks, 0.95, PREFERRED, np.random.default_rng(0))


def test_the_committee_is_the_mean_of_normal_quantiles_of_its_members() -> None:
    train, calibration, x = samples(1, 100), samples(2, 60), samples(3, 40)
    committee = Committee(CombinedParams({"energy": Energy(), "msp": Msp(), "gradnorm": GradNorm()}))
    committee.fit(Known(HEAD, train, calibration=calibration))
    expected = torch.zeros(40, dtype=torch.float64)
    for method in (Energy(), Msp(), GradNorm()):
        expected += NormalQuantiles.fit(-method.scores(calibration))(-method.scores(x)) / 3
    torch.testing.assert_close(-committee.scores(x), expected)


def test_without_outliers_t_keeps_its_promise_for_every_separator() -> None:
    """Deal ID samples again and again: a new one is above the r-th smallest of n with probability 1 − r/(n + 1)."""
    quantile, n, errors = 0.9, 100, {"committee": [], "learned": [], "blend": []}
    for seed in range(10):
        wild, calibration = samples(2 * seed, 300), samples(2 * seed + 1, n)
        scores = scores_of(wild, calibration)
        learned, mixed = learn(wild, calibration, scores, seed), blend(wild, calibration, scores, seed)
        scores |= {
            "committee": committee_scores(scores),
            "blend": mixed,
            "learned": (learned.wild, learned.calibration),
        }
        for name, own in errors.items():
            own.append(float((scores[name][0] > score_threshold(scores[name][1], quantile)).double().mean()))
    for name, own in errors.items():
        allowed = 3 * np.std(own) / math.sqrt(len(own))
        assert np.std(own) < 0.06
        assert np.mean(own) == pytest.approx(1 - math.ceil(quantile * n) / (n + 1), abs=allowed), name


def test_the_learned_separator_and_the_chosen_blend_find_what_no_score_sees() -> None:
    wild, calibration = samples(0, 1000, n_ood=250), samples(1, 800)
    scores = scores_of(wild, calibration)
    learned, mixed = learn(wild, calibration, scores, 0), blend(wild, calibration, scores, 0)
    scores |= {"committee": committee_scores(scores), "blend": mixed}
    chosen, trials = choice(scores, wild, calibration)
    assert [trial.score for trial in trials if trial.is_chosen] == [chosen] == ["blend"]
    scores["learned"] = learned.wild, learned.calibration
    missed = {
        name: float((own[0][750:] <= score_threshold(own[1], 0.95)).double().mean()) for name, own in scores.items()
    }
    single = min(missed[name] for name in ("energy", "msp", "mahalanobis", "committee"))
    assert max(missed["learned"], missed[chosen]) < single - 0.1
    # as a detector, it scores new samples as its folds do on average
    new, separator = samples(5, 300, n_ood=150), Separator(CombinedParams({"energy": Energy(), "msp": Msp()}, FILTER))
    separator.fit(Known(HEAD, samples(1000, 200), wild, calibration=calibration))
    score = separator.scores(new)
    assert float((score[:150, None] > score[None, 150:]).double().mean()) > 0.9
    assert set(separator.learned.transforms.by_name) == {"sal", "sal-T100", "energy", "msp"}
    torch.testing.assert_close(separator.scores(new.take(torch.arange(50))), score[:50])


def test_all_folds_are_fitted_together_as_scikit_learn_fits_each() -> None:
    rng = np.random.default_rng(0)
    x, n_wild, n_columns = rng.normal(size=(130, 5)) @ rng.normal(size=(5, 12)) + 7, 90, 12
    x[:20, 3] += 2
    x[:, 5], fold = 0.1, np.arange(130) % 10
    found = combined._models(x.copy(), n_wild, fold != np.arange(10)[:, None], (1e-3, 0.1))
    y = np.arange(130) < n_wild
    for k in range(10):
        own, label = x[fold != k], y[fold != k]
        spread = np.where(np.arange(n_columns) == 5, 1.0, own.std(axis=0)) / ([1] * 11 + [combined.COMMITTEE_SCALE])
        scaled = (own - own.mean(axis=0)) / spread
        weight = (~label).sum() / np.where(label, label.sum(), (~label).sum())
        model = LogisticRegression(tol=1e-8, max_iter=10_000)  # the optimum; ours stops at a gradient of 1e-4
        for i, strength in enumerate((1e-3, 0.1)):
            model.set_params(C=strength).fit(scaled, label, sample_weight=weight)
            output = scaled @ model.coef_[0]
            expected = (output - output[~label].mean()) / output[~label].std()
            np.testing.assert_allclose(own @ found[k, i, :-1] + found[k, i, -1], expected, atol=2e-3)


def test_neither_the_order_of_rows_nor_the_chunk_matters() -> None:
    n = 120
    wild, calibration = samples(0, n, n_ood=20), samples(1, 60)
    scores = scores_of(wild, calibration)
    before = learn(wild, calibration, scores, 0)
    order = torch.from_numpy(np.random.default_rng(0).permutation(n))
    shuffled = {name: (pair[0][order], pair[1]) for name, pair in scores.items()}
    after = learn(wild.take(order), calibration, shuffled, 0)
    torch.testing.assert_close(after.wild, before.wild[order], rtol=0, atol=1e-9)
    torch.testing.assert_close(after.calibration, before.calibration, rtol=0, atol=1e-9)
    streamed = learn(InFours(**vars(wild)), InFours(**vars(calibration)), scores, 0)
    torch.testing.assert_close(streamed.wild, before.wild, rtol=0, atol=1e-9)
    again = learn(wild, calibration, scores, 0)
    assert torch.equal(again.wild, before.wild)
    np.testing.assert_array_equal(np.sort(ranks_by_content(wild, 0)), np.arange(n))
    twice = ranks_by_content(wild.take(torch.arange(n).repeat(2)), 0)
    np.testing.assert_array_equal(twice[:n], twice[n:])  # equal samples are dealt into one fold


@pytest.mark.parametrize("case", ["perfect", "constant", "all outliers", "a class without calibration samples"])
def test_odd_data_give_finite_scores(case: str) -> None:
    n_ood = {"perfect": 50, "all outliers": 200}.get(case, 20)
    wild, calibration = samples(0, 200, n_ood, shift=1000.0), samples(1, 60)
    if case == "constant":
        wild, calibration = (Representation(torch.ones_like(x.feature), x.logits, x.label) for x in (wild, calibration))
    if case == "a class without calibration samples":
        calibration = calibration.take(torch.nonzero(calibration.predicted != 0).flatten())
    scores = {"energy": (-Energy().scores(wild), -Energy().scores(calibration))}
    learned = learn(wild, calibration, scores, 0)
    for in_wild, held_out in ((learned.wild, learned.calibration), blend(wild, calibration, scores, 0)):
        assert in_wild.isfinite().all()
        assert held_out.isfinite().all()
    if case == "perfect":  # the blend has but one score here, for which they are ID
        assert learned.wild[150:].min() > learned.calibration.quantile(0.95)


def test_too_few_calibration_samples_are_refused_with_what_works_instead() -> None:
    wild, calibration = samples(0, 100), samples(1, 19)
    with pytest.raises(ThresholdError, match=r"at least 20 calibration samples, got 19; .* or score committee"):
        learn(wild, calibration, scores_of(wild, calibration), 0)
    known, own = Known(HEAD, samples(1000, 200), wild, calibration=calibration), {"energy": Energy(), "msp": Msp()}
    separator, committee = Separator(CombinedParams(own, FILTER)), Committee(CombinedParams(own, FILTER))
    for one in (separator, committee):
        one.fit(known)
    torch.testing.assert_close(separator.scores(wild), committee.scores(wild))  # a row of evaluate has to be something
