"""The filter: scores equal projections on a dense SVD to 1e-6, and the threshold keeps its promise."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from salcli.errors import ThresholdError
from salcli.pipeline.filter import _threshold
from salcli.sal import spectrum
from salcli.sal.gradients import Factors, mean_gradient
from salcli.sal.tau import (
    class_agnostic_scores,
    class_conditional_scores,
    reference_gradients,
    score_threshold,
    separation_errors,
)

N_CLASSES, N_FEATURES = 4, 5  # K·D is 20
CLASSES = range(N_CLASSES)
# Gram matrix, covariance matrix or iteration, whichever the size of the data then leads to
SMALL_SIDES = [0, 20, 512]
Make = Callable[..., Factors]


@pytest.fixture(params=SMALL_SIDES)
def small_side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(spectrum, "SMALL_SIDE", request.param)
    return int(request.param)


Sources = Callable[[int], list[Factors]]


@pytest.fixture
def sources(random_factors: Make) -> Sources:
    """Wild, calibration and ID training gradients."""
    return lambda n_wild: [random_factors(n, N_CLASSES, N_FEATURES, seed) for seed, n in enumerate((n_wild, 30, 40))]


def grouped(factors: Factors, label: list[int]) -> Factors:
    """The same gradients, said to be of other classes."""
    return Factors(factors.residual, factors.feature, torch.tensor(label))


def dense(factors: Factors) -> np.ndarray:
    """The gradients themselves, in double precision."""
    return factors.to(torch.device("cpu"), torch.float64).dense().numpy()


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
    wild: Factors, sources: list[Factors], id_train: Factors, n_vectors: int, *, global_reference: bool = False
) -> list[np.ndarray]:
    """Class by class, with dense matrices; NaN where the wild data have no such class."""
    found = [np.full(len(source), np.nan) for source in sources]
    for k in CLASSES:
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
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float64
        scale = np.nanmax(other, initial=0)
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-6, atol=1e-13 * scale + 1e-300)


# --- scores


@pytest.mark.parametrize("class_conditional", [False, True])
@pytest.mark.parametrize("n_vectors", [1, 3])
@pytest.mark.parametrize("n_wild", [13, 19, 200])
def test_class_agnostic_scores_equal_a_dense_svd(
    n_wild: int, n_vectors: int, class_conditional: bool, small_side: int, sources: Sources
) -> None:
    wild, calibration, id_train = sources(n_wild)
    reference = reference_gradients(id_train, N_CLASSES, class_conditional=class_conditional)
    found = class_agnostic_scores(wild, [wild, calibration], reference, n_vectors)
    means = np.stack([dense(id_train.of_class(k) if class_conditional else id_train).mean(axis=0) for k in CLASSES])
    rows = [dense(source) - means[source.label] for source in (wild, calibration)]
    assert_equal_scores(found, [slow_scores(rows[0], each, n_vectors) for each in rows])


@settings(max_examples=60)
@given(
    labels=st.lists(st.integers(0, N_CLASSES - 1), min_size=1, max_size=50)
    | st.integers(13, 200).map(lambda n: [k % N_CLASSES for k in range(n)]),
    n_different=st.integers(1, 200),
    n_zero=st.integers(0, 5),
    n_vectors=st.integers(1, 4),
    small_side=st.sampled_from(SMALL_SIDES),
    global_reference=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_scores_equal_a_dense_svd_for_any_class_sizes_with_repeated_and_zero_rows(
    random_factors: Make,
    labels: list[int],
    n_different: int,
    n_zero: int,
    n_vectors: int,
    small_side: int,
    global_reference: bool,
    seed: int,
) -> None:
    """Classes with one sample, with none, with the same sample over and over."""
    n = len(labels)
    wild = grouped(random_factors(n, N_CLASSES, N_FEATURES, seed)[torch.arange(n) % n_different], labels)
    wild = Factors(wild.residual * (torch.arange(n) >= n_zero)[:, None], wild.feature, wild.label)
    calibration = random_factors(20, N_CLASSES, N_FEATURES, seed + 1)
    id_train = grouped(random_factors(20, N_CLASSES, N_FEATURES, seed + 2), [k % N_CLASSES for k in range(20)])
    both = [wild, calibration]
    try:
        expected = slow_class_conditional(wild, both, id_train, n_vectors, global_reference=global_reference)
    except AmbiguousTruthError:
        reject()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(spectrum, "SMALL_SIDE", small_side)
        shared = mean_gradient(id_train)[None] if global_reference else None
        found = class_conditional_scores(wild, both, id_train, CLASSES, n_vectors, shared_reference=shared)
    assert_equal_scores(found, expected)


# --- the threshold; test_metrics has what its value is

# few different values, so that ties are common, or many
VALUES = st.integers(0, 4).map(float) | st.floats(0, 1e6)
SCORES = st.lists(VALUES, min_size=1, max_size=40).map(lambda values: torch.tensor(values, dtype=torch.float64))
# as a person types them: with up to four digits
QUANTILES = st.integers(1, 9999).map(lambda q: q / 10_000)


def n_candidates(calibration: Tensor, wild: Tensor, quantile: float) -> int:
    return int((wild > score_threshold(calibration, quantile)).sum())


def works(calibration: Tensor, wild: Tensor, quantile: float) -> bool:
    """Whether there are candidates, but not only candidates."""
    return 0 < n_candidates(calibration, wild, quantile) < len(wild)


@given(calibration=SCORES, wild=SCORES, quantile=QUANTILES)
def test_a_threshold_that_leaves_no_choice_is_an_error_that_names_quantiles_that_work(
    calibration: Tensor, wild: Tensor, quantile: float
) -> None:
    """The numbers of the message are typed in again: they must work as printed. All ranks are tried to find them."""
    if works(calibration, wild, quantile):
        assert _threshold(calibration, wild, quantile) == score_threshold(calibration, quantile)
        return
    with pytest.raises(ThresholdError) as error:
        _threshold(calibration, wild, quantile)
    message = str(error.value)
    outcome = "no candidate" if n_candidates(calibration, wild, quantile) == 0 else "nothing but candidate"
    assert outcome in message
    named = re.search(r"values from (\S+) to (\S+) work", message)
    n = len(calibration)
    working_ranks = [rank for rank in range(1, n + 1) if works(calibration, wild, (rank - 0.5) / n)]
    assert (named is None) == ("no value works" in message) == (not working_ranks)
    if named is not None:
        low, high = float(named[1]), float(named[2])
        assert works(calibration, wild, low)
        assert works(calibration, wild, high)
        assert (n * low, n * high) == pytest.approx((working_ranks[0] - 1, working_ranks[-1]), abs=0.51)


# --- errors of the separation


@given(truth=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=20))
def test_separation_errors_are_shares_of_each_side(truth: list[tuple[bool, bool]]) -> None:
    """Slow reference: count."""
    is_candidate, is_ood = torch.tensor(truth).T
    found = separation_errors(is_candidate, is_ood)
    wild_id = [candidate for candidate, ood in truth if not ood]
    wild_ood = [candidate for candidate, ood in truth if ood]
    candidates = [ood for candidate, ood in truth if candidate]
    expected = [
        side.count(counted) / len(side) if side else math.nan
        for side, counted in ((wild_id, True), (wild_ood, False), (candidates, True))
    ]
    assert [found.err_in, found.err_out, found.precision] == pytest.approx(expected, nan_ok=True)


def test_err_in_is_what_the_quantile_promises_for_scores_on_the_singular_vectors_of_the_wild_data(
    random_factors: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held-out ID samples are dealt again and again to the calibration and to the wild data.

    The outliers are strong, so that the vectors are theirs: wild ID samples that bend a vector towards
    themselves are no longer exchangeable with those that cannot.
    """
    monkeypatch.setattr(spectrum, "SMALL_SIDE", 10)  # K·D is 6: the quick way
    n, n_wild_id = 99, 300
    pool, id_train = random_factors(n + n_wild_id, 2, 3, seed=1), random_factors(50, 2, 3, seed=2)
    outliers = random_factors(60, 2, 3, seed=3)
    joined = [torch.cat(pair) for pair in zip(vars(pool).values(), vars(outliers).values(), strict=True)]
    everything = Factors(*joined)
    everything.feature[len(pool) :] *= 10
    rng, errors = torch.Generator().manual_seed(0), {0.5: [], 0.9: []}
    for _ in range(100):
        order = torch.randperm(len(pool), generator=rng)
        wild = everything[torch.cat([order[n:], torch.arange(len(pool), len(everything))])]
        wild_tau, tau = class_conditional_scores(wild, [wild, pool[order[:n]]], id_train, range(2), n_vectors=1)
        is_ood = torch.arange(len(wild)) >= n_wild_id
        for quantile, found in errors.items():
            found.append(separation_errors(wild_tau > score_threshold(tau, quantile), is_ood).err_in)
    # of n exchangeable scores and one more, the new one is above the r-th smallest with probability 1 − r/(n + 1)
    for quantile, found in errors.items():
        standard_error = np.std(found) / math.sqrt(len(found))
        assert standard_error < 0.007
        assert np.mean(found) == pytest.approx(1 - math.ceil(quantile * n) / (n + 1), abs=4 * standard_error)
