"""Filtering scores: streamed, they equal the projection on a dense SVD to 1e-6."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from test_gradients import SEEDS, random_factors, single_precision, stored
from torch import Tensor
from torch.nn.functional import cross_entropy

from salcli.artifacts.gradients import GradientFile
from salcli.sal import spectrum
from salcli.sal.gradients import Factors, mean_gradient
from salcli.sal.scores import (
    class_agnostic_scores,
    class_conditional_scores,
    gradnorm_outlier_scores,
    outlier_scores,
    reference_gradients,
)
from salcli.sal.spectrum import CentredGradients

if TYPE_CHECKING:
    from pathlib import Path

N_CLASSES, N_FEATURES = 4, 5  # K·D is 20
# Gram matrix, covariance matrix or iteration, whichever the size of the data then leads to
SMALL_SIDES = [0, 20, 512]


@pytest.fixture(params=SMALL_SIDES)
def small_side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(spectrum, "SMALL_SIDE", request.param)
    return int(request.param)


def dense(factors: Factors) -> np.ndarray:
    """The gradients themselves, in double precision whatever the factors are in."""
    return Factors(factors.residual.double(), factors.feature.double(), factors.label).dense().numpy()


class AmbiguousTruthError(Exception):
    """The last vector that counts and the first that does not have almost the same singular value."""


def slow_scores(spectrum_rows: np.ndarray, rows: np.ndarray, n_vectors: int) -> np.ndarray:
    """Squared projections on the right singular vectors of a matrix, averaged; rows are centred already.

    Vectors of singular value zero point anywhere, so they are left out.
    """
    _, values, vectors = np.linalg.svd(spectrum_rows, full_matrices=False)
    rank = int((values > 1e-6 * values[0]).sum())
    n_kept = min(n_vectors, rank)
    if n_kept < rank and values[n_kept - 1] < 1.001 * values[n_kept]:
        raise AmbiguousTruthError
    return np.square(rows @ vectors[:n_kept].T).sum(axis=1) / n_vectors


def slow_class_conditional(
    wild: Factors, sources: list[Factors], id_train: Factors, n_vectors: int, *, global_reference: bool
) -> list[np.ndarray]:
    """Class by class, with dense matrices; NaN where the wild data has no such class."""
    found = [np.full(len(source), np.nan) for source in sources]
    for k in range(N_CLASSES):
        reference = dense(id_train if global_reference else id_train.of_class(k)).mean(axis=0)
        wild_rows = dense(wild.of_class(k)) - reference
        if len(wild_rows) == 0:
            continue
        for values, source in zip(found, sources, strict=True):
            own = dense(source.of_class(k)) - reference
            values[(source.label == k).numpy()] = slow_scores(wild_rows, own, n_vectors)
    return found


def assert_equal_scores(found: list[Tensor], expected: list[np.ndarray]) -> None:
    """To 1e-6, relative to the score itself; NaN where the truth is NaN."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float64
        scale = np.nanmax(other, initial=0)
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-6, atol=1e-13 * scale + 1e-300)


def some_sources(n_wild: int) -> tuple[Factors, Factors, Factors]:
    """Wild, calibration and ID training gradients."""
    sizes = (n_wild, 30, 40)
    wild, calibration, id_train = (random_factors(n, N_CLASSES, N_FEATURES, seed) for seed, n in enumerate(sizes))
    return wild, calibration, id_train


def with_labels(factors: Factors, label: list[int]) -> Factors:
    return factors.relabelled(torch.tensor(label))


@pytest.mark.parametrize("global_reference", [False, True])
@pytest.mark.parametrize("n_vectors", [1, 3])
@pytest.mark.parametrize("n_wild", [13, 200])
def test_class_conditional_scores_equal_a_dense_svd(
    n_wild: int, n_vectors: int, global_reference: bool, small_side: int
) -> None:
    wild, calibration, id_train = some_sources(n_wild)
    shared = mean_gradient(id_train)[None] if global_reference else None
    found = class_conditional_scores(
        wild, [wild, calibration], id_train, range(N_CLASSES), n_vectors, shared_reference=shared
    )
    expected = slow_class_conditional(wild, [wild, calibration], id_train, n_vectors, global_reference=global_reference)
    assert_equal_scores(found, expected)


