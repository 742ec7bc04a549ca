"""Post-hoc scores, each beside its definition written out. A higher score is more ID-like."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from salcli.errors import ParamsError
from salcli.methods.activations import Ash, Dice, React
from salcli.methods.base import Head, Known, PostHoc, built_in
from salcli.methods.features import Knn, Mahalanobis, TiedGaussians, Vim, VirtualLogits, fitted_knn, vim_rule
from salcli.methods.logits import Energy, GradNorm, Msp, energy, gradnorm, msp
from salcli.methods.sal import FilterParams, SalPostHoc, labeled, unlabeled
from salcli.methods.separators import Committee, Separator
from salcli.sal.filter import class_conditional_scores
from salcli.sal.gradients import Gradients, Representation

SEEDS = st.integers(0, 10_000)
Matrix = Callable[..., Tensor]
Score = Callable[..., Tensor]


# --- logits


@given(seed=SEEDS, n=st.integers(1, 6), n_classes=st.integers(1, 6), scale=st.floats(0.1, 20))
def test_msp_and_energy_are_made_of_exponentials(
    random_matrix: Matrix, seed: int, n: int, n_classes: int, scale: float
) -> None:
    logits = random_matrix(seed, n, n_classes, scale)
    exponentials = [[math.exp(x) for x in row] for row in logits.tolist()]
    assert msp(logits).tolist() == pytest.approx([max(row) / sum(row) for row in exponentials])
    assert energy(logits).tolist() == pytest.approx([math.log(sum(row)) for row in exponentials], rel=1e-9, abs=1e-9)


def test_confident_predictions_keep_their_order_in_double_precision() -> None:
    """In float32 both probabilities are 1, and the ranking would be lost."""
    logits = torch.tensor([[20.0, 0.0], [25.0, 0.0]])
    assert float(logits.softmax(1)[0, 0]) == float(logits.softmax(1)[1, 0])
    assert msp(logits)[0] < msp(logits)[1]
    assert msp(logits).dtype == energy(logits).dtype == torch.float64


@settings(max_examples=20)
@given(seed=SEEDS, n_classes=st.integers(2, 6))
def test_gradnorm_is_the_norm_that_a_backward_pass_gives(activations: Matrix, seed: int, n_classes: int) -> None:
    features = activations(seed, 4).double()
    layer = torch.nn.Linear(7, n_classes, dtype=torch.float64)
    expected = []
    for feature in features:
        layer.zero_grad()
        (-layer(feature).log_softmax(0).sum() / n_classes).backward()  # cross-entropy with uniform targets
        assert layer.weight.grad is not None
        expected.append(float(layer.weight.grad.abs().sum()))
    assert gradnorm(features, layer(features).detach()).tolist() == pytest.approx(expected)


# --- energy of cut activations and weights


def slow_energy(features: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> list[float]:
    """Sums written out."""
    scores = []
    for row in features.astype(float).tolist():
        logits = [sum(x * w for x, w in zip(row, own, strict=True)) + b for own, b in zip(weight, bias, strict=True)]
        scores.append(math.log(sum(math.exp(logit) for logit in logits)))
    return scores


@settings(max_examples=20)
@given(seed=SEEDS, percentile=st.floats(1, 99.9))
def test_react_is_the_energy_of_features_clipped_at_the_percentile(
    random_head: Callable[..., Head], activations: Matrix, score_of: Score, seed: int, percentile: float
) -> None:
    head, features, known = random_head(seed), activations(seed + 2, 5), activations(seed + 3, 40)
    cut = np.minimum(features.numpy(), np.percentile(known.numpy().astype(float), percentile))
    found = score_of(React, head, features, known, percentile=percentile)
    assert found.tolist() == pytest.approx(slow_energy(cut, head.weight.numpy(), head.bias.numpy()), abs=1e-5)


@settings(max_examples=20)
@given(seed=SEEDS, percentile=st.floats(1, 99.9))
def test_dice_is_the_energy_of_the_weights_that_contribute_most(
    random_head: Callable[..., Head], activations: Matrix, score_of: Score, seed: int, percentile: float
) -> None:
    head, features, known = random_head(seed), activations(seed + 2, 5), activations(seed + 3, 40)
    weight = head.weight.numpy().copy()
    contribution = weight * known.double().mean(0).numpy()
    limit = np.percentile(contribution, percentile)
    assume(np.abs(contribution - limit).min() > 1e-6)  # else rounding decides which side a weight is on
    weight[contribution <= limit] = 0
    found = score_of(Dice, head, features, known, percentile=percentile)
    assert found.tolist() == pytest.approx(slow_energy(features.numpy(), weight, head.bias.numpy()), abs=1e-5)


@settings(max_examples=20)
@given(seed=SEEDS, n_features=st.integers(1, 40))
def test_ash_keeps_each_samples_largest_activations_and_scales_them(
    random_head: Callable[..., Head], activations: Matrix, score_of: Score, seed: int, n_features: int
) -> None:
    head, features = random_head(seed, n_features=n_features), activations(seed + 2, 5, n_features)
    shaped = np.zeros((5, n_features))
    for row, own in zip(shaped, features.numpy().astype(float), strict=True):
        kept = np.argsort(own)[::-1][: max(1, n_features - round(0.95 * n_features))]
        row[kept] = own[kept] * math.exp(own.sum() / own[kept].sum()) if own.any() else 0
    logits = shaped @ head.weight.numpy().T + head.bias.numpy()  # large ones: exp alone would overflow
    expected = logits.max(1) + np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1))
    found = score_of(Ash, head, features, features, percentile=95.0)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


# --- KNN


def slow_knn(feature: list[float], neighbours: list[list[float]], k: int) -> float:
    """Put all on the unit sphere, measure every distance, sort, take the k-th."""

    def on_sphere(vector: list[float]) -> list[float]:
        return [x / math.hypot(*vector) for x in vector]

    distances = sorted(math.dist(on_sphere(feature), on_sphere(other)) for other in neighbours)
    return -distances[k - 1]


@settings(max_examples=30)
@given(
    seed=SEEDS, n_features=st.integers(1, 20), n_neighbours=st.integers(1, 25),
    at_once=st.tuples(st.integers(1, 40), st.integers(1, 40)), data=st.data(),
)  # fmt: skip
def test_knn_is_minus_the_distance_to_the_kth_neighbour_on_the_unit_sphere_in_blocks_of_any_size(
    random_matrix: Matrix, seed: int, n_features: int, n_neighbours: int, at_once: tuple[int, int], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, n_neighbours))
    features, neighbours = random_matrix(seed, 9, n_features), random_matrix(seed + 1, n_neighbours, n_features)
    expected = [slow_knn(row, neighbours.tolist(), k) for row in features.tolist()]
    assert fitted_knn(neighbours, k, *at_once)(features).tolist() == pytest.approx(expected, abs=1e-9)
    nothing = torch.zeros(1, n_features, dtype=torch.float64)  # ReLU features can all be zero
    assert float(fitted_knn(neighbours, k)(nothing)) == pytest.approx(-1)


@settings(max_examples=20)
@given(seed=SEEDS, exponent=st.integers(2, 12), k=st.integers(1, 6))
def test_knn_is_right_among_very_close_neighbours(random_matrix: Matrix, seed: int, exponent: int, k: int) -> None:
    """Products of float32 numbers would be wrong by 1e-4 here."""
    feature = random_matrix(seed, 1, 8)
    neighbours = feature + 10.0**-exponent * random_matrix(seed + 1, 6, 8)
    expected = slow_knn(feature[0].tolist(), neighbours.tolist(), k)
    assert float(fitted_knn(neighbours, k)(feature)) == pytest.approx(expected, abs=3e-8)
    assert float(fitted_knn(feature, 1)(feature)) == 0


def test_the_neighbours_of_a_training_sample_are_the_other_samples(
    random_head: Callable[..., Head], random_matrix: Matrix, represented: Callable[..., Representation]
) -> None:
    """Else each would be its own nearest neighbour, and training data would look too much like ID data."""
    head, known = random_head(0), random_matrix(1, 12, 7)
    x, knn = represented(head, known), Knn(Knn.Params(k=3))
    knn.fit(Known(head, x))
    rows = known.tolist()
    expected = [slow_knn(row, rows[:i] + rows[i + 1 :], 3) for i, row in enumerate(rows)]
    assert knn.scores(x, fitted_on=True).tolist() == pytest.approx(expected)
    knn = Knn(Knn.Params(k=12))
    knn.fit(Known(head, x))
    with pytest.raises(ParamsError, match=r"methods\.knn\.k is 12, but there are only 11 other ID training samples"):
        knn.scores(x, fitted_on=True)
    with pytest.raises(ParamsError, match=r"methods\.knn\.k is 13, but there are only 12 ID training samples"):
        Knn(Knn.Params(k=13)).fit(Known(head, x))


# --- Mahalanobis


def slow_mahalanobis(features: np.ndarray, known: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Means, centred samples, numpy's pseudo-inverse, every distance."""
    means = {k: known[labels == k].mean(0) for k in np.unique(labels)}
    centred = np.stack([row - means[k] for row, k in zip(known, labels, strict=True)])
    precision = np.linalg.pinv(centred.T @ centred / len(known), rcond=1e-12, hermitian=True)
    return np.array([-min((x - m) @ precision @ (x - m) for m in means.values()) for x in features])


