"""STEP: whitening, neighbours, the projection's loss and the distance to centres, each beside its definition."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from helpers.networks import shaken
from helpers.representations import random_matrix
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from salcli.methods.rival_step import (
    StructureParams,
    centre_scores,
    class_centres,
    nearest_others,
    projection_steps,
    structure_loss,
    whitening,
)
from salcli.models.backbones import build_backbone

SEEDS = st.integers(0, 10_000)


def squared_distance(one: Iterable[float], other: Iterable[float]) -> float:
    return sum((x - y) ** 2 for x, y in zip(one, other, strict=True))


@settings(max_examples=25)
@given(seed=SEEDS, ridge=st.just(0.0) | st.floats(0.01, 10))
def test_distances_of_whitened_points_are_mahalanobis_distances(seed: int, ridge: float) -> None:
    labeled = random_matrix(seed, 30, 4) @ random_matrix(seed + 1, 4, 4) + 5  # far from the identity and the origin
    x, y = random_matrix(seed + 2, 2, 4)
    matrix = whitening(labeled, ridge)
    precision = torch.linalg.inv(labeled.T.cov() + ridge * torch.eye(4, dtype=torch.float64))
    assert float((matrix @ (x - y)).square().sum()) == pytest.approx(float((x - y) @ precision @ (x - y)))


@settings(max_examples=25)
@given(seed=SEEDS, n=st.integers(2, 25), k=st.integers(1, 5))
def test_the_graph_holds_the_nearest_others_and_their_distances(seed: int, n: int, k: int) -> None:
    points = random_matrix(seed, n, 3)
    for i, (distance, index) in enumerate(zip(*map(torch.Tensor.tolist, nearest_others(points, k)), strict=True)):
        others = sorted((squared_distance(points[i].tolist(), points[j].tolist()), j) for j in range(n) if j != i)
        assert index == [j for _, j in others[:k]]
        assert distance == pytest.approx([math.sqrt(far) for far, _ in others[:k]], abs=1e-7)


def test_a_point_is_not_its_own_neighbour_even_among_copies_of_it() -> None:
    distance, index = nearest_others(torch.ones(6, 3), k=2)
    assert not (index == torch.arange(6)[:, None]).any()
    assert distance.max() == 0


@settings(max_examples=40)
@given(seed=SEEDS, n=st.integers(1, 6), d=st.integers(1, 4), margin=st.floats(0, 6))
def test_the_loss_keeps_neighbours_within_their_limit_and_others_apart(
    seed: int, n: int, d: int, margin: float
) -> None:
    anchor, neighbour, other = (random_matrix(seed + i, n, d) for i in range(3))
    limit = random_matrix(seed + 3, 1, n)[0].square()
    triples = list(zip(anchor.tolist(), neighbour.tolist(), other.tolist(), limit.tolist(), strict=True))
    keep = sum(max(0.0, squared_distance(a, b) - most) for a, b, _, most in triples) / n
    spread = sum(squared_distance(a, c) for a, _, c, _ in triples) / (n * d)
    expected = keep + max(0.0, margin - spread)
    assert float(structure_loss(anchor, neighbour, other, limit, margin)) == pytest.approx(expected)


def structure(**numbers: Any) -> StructureParams:
    return StructureParams(**{"neighbours": 6, "ridge": 1.0, "lr": 0.02, "weight_decay": 0.0, "margin": 3.0, **numbers})


def test_the_limit_of_a_neighbour_is_its_squared_distance_squared() -> None:
    """As the released code has it: with neighbours 2 apart, projected ones may be 4 apart before they cost anything."""
    points = torch.tensor([[0.0], [2.0]])
    near = nearest_others(points, 1)
    costs = []
    for factor in (1.99, 2.01):
        projection = nn.Linear(1, 1, bias=False)
        nn.init.constant_(projection.weight, factor)
        schedule = structure(steps=1, batch_size=8, lr=1e-9, margin=1e-12)
        costs += [float(x) for x in projection_steps(projection, points, *near, schedule, torch.Generator())]
    assert costs[0] == pytest.approx(0, abs=1e-11)
    assert costs[1] == pytest.approx((2 * 2.01) ** 2 - 16, rel=1e-4)


@settings(max_examples=25)
@given(seed=SEEDS)
def test_logits_are_minus_distances_to_the_class_means(seed: int) -> None:
    """A class without samples is nobody's nearest."""
    known, points = random_matrix(seed, 12, 3), random_matrix(seed + 1, 5, 3)
    labels = torch.arange(12) % 4
    rows = known.tolist()
    means = [[sum(rows[i][j] for i in range(c, 12, 4)) / 3 for j in range(3)] for c in range(4)]
    expected = [[-math.sqrt(squared_distance(point, mean)) for mean in means] for point in points.tolist()]
    expected = [[*row, -math.inf] for row in expected]
    found = centre_scores(points, class_centres(known, labels, 5))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("name", ["small-cnn", "resnet18", "wrn-10-1", "torchvision:mobilenet_v3_small"])
def test_levels_have_the_widths_they_say_and_end_in_the_features(name: str) -> None:
    backbone = shaken(build_backbone(name, 3, 0.0)).eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        levels, features = backbone.levels(images), backbone(images)
    assert tuple(level.shape[1] for level in levels) == backbone.level_widths
    torch.testing.assert_close(levels[-1], features)