@pytest.mark.parametrize("class_conditional", [False, True])
@pytest.mark.parametrize("n_vectors", [1, 3])
@pytest.mark.parametrize("n_wild", [13, 19, 200])
def test_class_agnostic_scores_equal_a_dense_svd(
    n_wild: int, n_vectors: int, class_conditional: bool, small_side: int
) -> None:
    wild, calibration, id_train = some_sources(n_wild)
    reference = reference_gradients(id_train, N_CLASSES, class_conditional=class_conditional)
    found = class_agnostic_scores(wild, [wild, calibration], reference, n_vectors)
    rows = [
        np.stack([g - reference[label if class_conditional else 0].flatten().numpy() for g, label in pairs])
        for pairs in (zip(dense(source), source.label, strict=True) for source in (wild, calibration))
    ]
    assert_equal_scores(found, [slow_scores(rows[0], each, n_vectors) for each in rows])


@given(
    labels=st.lists(st.integers(0, N_CLASSES - 1), min_size=1, max_size=50),
    n_different=st.integers(1, 50),
    n_zero=st.integers(0, 5),
    n_vectors=st.integers(1, 4),
    small_side=st.sampled_from(SMALL_SIDES),
    global_reference=st.booleans(),
    seed=SEEDS,
)
def test_scores_equal_a_dense_svd_for_any_class_sizes_with_repeated_and_zero_rows(
    labels: list[int],
    n_different: int,
    n_zero: int,
    n_vectors: int,
    small_side: int,
    global_reference: bool,
    seed: int,
) -> None:
    """Classes with one sample, with none, with the same sample over and over: as it comes."""
    n = len(labels)
    wild = with_labels(random_factors(n, N_CLASSES, N_FEATURES, seed)[torch.arange(n) % n_different], labels)
    wild = Factors(wild.residual * (torch.arange(n) >= n_zero)[:, None], wild.feature, wild.label)
    calibration = random_factors(20, N_CLASSES, N_FEATURES, seed + 1)
    id_train = with_labels(random_factors(20, N_CLASSES, N_FEATURES, seed + 2), [k % N_CLASSES for k in range(20)])
    try:
        expected = slow_class_conditional(
            wild, [wild, calibration], id_train, n_vectors, global_reference=global_reference
        )
    except AmbiguousTruthError:
        reject()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(spectrum, "SMALL_SIDE", small_side)
        shared = mean_gradient(id_train)[None] if global_reference else None
        found = class_conditional_scores(
            wild, [wild, calibration], id_train, range(N_CLASSES), n_vectors, shared_reference=shared
        )
    assert_equal_scores(found, expected)


@pytest.mark.parametrize("rows_per_chunk", [11, 8192])
def test_scores_from_a_file_do_not_depend_on_the_chunk(
    rows_per_chunk: int, small_side: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GradientFile, "_rows_per_chunk", rows_per_chunk)
    sources = [single_precision(source) for source in some_sources(120)]
    files = [stored(tmp_path / f"{i}.h5", source) for i, source in enumerate(sources)]
    wild, calibration, id_train = sources
    streamed = class_conditional_scores(files[0], files[:2], files[2], range(N_CLASSES), n_vectors=2)
    expected = slow_class_conditional(wild, [wild, calibration], id_train, n_vectors=2, global_reference=False)
    assert_equal_scores(streamed, expected)
    reference = reference_gradients(files[2], N_CLASSES, class_conditional=True)
    in_memory = class_agnostic_scores(wild, [wild, calibration], reference, n_vectors=2)
    streamed = class_agnostic_scores(files[0], files[:2], reference, n_vectors=2)
    assert_equal_scores(streamed, [values.numpy() for values in in_memory])


def test_scores_go_with_their_rows_when_rows_are_shuffled(small_side: int) -> None:
    wild, _, id_train = some_sources(120)
    order = torch.randperm(120, generator=torch.Generator().manual_seed(5))
    shuffled = wild[order]
    (straight,) = class_conditional_scores(wild, [wild], id_train, range(N_CLASSES), n_vectors=2)
    (mixed,) = class_conditional_scores(shuffled, [shuffled], id_train, range(N_CLASSES), n_vectors=2)
    assert_equal_scores([mixed], [straight[order].numpy()])
    reference = reference_gradients(id_train, N_CLASSES, class_conditional=False)
    (straight,) = class_agnostic_scores(wild, [wild], reference, n_vectors=2)
    (mixed,) = class_agnostic_scores(shuffled, [shuffled], reference, n_vectors=2)
    assert_equal_scores([mixed], [straight[order].numpy()])