@settings(max_examples=20)
@given(seed=SEEDS, n_classes=st.integers(1, 4))
def test_mahalanobis_is_the_distance_to_the_nearest_class_mean(
    random_matrix: Matrix, seed: int, n_classes: int
) -> None:
    known, features = random_matrix(seed, 60, 5), random_matrix(seed + 1, 6, 5, 3)
    labels = torch.arange(60) % n_classes * 2  # the classes between them have no sample
    fitted = TiedGaussians.fit(known, labels)
    assert fitted.rank == 5
    expected = slow_mahalanobis(features.numpy(), known.numpy(), labels.numpy())
    np.testing.assert_allclose(fitted.score(features), expected, rtol=1e-8)


@pytest.mark.parametrize("cause", ["dead units", "equal units", "few samples"])
def test_a_singular_covariance_is_inverted_where_it_can_be(
    cause: str, random_matrix: Matrix, random_head: Callable[..., Head], score_of: Score
) -> None:
    known, features = random_matrix(0, 60, 5).float(), random_matrix(1, 6, 5).float()
    if cause == "dead units":
        known[:, 3:] = 0
    elif cause == "equal units":
        known[:, 4] = known[:, 3]
        known[:, 2] = known[:, 3]
    else:
        known = known[:5]
    labels, notes = torch.arange(len(known)) % 2, []
    found = score_of(Mahalanobis, random_head(2, n_features=5), features, known, labels, notes)
    assert "the ID training features spread in 3 of 5 directions" in notes[0]
    expected = slow_mahalanobis(features.double().numpy(), known.double().numpy(), labels.numpy())
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert found.max() < 0


