import numpy as np
import pytest
import torch
from scipy.stats import norm, spearmanr

from salcli.methods import mixture
from salcli.methods.mixture import Contrast, NormalQuantiles, Samples, fit_mixture, held_out


def drawn(n: int, n_outliers: int, seed: int, d: int = 12) -> tuple[Samples, np.ndarray]:
    """ID samples are standard normal, outliers are shifted; the first three scores see it, the last one does not."""
    rng = np.random.default_rng(seed)
    is_ood = np.arange(n) < n_outliers
    feature = rng.normal(size=(n, d)) + 1.5 * is_ood[:, None] * (np.arange(d) < 4)
    scores = feature[:, :4].sum(1, keepdims=True) * [0.5, 0.5, 0.5, 0] + rng.normal(size=(n, 4))
    own = Samples(*(torch.from_numpy(one) for one in (feature, feature[:, :3], scores)))
    return own, is_ood


TRAINING = drawn(300, 0, 100)[0].feature


@pytest.fixture(scope="module")
def sides() -> tuple[Samples, Samples]:
    return drawn(150, 0, 1)[0], drawn(400, 40, 2)[0]


def test_quantiles_are_normal_quantiles_of_the_middle_rank() -> None:
    scores = torch.tensor([[3.0], [1.0], [1.0], [2.0]])
    assert NormalQuantiles.fit(scores)(scores)[:, 0].numpy() == pytest.approx(norm.ppf([7 / 8, 2 / 8, 2 / 8, 5 / 8]))


def test_a_table_of_many_scores_keeps_few_of_them() -> None:
    scores = torch.from_numpy(np.random.default_rng(0).exponential(size=(5000, 1)))
    quantiles = NormalQuantiles.fit(scores)
    assert quantiles.value.shape[1] == mixture.MOST_KNOTS
    exact = norm.ppf((np.argsort(np.argsort(scores[:, 0].numpy())) + 0.5) / 5000)
    assert np.abs(quantiles(scores)[:, 0].numpy() - exact).max() < 0.1


def test_direction_leaves_each_sample_out() -> None:
    (calibration, _), (wild, _) = drawn(30, 0, 3, d=4), drawn(40, 10, 4, d=4)
    feature = np.concatenate([calibration.feature.numpy(), wild.feature.numpy()])
    is_wild = np.arange(70) >= 30
    _, _, left_out = mixture._directions(feature, is_wild, None)

    y, share = np.where(is_wild, 1.0, -1.0), np.where(is_wild, 0.5 / 40, 0.5 / 30)
    mean, std = share @ feature, feature.std(0)
    x = (feature - mean) / std
    variance = np.trace((x * share[:, None]).T @ x) / 4

    def refitted(ridge: float) -> np.ndarray:
        """Slow and obvious: one ridge regression, with an intercept, for each sample that is left out."""
        found, design = np.empty(70), np.column_stack([x, np.ones(70)])
        for i in range(70):
            kept = np.arange(70) != i
            gram = (design[kept] * share[kept, None]).T @ design[kept] + np.diag([ridge * variance] * 4 + [0])
            found[i] = design[i] @ np.linalg.solve(gram, design[kept].T @ (share * y)[kept])
        return found

    best = min((refitted(ridge) for ridge in mixture.RIDGES), key=lambda one: share @ (one - y) ** 2)
    assert left_out == pytest.approx(best, abs=1e-4)


def test_the_contrast_is_cosines_as_they_are_written_and_leaves_each_sample_out(sides: tuple[Samples, Samples]) -> None:
    pool = torch.cat([one.feature for one in sides])
    committee = torch.cat([one.scores for one in sides]).mean(1)
    contrast, new = Contrast.fit(pool, committee, TRAINING), drawn(40, 20, 5)[0].feature

    def cosines(x: torch.Tensor, others: torch.Tensor) -> np.ndarray:
        a, b = ((one - pool.mean(0)) / pool.std(0, correction=0) for one in (x, others))
        return torch.nn.functional.cosine_similarity(a[:, None], b[None], dim=2).numpy()

    kept = committee.numpy() >= np.sort(committee.numpy())[-28]  # 5% of 550

    def slow(x: torch.Tensor, own: np.ndarray) -> np.ndarray:
        to_outlying = cosines(x, pool[torch.from_numpy(kept)])
        to_outlying[own] = -np.inf
        return np.sort(to_outlying, 1)[:, -5] - np.sort(cosines(x, TRAINING), 1)[:, -5]

    itself = np.zeros((550, kept.sum()), bool)
    itself[np.flatnonzero(kept), np.arange(kept.sum())] = True
    assert contrast(pool).numpy() == pytest.approx(slow(pool, itself), abs=1e-5)
    assert contrast(new).numpy() == pytest.approx(slow(new, np.zeros((40, kept.sum()), bool)), abs=1e-5)