def test_the_only_sample_of_a_class_scores_its_squared_distance_from_the_reference() -> None:
    """One row is its own direction."""
    wild, _, id_train = some_sources(5)
    wild = with_labels(wild, [0, 1, 1, 1, 1])
    (tau,) = class_conditional_scores(wild, [wild], id_train, range(N_CLASSES), n_vectors=1)
    distance = wild.dense()[0] - mean_gradient(id_train.of_class(0)).flatten()
    assert float(tau[0]) == pytest.approx(float(distance.square().sum()), rel=1e-9)


def test_a_class_that_the_wild_data_lacks_cannot_be_scored() -> None:
    wild, calibration, id_train = some_sources(40)
    wild = with_labels(wild, [k % 3 for k in range(40)])
    wild_tau, tau = class_conditional_scores(wild, [wild, calibration], id_train, range(N_CLASSES), n_vectors=1)
    assert torch.equal(tau.isnan(), calibration.label == 3)
    assert not wild_tau.isnan().any()


def test_a_class_of_other_samples_does_not_change_the_scores_of_a_class() -> None:
    """Class-conditional: wild samples of class 1 say nothing about class 0. Class-agnostic: they do."""
    wild, _, id_train = some_sources(60)
    without = wild[wild.label != 1]
    (tau,) = class_conditional_scores(wild, [wild], id_train, range(N_CLASSES), n_vectors=1)
    (tau_without,) = class_conditional_scores(without, [without], id_train, range(N_CLASSES), n_vectors=1)
    torch.testing.assert_close(tau[wild.label != 1], tau_without)
    reference = reference_gradients(id_train, N_CLASSES, class_conditional=True)
    (tau,) = class_agnostic_scores(wild, [wild], reference, n_vectors=1)
    (tau_without,) = class_agnostic_scores(without, [without], reference, n_vectors=1)
    assert not torch.allclose(tau[wild.label != 1], tau_without)


def test_several_vectors_average_squares_so_that_signs_cannot_cancel() -> None:
    factors = random_factors(6, N_CLASSES, N_FEATURES)
    reference = torch.zeros(1, N_CLASSES, N_FEATURES, dtype=torch.float64)
    G = CentredGradients(factors, reference)
    V = torch.randn(2, N_CLASSES, N_FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    V[1] = -V[0]
    projection = factors.dense() @ V[0].flatten()
    torch.testing.assert_close(outlier_scores(G, V, n_vectors=2), projection**2)
    torch.testing.assert_close(outlier_scores(G, V[:1], n_vectors=2), projection**2 / 2)
    torch.testing.assert_close(outlier_scores(G, V[:0], n_vectors=2), torch.zeros_like(projection))


def test_class_conditional_references_are_the_means_of_each_class() -> None:
    _, _, id_train = some_sources(1)
    found = reference_gradients(id_train, N_CLASSES, class_conditional=True)
    for k in range(N_CLASSES):
        torch.testing.assert_close(found[k].flatten(), id_train.dense()[id_train.label == k].mean(0))
    (shared,) = reference_gradients(id_train, N_CLASSES, class_conditional=False)
    torch.testing.assert_close(shared.flatten(), id_train.dense().mean(0))


@given(n=st.integers(1, 8), n_classes=st.integers(2, 5), n_features=st.integers(1, 6), seed=SEEDS)
def test_gradnorm_is_the_norm_of_the_gradient_towards_the_uniform_prediction(
    n: int, n_classes: int, n_features: int, seed: int
) -> None:
    """The slow truth: autograd of the cross-entropy with a uniform target, by the weight, sample by sample."""
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(n_classes, n_features, generator=rng, dtype=torch.float64).requires_grad_()
    feature = torch.randn(n, n_features, generator=rng, dtype=torch.float64)
    label = torch.randint(n_classes, (n,), generator=rng)
    uniform = torch.full((n_classes,), 1 / n_classes, dtype=torch.float64)
    expected = []
    for row in feature:
        (gradient,) = torch.autograd.grad(cross_entropy(weight @ row, uniform), weight)
        expected.append(-gradient.abs().sum())
    residual = (feature @ weight.detach().T).softmax(1) - torch.nn.functional.one_hot(label, n_classes)
    torch.testing.assert_close(gradnorm_outlier_scores(Factors(residual, feature, label)), torch.stack(expected))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("small_side", SMALL_SIDES)
def test_a_gpu_gives_the_same_scores(small_side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectrum, "SMALL_SIDE", small_side)
    wild, id_train = (random_factors(60, 5, 7, seed=seed) for seed in (1, 2))
    on_cpu, on_gpu = (
        class_conditional_scores(wild, [wild], id_train, range(5), 1, device=torch.device(name))[0]
        for name in ("cpu", "cuda")
    )
    torch.testing.assert_close(on_gpu, on_cpu)