# --- ViM


def slow_vim(features: np.ndarray, head: Head, known: np.ndarray, dim: int) -> np.ndarray:
    weight, bias = head.weight.numpy(), head.bias.numpy()
    origin = -np.linalg.pinv(weight) @ bias
    principal = np.linalg.svd(known - origin)[2][:dim]

    def left_over(rows: np.ndarray) -> np.ndarray:
        shifted = rows - origin
        return np.linalg.norm(shifted - shifted @ principal.T @ principal, axis=1)

    alpha = (known @ weight.T + bias).max(1).mean() / left_over(known).mean()
    return np.array(slow_energy(features, weight, bias)) - alpha * left_over(features)


@settings(max_examples=20)
@given(seed=SEEDS, dim=st.integers(1, 6))
def test_vim_is_energy_less_what_the_principal_space_leaves_over(
    random_head: Callable[..., Head], random_matrix: Matrix, score_of: Score, seed: int, dim: int
) -> None:
    # directions of clearly different spread, so that there is one principal space
    stretched = torch.tensor([64.0, 32, 16, 8, 4, 2, 1], dtype=torch.float64) / 16
    head, features = random_head(seed), random_matrix(seed + 3, 5, 7)
    known, notes = random_matrix(seed + 2, 200, 7) * stretched, []
    found = score_of(Vim, head, features, known, notes=notes, dim=dim)
    np.testing.assert_allclose(found, slow_vim(features.numpy(), head, known.numpy(), dim), rtol=1e-9, atol=1e-9)
    assert notes == []


def test_vim_leaves_a_direction_over_where_the_training_features_span_few(
    random_matrix: Matrix, activations: Matrix, score_of: Score
) -> None:
    """Else their own left-over is zero, and its scale infinite."""
    head = Head(random_matrix(0, 4, 7), torch.zeros(4, dtype=torch.float64))
    known, features, notes = activations(1, 50), activations(2, 5), []
    known[:, 3:] = 0
    found = score_of(Vim, head, features, known, notes=notes, dim=5)
    assert "span 3 dimensions, so its principal space has 2 instead of 5" in notes[0]
    np.testing.assert_allclose(found, slow_vim(features.double().numpy(), head, known.double().numpy(), 2), rtol=1e-6)
    collapsed = VirtualLogits.fit(head, torch.zeros(50, 7), 3)
    assert collapsed.rank == 0
    torch.testing.assert_close(collapsed.score(features), energy(head.logits(features)))


