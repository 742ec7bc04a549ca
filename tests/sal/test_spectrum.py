"""Directions of the centred gradients equal those of a dense eigendecomposition, whichever way they are found."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from helpers.representations import random_factors, random_representation
from torch import Tensor

from salcli.sal import spectrum
from salcli.sal.gradients import Factors, FactorSource, Gradients, Workers, mean_gradient
from salcli.sal.spectrum import CentredGradients, top_directions
from salcli.sal.tau import reference_gradients
from salcli.store.formats import RepresentationFile

N_CLASSES, N_FEATURES = 5, 7  # K·D is 35
Terms = list[tuple[CentredGradients, float]]


@dataclass(frozen=True)
class Way:
    """One of the ways through top_directions, and what must not be used on it."""

    small_side: int
    most_gram: int
    n_rows: int
    unused: tuple[str, ...]
    dense_gram: int = 256


WAYS = {
    "few columns": Way(35, 0, 60, ("gram", "covariance_product", "combine")),
    "few rows, by inner products": Way(0, 1000, 24, ("covariance", "covariance_product")),
    "few rows, iterated on inner products": Way(0, 1000, 24, ("covariance", "covariance_product"), dense_gram=0),
    "many rows, by passes": Way(0, 0, 60, ("gram", "covariance", "combine")),
    "fewer rows than columns, by passes": Way(0, 0, 24, ("gram", "covariance", "combine")),
}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    """Small data take a way that only large data would take; a step from another way fails."""
    chosen: Way = request.param
    monkeypatch.setattr(spectrum, "SMALL_SIDE", chosen.small_side)
    monkeypatch.setattr(spectrum, "MOST_GRAM", chosen.most_gram)
    monkeypatch.setattr(spectrum, "DENSE_GRAM", chosen.dense_gram)
    monkeypatch.setattr(spectrum, "PIECE_BYTES", 500)
    for name in chosen.unused:
        monkeypatch.setattr(CentredGradients, name, None)
    return chosen


@pytest.fixture
def factors(way: Way) -> Factors:
    return random_factors(way.n_rows, N_CLASSES, N_FEATURES, seed=3)


def centred(source: FactorSource, *, per_class: bool = False, **options: Any) -> CentredGradients:
    """About the mean gradient of other data, or one such mean for each class."""
    id_train = random_factors(100, N_CLASSES, N_FEATURES, seed=9)
    return CentredGradients(source, reference_gradients(id_train, N_CLASSES, class_conditional=per_class), **options)


def dense(gradients: CentredGradients) -> np.ndarray:
    """The matrix itself, row by row."""
    rows = []
    for chunk in gradients.source.chunks():
        for residual, feature, label in zip(chunk.residual, chunk.feature, chunk.label, strict=True):
            reference = gradients.reference[label] if len(gradients.reference) > 1 else gradients.reference[0]
            rows.append(np.outer(residual.double(), feature.double()).flatten() - reference.flatten().numpy())
    return np.stack(rows)


def slow_directions(terms: Terms, n_vectors: int) -> np.ndarray:
    """Eigenvectors of Σ weight · GᵀG with positive values, the largest first."""
    matrices = [(dense(G), weight) for G, weight in terms]
    values, vectors = np.linalg.eigh(sum(weight * G.T @ G for G, weight in matrices))
    return vectors[:, values > 1e-9 * values.max()].T[::-1][:n_vectors]


def assert_same_directions(found: Tensor, expected: np.ndarray) -> None:
    """Equal but for the sign, which no direction has."""
    vectors = found.flatten(1).numpy()
    assert vectors.shape == expected.shape
    signs = np.sign((vectors * expected).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(vectors * signs, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize("n_vectors", [1, 4])
@pytest.mark.parametrize("rows_per_chunk", [7, 8192])
def test_directions_equal_a_dense_decomposition_with_and_without_contrast(
    way: Way, rows_per_chunk: int, n_vectors: int, per_class: bool, stored: Callable[..., RepresentationFile]
) -> None:
    """Whatever the chunk of a file. Without contrast they are the singular vectors of G."""
    parts = [
        random_representation(way.n_rows // k, N_CLASSES, N_FEATURES, seed) for k, seed in ((2, 3), (4, 4), (4, 5))
    ]
    weights = [1 / len(parts[0]), 1 / len(parts[1]), -0.4 / len(parts[2])]
    in_memory, streamed = (
        [
            (centred(Gradients(read(x), x.label), per_class=per_class), weight)
            for x, weight in zip(parts, weights, strict=True)
        ]
        for read in (lambda x: x, lambda x: stored(x, rows_per_chunk))
    )
    assert_same_directions(top_directions(streamed, n_vectors), slow_directions(in_memory, n_vectors))
    alone = [(streamed[0][0], 1.0)]
    expected = np.linalg.svd(dense(in_memory[0][0])).Vh[:n_vectors]
    assert_same_directions(top_directions(alone, n_vectors), expected)


def test_a_direction_in_which_id_data_spread_more_does_not_count(way: Way) -> None:
    """Both sides along one axis, the wild side along a second one, too, less far."""
    n = way.n_rows // 2

    def along(first: float, second: float) -> CentredGradients:
        residual, feature = torch.zeros(n, N_CLASSES).double(), torch.zeros(n, N_FEATURES).double()
        residual[:, 0], feature[:, 0], feature[:, 1] = 1, first, torch.where(torch.arange(n) % 2 == 0, second, -second)
        zero = torch.zeros(1, N_CLASSES, N_FEATURES, dtype=torch.float64)
        return CentredGradients(Factors(residual, feature, torch.zeros(n, dtype=torch.int64)), zero)

    wild, ours = along(3.0, 1.0), along(3.1, 0.0)
    axes = np.eye(N_CLASSES * N_FEATURES)
    assert_same_directions(top_directions([(wild, 1 / n)], 1), axes[[0]])
    assert_same_directions(top_directions([(wild, 1 / n), (ours, -1 / n)], 3), axes[[1]])


class TwoHalves(Workers):
    """One of two processes; it has a third or two thirds of the rows, and does not wait for the other."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def share(self, source: FactorSource) -> FactorSource:
        return source[self.part(len(source))]

    def part(self, n: int) -> slice:
        return slice(n // 3) if self.rank == 0 else slice(n // 3, n)


def test_the_parts_of_several_processes_add_up(factors: Factors) -> None:
    """tests/engine has two real ones."""
    whole = centred(factors)
    halves = [centred(factors, workers=TwoHalves(rank)) for rank in (0, 1)]
    v = torch.randn(2, N_CLASSES, N_FEATURES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name, own in (
        ("covariance_product", (v,)),
        ("covariance", ()),
        ("combine", (torch.ones(len(factors), 2).double(),)),
    ):
        if getattr(CentredGradients, name) is not None:
            parts = [getattr(half, name)(*own) for half in halves]
            torch.testing.assert_close(parts[0] + parts[1], getattr(whole, name)(*own), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([half.project(v) for half in halves]), whole.project(v))


@pytest.mark.parametrize(("ratio", "n_expected"), [(1e-4, 2), (5e-7, 1)])
def test_a_direction_counts_down_to_a_millionth_of_the_largest(way: Way, ratio: float, n_expected: int) -> None:
    """All rows lie along one axis but the first, which is short and at a right angle to it."""
    residual = torch.zeros(way.n_rows, N_CLASSES, dtype=torch.float64)
    residual[:, 0], residual[0, 0], residual[0, 1] = 1, 0, ratio * np.sqrt(way.n_rows - 1)
    feature = torch.zeros(way.n_rows, N_FEATURES, dtype=torch.float64)
    feature[:, 0] = 1
    source = Factors(residual, feature, torch.zeros(way.n_rows, dtype=torch.int64))
    G = CentredGradients(source, torch.zeros(1, N_CLASSES, N_FEATURES, dtype=torch.float64))
    assert_same_directions(top_directions([(G, 1.0)], 3), np.eye(N_CLASSES * N_FEATURES)[[0, N_FEATURES]][:n_expected])


def test_rows_of_zeros_and_rows_that_equal_their_reference_have_no_direction(factors: Factors) -> None:
    """Rounding errors are no direction either."""
    zeros = Factors(torch.zeros_like(factors.residual), factors.feature, factors.label)
    reference = torch.zeros(1, N_CLASSES, N_FEATURES, dtype=torch.float64)
    assert top_directions([(CentredGradients(zeros, reference), 1.0)], 2).shape == (0, N_CLASSES, N_FEATURES)
    equal = factors[torch.zeros(len(factors), dtype=torch.int64)]
    assert len(top_directions([(CentredGradients(equal, mean_gradient(equal)[None]), 1.0)], 2)) == 0
    with pytest.raises(ValueError, match="no gradients"):
        top_directions([(CentredGradients(factors.of_class(99), reference), 1.0)], 2)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12])
def test_the_scale_of_the_gradients_does_not_matter(factors: Factors, scale: float) -> None:
    """The gradients of a confident network are tiny, and still have directions."""
    reference = torch.zeros(1, N_CLASSES, N_FEATURES, dtype=torch.float64)
    scaled = CentredGradients(Factors(factors.residual * scale, factors.feature, factors.label), reference)
    expected = np.linalg.svd(dense(CentredGradients(factors, reference))).Vh[:2]
    assert_same_directions(top_directions([(scaled, 1.0)], 2), expected)


@pytest.mark.parametrize("n_different", [1, 3, 20])
def test_results_repeat_to_the_last_bit(factors: Factors, n_different: int) -> None:
    """Even where the iteration runs out of directions and has to make one up."""
    G = centred(factors[torch.arange(len(factors)) % n_different])
    first = top_directions([(G, 1.0)], 4)
    assert all(torch.equal(top_directions([(G, 1.0)], 4), first) for _ in range(3))