def test_it_does_not_matter_to_the_contrast_which_samples_are_calibration(sides: tuple[Samples, Samples]) -> None:
    pool, scores = (torch.cat(parts) for parts in zip(*((one.feature, one.scores) for one in sides), strict=True))
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(pool)))
    first = Contrast.fit(pool, scores.mean(1), TRAINING)(pool)
    second = Contrast.fit(pool[order], scores.mean(1)[order], TRAINING)(pool)
    torch.testing.assert_close(first, second)


def test_coefficients_maximise_the_posterior_as_it_is_written() -> None:
    rng = np.random.default_rng(0)
    x, u, is_wild = rng.normal(size=(200, 4)), 4 * rng.normal(size=200), np.arange(200) >= 60
    x[:, 0] = 1
    x[is_wild, 2] += np.where(np.arange(140) < 30, 2.0, 0.0)
    prior = np.array([0.04, 1 / 3, 1.0, 1.0])
    found, _ = mixture._fitted(x, u, is_wild, np.log(140 / 60), prior, np.array([-5.0, 0, 0, 0]))

    def log_posterior(coefficients: np.ndarray) -> float:
        ratio = 140 / 60 * (1 + np.exp(u + x @ coefficients))  # p(W|x) / p(C|x)
        likelihood = np.where(is_wild, ratio, 1) / (1 + ratio)
        return float(np.log(likelihood).sum() - 0.5 * prior @ (coefficients - [-5, 0, 0, 0]) ** 2)

    assert found[1] >= 0
    for i in range(4):
        for step in (-0.01, 0.01):
            moved = found + step * (np.arange(4) == i)
            if moved[1] >= 0:
                assert log_posterior(moved) < log_posterior(found)


def test_h_does_not_depend_on_the_order_of_rows(sides: tuple[Samples, Samples]) -> None:
    calibration, wild = sides
    order = np.random.default_rng(0).permutation(400)
    shuffled = fit_mixture(TRAINING, calibration.take(np.arange(150)[::-1].copy()), wild.take(order))
    expected = fit_mixture(TRAINING, calibration, wild).h(wild)[torch.from_numpy(order)]
    assert shuffled.h(wild.take(order)).numpy() == pytest.approx(expected.numpy(), abs=0.02)


def test_the_same_input_gives_the_same_bytes(sides: tuple[Samples, Samples]) -> None:
    assert torch.equal(fit_mixture(TRAINING, *sides).weight, fit_mixture(TRAINING, *sides).weight)


def test_outliers_are_found_and_counted() -> None:
    wild, is_ood = drawn(3000, 300, 6)
    p = fit_mixture(TRAINING, drawn(1000, 0, 5)[0], wild).h(wild).sigmoid().numpy()
    assert p.mean() == pytest.approx(0.1, abs=0.02)
    assert is_ood[p > 0.5].mean() > 0.8


def test_without_outliers_it_ranks_as_the_committee() -> None:
    calibration, wild = drawn(1000, 0, 7)[0], drawn(3000, 0, 8)[0]
    model, new = fit_mixture(TRAINING, calibration, wild), drawn(1000, 0, 9)[0]
    assert model.h(wild).sigmoid().mean() < 0.02
    assert spearmanr(model.h(new), model.quantiles.committee(new.scores)).statistic > 0.9


def test_known_samples_help_features_that_were_not_trained_on_them() -> None:
    (calibration, _), (wild, _), (known, _) = drawn(60, 0, 1, 60), drawn(600, 60, 2, 60), drawn(2000, 0, 3, 60)
    new, truth = drawn(2000, 1000, 4, d=60)

    def mean_gap(model: mixture.Mixture) -> float:
        h = model.h(new).numpy()
        return float((h[truth].mean() - h[~truth].mean()) / h[~truth].std())

    known_too, without = (fit_mixture(known.feature, calibration, wild, is_frozen=frozen) for frozen in (True, False))
    assert mean_gap(known_too) > mean_gap(without)


def test_held_out_scores_treat_calibration_and_wild_id_samples_alike() -> None:
    calibration, wild = drawn(400, 0, 10)[0], drawn(1200, 0, 11)[0]
    found = held_out(TRAINING, calibration, wild)
    above = (found.wild.numpy()[:, None] > found.calibration.numpy()).mean()
    assert above == pytest.approx(0.5, abs=0.06)


def test_a_constant_score_and_a_constant_feature_change_nothing_else() -> None:
    (calibration, _), (wild, _) = drawn(100, 0, 1), drawn(200, 20, 2)
    constant = [Samples(torch.cat([x.feature, torch.ones(len(x.feature), 1)], 1), *x[1:]) for x in (calibration, wild)]
    assert torch.isfinite(fit_mixture(torch.cat([TRAINING, torch.ones(300, 1)], 1), *constant).h(constant[1])).all()
