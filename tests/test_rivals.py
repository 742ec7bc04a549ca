"""The rivals' scores, each beside its definition written out. A higher score is more ID-like."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from salcli.rivals.activation_scores import ash, fitted_dice, fitted_react
from salcli.rivals.feature_scores import TiedGaussians, VirtualLogits, fitted_knn, knn
from salcli.rivals.head import Head
from salcli.rivals.logit_scores import energy, gradnorm, msp

SEEDS = st.integers(0, 10_000)


def random_matrix(seed: int, n: int, size: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(n, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def activations(seed: int, n: int, n_features: int = 7) -> Tensor:
    """As after a ReLU: half of them are zero."""
    return random_matrix(seed, n, n_features).clamp(min=0).float()


@given(seed=SEEDS, n=st.integers(1, 6), n_classes=st.integers(1, 6), scale=st.floats(0.1, 20))
def test_msp_is_the_largest_share_of_the_exponentials(seed: int, n: int, n_classes: int, scale: float) -> None:
    logits = random_matrix(seed, n, n_classes, scale)
    expected = [max(math.exp(x) for x in row) / sum(math.exp(x) for x in row) for row in logits.tolist()]
    assert msp(logits).tolist() == pytest.approx(expected)


@given(seed=SEEDS, n=st.integers(1, 6), n_classes=st.integers(1, 6), scale=st.floats(0.1, 20))
def test_energy_is_the_logarithm_of_the_sum_of_the_exponentials(
    seed: int, n: int, n_classes: int, scale: float
) -> None:
    logits = random_matrix(seed, n, n_classes, scale)
    expected = [math.log(sum(math.exp(x) for x in row)) for row in logits.tolist()]
    assert energy(logits).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_adding_to_all_logits_changes_energy_but_not_msp() -> None:
    logits = random_matrix(0, 5, 4)
    torch.testing.assert_close(msp(logits + 1000), msp(logits))
    torch.testing.assert_close(energy(logits + 1000), energy(logits) + 1000)


def test_confident_predictions_keep_their_order_in_double_precision() -> None:
    """In float32 both probabilities are 1, and the ranking would be lost."""
    logits = torch.tensor([[20.0, 0.0], [25.0, 0.0]])
    assert float(logits.softmax(1)[0, 0]) == float(logits.softmax(1)[1, 0])
    assert msp(logits)[0] < msp(logits)[1]
    assert msp(logits).dtype == energy(logits).dtype == torch.float64


def slow_knn(feature: list[float], neighbours: list[list[float]], k: int) -> float:
    """Put all on the unit sphere, measure every distance, sort, take the k-th."""

    def on_sphere(vector: list[float]) -> list[float]:
        return [x / math.hypot(*vector) for x in vector]

    distances = sorted(math.dist(on_sphere(feature), on_sphere(other)) for other in neighbours)
    return -distances[k - 1]


@settings(max_examples=30)
@given(seed=SEEDS, n=st.integers(1, 5), n_neighbours=st.integers(1, 20), n_features=st.integers(1, 20), data=st.data())
def test_knn_is_minus_the_distance_to_the_kth_neighbour_on_the_unit_sphere(
    seed: int, n: int, n_neighbours: int, n_features: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, n_neighbours))
    features, neighbours = random_matrix(seed, n, n_features), random_matrix(seed + 1, n_neighbours, n_features)
    expected = [slow_knn(row, neighbours.tolist(), k) for row in features.tolist()]
    assert knn(features, neighbours, k).tolist() == pytest.approx(expected, abs=1e-9)


def test_knn_looks_at_directions_only() -> None:
    features, neighbours = random_matrix(1, 6, 64), random_matrix(2, 40, 64)
    scales = torch.linspace(0.1, 50, 40, dtype=torch.float64)[:, None]
    expected = knn(features, neighbours, 5)
    torch.testing.assert_close(knn(7 * features, scales * neighbours, 5), expected, rtol=1e-6, atol=1e-8)


def test_knn_counts_repeated_neighbours_as_often_as_they_stand_there() -> None:
    neighbours = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    found = [float(knn(torch.tensor([[2.0, 0.0]]), neighbours, k)) for k in (1, 2, 3)]
    assert found == pytest.approx([0, 0, -math.sqrt(2)], abs=1e-6)


def test_a_feature_of_zeros_is_as_far_from_all_neighbours_as_they_are_long() -> None:
    """ReLU features can all be zero; the score must stay a number."""
    neighbours = random_matrix(0, 8, 4)
    found = knn(torch.zeros(1, 4, dtype=torch.float64), neighbours, 3)
    assert float(found) == pytest.approx(-1)


@settings(max_examples=20)
@given(
    seed=SEEDS, n=st.integers(1, 30), at_once=st.tuples(st.integers(1, 40), st.integers(1, 40)), k=st.integers(1, 25)
)
def test_knn_gives_the_same_in_blocks_of_any_size(seed: int, n: int, at_once: tuple[int, int], k: int) -> None:
    """The slow truth: the whole matrix of distances, sorted."""
    features, neighbours = random_matrix(seed, n, 20).float(), random_matrix(seed + 1, 25, 20).float()
    unit, unit_neighbours = (one.double() / one.double().norm(dim=1, keepdim=True) for one in (features, neighbours))
    distances = (unit[:, None] - unit_neighbours).square().sum(dim=2).sqrt()
    found = fitted_knn(neighbours, k, *at_once)(features)
    torch.testing.assert_close(found, -distances.sort(dim=1).values[:, k - 1], rtol=0, atol=1e-6)


@settings(max_examples=20)
@given(seed=SEEDS, exponent=st.integers(2, 12), k=st.integers(1, 6))
def test_knn_is_right_among_very_close_neighbours(seed: int, exponent: int, k: int) -> None:
    """Products of float32 numbers would be wrong by 1e-4 here."""
    feature = random_matrix(seed, 1, 8)
    neighbours = feature + 10.0**-exponent * random_matrix(seed + 1, 6, 8)
    expected = slow_knn(feature[0].tolist(), neighbours.tolist(), k)
    assert float(knn(feature, neighbours, k)) == pytest.approx(expected, abs=3e-8)
    assert float(knn(feature, feature, 1)) == 0


@settings(max_examples=20)
@given(seed=SEEDS, n_classes=st.integers(2, 6))
def test_gradnorm_is_the_norm_that_a_backward_pass_gives(seed: int, n_classes: int) -> None:
    features = activations(seed, 4).double()
    layer = torch.nn.Linear(7, n_classes, dtype=torch.float64)
    expected = []
    for feature in features:
        layer.zero_grad()
        (-layer(feature).log_softmax(0).sum() / n_classes).backward()  # cross-entropy with uniform targets
        assert layer.weight.grad is not None
        expected.append(float(layer.weight.grad.abs().sum()))
    assert gradnorm(features, layer(features).detach()).tolist() == pytest.approx(expected)


def test_samples_like_the_training_data_score_higher_with_every_rival() -> None:
    """One direction for all: long features near a class mean above short ones that no class is near to."""
    generator = torch.Generator().manual_seed(0)
    head, labels = (
        Head(torch.eye(8, dtype=torch.float64)[:3], torch.zeros(3, dtype=torch.float64)),
        torch.arange(300) % 3,
    )

    def familiar() -> Tensor:
        return 8 * torch.eye(8)[labels] + torch.rand(300, 8, generator=generator)

    known, features, strange = familiar(), familiar(), 2 * torch.rand(300, 8, generator=generator)
    both = torch.cat([features, strange])
    logits = head.logits(both)
    scores = {
        "msp": msp(logits),
        "energy": energy(logits),
        "gradnorm": gradnorm(both, logits),
        "knn": knn(both, known, 20),
        "mahalanobis": TiedGaussians.fit(known, labels).score(both),
        "vim": VirtualLogits.fit(head, known, 4).score(both),
        "react": fitted_react(head, known, 90.0)(both),
        "dice": fitted_dice(head, known, 90.0)(both),
        "ash": ash(both, head, 50.0),  # at 90 it keeps one of eight, and its exponential prefers the undecided
    }
    for name, score in scores.items():
        assert score[:300].median() > score[300:].quantile(0.9), name
