"""Singular vectors of the centred gradients equal those of a dense SVD, whichever way they are found."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers.representations import random_factors, random_representation
from torch import Tensor

from salcli.sal import spectrum
from salcli.sal.gradients import Factors, FactorSource, Gradients, mean_gradient
from salcli.sal.separation import reference_gradients
from salcli.sal.spectrum import CentredGradients, top_singular_vectors
from salcli.store.formats import RepresentationFile

N_CLASSES, N_FEATURES = 5, 7


@dataclass(frozen=True)
class Way:
    """One of the ways through top_singular_vectors, and what must not be used on it."""

    small_side: int
    n_rows: int  # K·D is 35
    unused: tuple[str, ...]
    gram_side: int = 0
    most_columns: int = 0


WAYS = {
    "Gram matrix, fewer rows": Way(1000, 20, ("covariance", "covariance_product", "project")),
    "Gram matrix, more rows": Way(1000, 60, ("covariance", "covariance_product", "project")),
    "covariance matrix": Way(35, 60, ("gram", "covariance_product", "project", "combine")),
    "iterated on the Gram matrix": Way(0, 25, ("covariance", "covariance_product", "project"), gram_side=1000),
    "iterated, fewer rows": Way(0, 25, ("gram", "covariance", "covariance_product")),
    "iterated, fewer rows, few columns": Way(0, 25, ("gram", "covariance", "project", "combine"), most_columns=35),
    "iterated, more rows": Way(0, 60, ("gram", "covariance", "project", "combine")),
}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    """Small data take a way that only large data would take; a step from another way fails."""
    chosen: Way = request.param
    monkeypatch.setattr(spectrum, "SMALL_SIDE", chosen.small_side)
    monkeypatch.setattr(spectrum, "MOST_GRAM", chosen.gram_side)
    monkeypatch.setattr(spectrum, "MOST_COLUMNS", chosen.most_columns)
    monkeypatch.setattr(spectrum, "PIECE_BYTES", 500)
    for name in chosen.unused:
        monkeypatch.setattr(CentredGradients, name, None)
    return chosen


@pytest.fixture
def factors(way: Way) -> Factors:
    return random_factors(way.n_rows, N_CLASSES, N_FEATURES, seed=3)


def centred(source: FactorSource, *, per_class: bool = False) -> CentredGradients:
    """About the mean gradient of other data, or one such mean for each class."""
    id_train = random_factors(100, N_CLASSES, N_FEATURES, seed=9)
    return CentredGradients(source, reference_gradients(id_train, N_CLASSES, class_conditional=per_class))


def dense(gradients: CentredGradients) -> np.ndarray:
    """The matrix itself, row by row."""
    rows = []
    for chunk in gradients.source.chunks():
        for residual, feature, label in zip(chunk.residual, chunk.feature, chunk.label, strict=True):
            reference = gradients.reference[label] if len(gradients.reference) > 1 else gradients.reference[0]
            rows.append(np.outer(residual.double(), feature.double()).flatten() - reference.flatten().numpy())
    return np.stack(rows)


def assert_same_directions(found: Tensor, expected: np.ndarray) -> None:
    """Equal but for the sign, which no singular vector has."""
    vectors = found.flatten(1).numpy()
    assert vectors.shape == expected.shape
    signs = np.sign((vectors * expected).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(vectors * signs, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize("n_vectors", [1, 4])
@pytest.mark.parametrize("rows_per_chunk", [7, 8192])
def test_singular_vectors_equal_a_dense_svd_whatever_the_chunk_of_a_file(
    way: Way, rows_per_chunk: int, n_vectors: int, per_class: bool, stored: Callable[..., RepresentationFile]
) -> None:
    x = random_representation(way.n_rows, N_CLASSES, N_FEATURES, seed=3)
    gradients = (Gradients(source, x.label) for source in (x, stored(x, rows_per_chunk)))
    in_memory, streamed = (centred(own, per_class=per_class) for own in gradients)
    assert_same_directions(top_singular_vectors(streamed, n_vectors), np.linalg.svd(dense(in_memory)).Vh[:n_vectors])


@pytest.mark.parametrize(("ratio", "n_expected"), [(1e-4, 2), (5e-7, 1)])
def test_a_direction_counts_down_to_a_millionth_of_the_largest(way: Way, ratio: float, n_expected: int) -> None:
    """All rows lie along one axis but the first, which is short and at a right angle to it."""
    residual = torch.zeros(way.n_rows, N_CLASSES, dtype=torch.float64)
    residual[:, 0], residual[0, 0], residual[0, 1] = 1, 0, ratio * np.sqrt(way.n_rows - 1)
    feature = torch.zeros(way.n_rows, N_FEATURES, dtype=torch.float64)
    feature[:, 0] = 1
    source = Factors(residual, feature, torch.zeros(way.n_rows, dtype=torch.int64))
    G = CentredGradients(source, torch.zeros(1, N_CLASSES, N_FEATURES, dtype=torch.float64))
    assert_same_directions(top_singular_vectors(G, 3), np.eye(N_CLASSES * N_FEATURES)[[0, N_FEATURES]][:n_expected])


def test_rows_of_zeros_and_rows_that_equal_their_reference_have_no_direction(factors: Factors) -> None:
    """Rounding errors are no direction either."""
    zeros = Factors(torch.zeros_like(factors.residual), factors.feature, factors.label)
    reference = torch.zeros(1, N_CLASSES, N_FEATURES, dtype=torch.float64)
    assert top_singular_vectors(CentredGradients(zeros, reference), 2).shape == (0, N_CLASSES, N_FEATURES)
    equal = factors[torch.zeros(len(factors), dtype=torch.int64)]
    assert len(top_singular_vectors(CentredGradients(equal, mean_gradient(equal)[None]), 2)) == 0
    assert len(top_singular_vectors(CentredGradients(factors.of_class(99), reference), 2)) == 0, "no rows at all"


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12])
def test_the_scale_of_the_gradients_does_not_matter(factors: Factors, scale: float) -> None:
    """The gradients of a confident network are tiny, and still have directions."""
    reference = torch.zeros(1, N_CLASSES, N_FEATURES, dtype=torch.float64)
    scaled = CentredGradients(Factors(factors.residual * scale, factors.feature, factors.label), reference)
    expected = np.linalg.svd(dense(CentredGradients(factors, reference))).Vh[:2]
    assert_same_directions(top_singular_vectors(scaled, 2), expected)


@pytest.mark.parametrize("n_different", [1, 3, 20])
def test_results_repeat_to_the_last_bit(factors: Factors, n_different: int) -> None:
    """Even where the iteration runs out of directions and has to make one up."""
    G = centred(factors[torch.arange(len(factors)) % n_different])
    first = top_singular_vectors(G, 4)
    assert all(torch.equal(top_singular_vectors(G, 4), first) for _ in range(3))
