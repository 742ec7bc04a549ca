"""The filter: scores equal projections on a dense SVD to 1e-6, and the threshold keeps its promise."""

import math
import re

import numpy as np
import pytest
import torch
from helpers.representations import random_factors
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from salcli.errors import ThresholdError
from salcli.pipeline.filter import _threshold
from salcli.sal import spectrum
from salcli.sal.gradients import Factors, mean_gradient
from salcli.sal.separation import (
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


def slow_class_conditional(rows: list[np.ndarray], labels: list[np.ndarray], n_vectors: int) -> list[np.ndarray]:
    """Class by class; the first rows are those of the wild data. NaN where these have no such class."""
    found = [np.full(len(own), np.nan) for own in labels]
    for k in CLASSES:
        wild_rows = rows[0][labels[0] == k]
        for values, own, label in zip(found, rows, labels, strict=True):
            if len(wild_rows):
                values[label == k] = slow_scores(wild_rows, own[label == k], n_vectors)
    return found


def assert_equal_scores(found: list[Tensor], expected: list[np.ndarray]) -> None:
    """To 1e-6, relative to the score itself; NaN where the truth is NaN."""
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float64
        scale = np.nanmax(other, initial=0)
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-6, atol=1e-13 * scale + 1e-300)


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
    labels: list[int], n_different: int, n_zero: int, n_vectors: int, small_side: int, global_reference: bool, seed: int
) -> None:
    """Classes with one sample, with none, with the same sample over and over."""
    n = len(labels)
    wild = grouped(random_factors(n, N_CLASSES, N_FEATURES, seed)[torch.arange(n) % n_different], labels)
    wild = Factors(wild.residual * (torch.arange(n) >= n_zero)[:, None], wild.feature, wild.label)
    calibration = random_factors(20, N_CLASSES, N_FEATURES, seed + 1)
    id_train = grouped(random_factors(20, N_CLASSES, N_FEATURES, seed + 2), [k % N_CLASSES for k in range(20)])
    both = [wild, calibration]
    means = np.stack([dense(id_train if global_reference else id_train.of_class(k)).mean(axis=0) for k in CLASSES])
    own_labels = [source.label.numpy() for source in both]
    rows = [dense(source) - means[label] for source, label in zip(both, own_labels, strict=True)]
    try:
        expected = slow_class_conditional(rows, own_labels, n_vectors)
        agnostic = [slow_scores(rows[0], each, n_vectors) for each in rows]
    except AmbiguousTruthError:
        reject()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(spectrum, "SMALL_SIDE", small_side)
        shared = mean_gradient(id_train)[None] if global_reference else None
        found = class_conditional_scores(wild, both, id_train, CLASSES, n_vectors, shared_reference=shared)
        reference = reference_gradients(id_train, N_CLASSES, class_conditional=not global_reference)
        of_all = class_agnostic_scores(wild, both, reference, n_vectors)
    assert_equal_scores(found, expected)
    assert_equal_scores(of_all, agnostic)


# --- the threshold; test_metrics has what its value is

# few different values, so that ties are common, or many
VALUES = st.integers(0, 4).map(float) | st.floats(0, 1e6)
SCORES = st.lists(VALUES, min_size=1, max_size=40).map(lambda values: torch.tensor(values, dtype=torch.float64))
# as a person types them: with up to four digits
QUANTILES = st.integers(1, 9999).map(lambda q: q / 10_000)


def n_candidates(calibration: Tensor, wild: Tensor, quantile: float) -> int:
    return int((wild > score_threshold(calibration, quantile)).sum())


@given(calibration=SCORES, wild=SCORES, quantile=QUANTILES)
def test_a_threshold_without_candidates_is_an_error_that_names_quantiles_that_work(
    calibration: Tensor, wild: Tensor, quantile: float
) -> None:
    """The numbers of the message are typed in again: they must work as printed. All ranks are tried to find them."""
    if n_candidates(calibration, wild, quantile):
        assert _threshold(calibration, wild, quantile) == score_threshold(calibration, quantile)
        return
    with pytest.raises(ThresholdError) as error:
        _threshold(calibration, wild, quantile)
    message = str(error.value)
    named = re.search(r"values up to (\S+) work", message)
    n = len(calibration)
    working_ranks = [rank for rank in range(1, n + 1) if n_candidates(calibration, wild, (rank - 0.5) / n)]
    assert (named is None) == ("no value works" in message) == (not working_ranks)
    if named is not None:
        assert n_candidates(calibration, wild, float(named[1]))
        assert n * float(named[1]) == pytest.approx(working_ranks[-1], abs=0.51)


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