def test_a_principal_space_of_all_features_is_an_error(
    random_head: Callable[..., Head], activations: Matrix, score_of: Score
) -> None:
    head, known = random_head(0), activations(1, 50)
    with pytest.raises(ParamsError, match="must be less than the 7 features of the network; auto would be 3"):
        score_of(Vim, head, known, known, dim=7)
    assert [vim_rule(width) for width in (1, 64, 767, 768, 2048)] == [0, 32, 383, 512, 1000]  # the authors' rule


# --- τ


def filter_params(labels: str = "predicted", gradient: str = "full") -> FilterParams:
    return FilterParams(
        score="sal", threshold_quantile=0.95, fdr=None, calibration="holdout", temperature=1, svd="class-conditional",
        reference="class-conditional", n_vectors=1, gradient=gradient, labels=labels,
    )  # fmt: skip


@pytest.mark.parametrize("gradient", ["full", "predicted-row"])
def test_sal_post_hoc_is_minus_tau_and_0_for_classes_that_the_wild_data_lack(
    gradient: str, random_head: Callable[..., Head], activations: Matrix, represented: Callable[..., Representation]
) -> None:
    head, notes = random_head(0), []
    known, wild, test = (represented(head, activations(seed, 80)) for seed in (1, 2, 3))
    wild = wild.take(torch.nonzero(wild.predicted != 1).flatten())
    test.feature[5], test.logits[5] = torch.nan, torch.nan
    method = SalPostHoc(filter_params(gradient=gradient))
    method.fit(Known(head, known, wild, note=notes.append))
    row_only = gradient == "predicted-row"
    sources = [Gradients(x, x.predicted, row_only) for x in (wild, test)]
    (tau,) = class_conditional_scores(sources[0], sources[1:], Gradients(known, known.label, row_only), range(4), 1)
    lacks = (test.predicted == 1) & ~test.feature.isnan().any(1)
    expected = torch.where(lacks, 0.0, -tau)
    torch.testing.assert_close(method.scores(test), expected, equal_nan=True)
    assert 0 < int(lacks.sum()) < len(test)
    assert expected[5].isnan()
    assert f"{int(lacks.sum())} test samples are of classes that no wild sample is predicted as" in notes[0]


def test_labels_are_true_predicted_or_random_by_seed_and_samples(
    random_head: Callable[..., Head], activations: Matrix, represented: Callable[..., Representation]
) -> None:
    x = represented(random_head(0), activations(1, 60), torch.arange(60) % 4)
    assert torch.equal(labeled(x, filter_params()).label, x.label)
    assert torch.equal(unlabeled(x, filter_params(), 0, "wild").label, x.predicted)
    first, again, other_seed, other_samples = (
        unlabeled(x, filter_params("random"), seed, what).label
        for seed, what in ((0, "wild"), (0, "wild"), (1, "wild"), (0, "test"))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other_seed)
    assert not torch.equal(first, other_samples)
    assert set(first.tolist()) == {0, 1, 2, 3}


# --- all of them


def test_samples_like_the_training_data_score_higher_with_every_method(score_of: Score) -> None:
    """One direction for all: long features near a class mean above short ones that no class is near to."""
    generator, labels = torch.Generator().manual_seed(0), torch.arange(300) % 3
    head = Head(torch.eye(8, dtype=torch.float64)[:3], torch.zeros(3, dtype=torch.float64))

    def familiar() -> Tensor:
        return 8 * torch.eye(8)[labels] + torch.rand(300, 8, generator=generator)

    known, both = familiar(), torch.cat([familiar(), 2 * torch.rand(300, 8, generator=generator)])
    kinds = {Msp: {}, Energy: {}, GradNorm: {}, Mahalanobis: {}, Knn: {"k": 20}, Vim: {"dim": 4}}
    # ASH at 90 would keep one of eight, and its exponential prefers the undecided
    kinds |= {React: {"percentile": 90.0}, Dice: {"percentile": 90.0}, Ash: {"percentile": 50.0}}
    assert {*kinds, SalPostHoc, Committee, Separator} == set(built_in(PostHoc).values())
    for kind, numbers in kinds.items():
        score = score_of(kind, head, both, known, labels, **numbers)
        assert score[:300].median() > score[300:].quantile(0.9), kind.name
