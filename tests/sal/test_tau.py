"""τ equals projections on a dense decomposition to 1e-6; with v of the pool it treats calibration and wild alike."""

import math

import numpy as np
import pytest
import torch
from helpers.representations import random_factors
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from salcli.sal import spectrum
from salcli.sal.gradients import Factors
from salcli.sal.tau import Spectrum, class_conditional_tau, released_threshold, separation_errors

N_CLASSES, N_FEATURES = 4, 5  # K·D is 20
CLASSES = range(N_CLASSES)
# by inner products or passes, or by the covariance matrix
SMALL_SIDES = [0, 20]


def grouped(factors: Factors, label: list[int]) -> Factors:
    """The same gradients, said to be of other classes."""
    return Factors(factors.residual, factors.feature, torch.tensor(label))


class AmbiguousTruthError(Exception):
    """The last vector that counts and the first that does not have almost the same value, or one is almost zero."""


def slow_tau(terms: list[tuple[np.ndarray, float]], rows: np.ndarray, n_vectors: int) -> np.ndarray:
    """Mean squared projection on the top eigenvectors of Σ weight · GᵀG; a value of zero does not count."""
    values, vectors = np.linalg.eigh(sum(weight * G.T @ G for G, weight in terms))
    values, vectors = values[::-1], vectors[:, ::-1]
    size = sum(abs(weight) * np.square(G).sum() for G, weight in terms)
    is_kept = values > 1e-12 * abs(values[0])
    if (abs(values[: n_vectors + 1]) < 1e-7 * size).any() and values[0] > 1e-14 * size:
        is_close = abs(values[: n_vectors + 1]) < 1e-7 * size
        if (abs(values[: n_vectors + 1])[is_close] > 1e-13 * size).any():
            raise AmbiguousTruthError
        is_kept &= values > 1e-7 * size
    n_kept = min(n_vectors, int(is_kept.sum()))
    if 0 < n_kept < len(values) and values[n_kept - 1] - values[n_kept] < 1e-3 * abs(values[n_kept - 1]):
        raise AmbiguousTruthError
    return np.square(rows @ vectors[:, :n_kept]).sum(axis=1) / n_vectors


def fast_tau(
    found: Spectrum, sources: list[Factors], *, per_class: bool, class_conditional_reference: bool
) -> list[Tensor]:
    how = {"class_conditional_reference": class_conditional_reference}
    if per_class:
        return class_conditional_tau(found.of_classes(CLASSES, **how), sources)
    direction = found.of_all(N_CLASSES, **how)
    return [direction.tau(source) for source in sources]


@settings(max_examples=60)
@given(
    labels=st.lists(st.integers(0, N_CLASSES - 1), min_size=1, max_size=50)
    | st.integers(13, 200).map(lambda n: [k % N_CLASSES for k in range(n)]),
    n_different=st.integers(1, 200),
    n_zero=st.integers(0, 5),
    n_vectors=st.integers(1, 3),
    small_side=st.sampled_from(SMALL_SIDES),
    switches=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    seed=st.integers(0, 10_000),
)
def test_tau_equals_a_dense_decomposition_for_any_class_sizes_with_repeated_and_zero_rows(
    labels: list[int],
    n_different: int,
    n_zero: int,
    n_vectors: int,
    small_side: int,
    switches: tuple[bool, bool, bool],
    seed: int,
) -> None:
    """Classes with one sample, with none, with the same sample over and over; of the pool and of the wild data."""
    n, (is_pool, per_class, own_reference) = len(labels), switches
    wild = grouped(random_factors(n, N_CLASSES, N_FEATURES, seed)[torch.arange(n) % n_different], labels)
    wild = Factors(wild.residual * (torch.arange(n) >= n_zero)[:, None], wild.feature, wild.label)
    calibration = random_factors(20, N_CLASSES, N_FEATURES, seed + 1)
    id_train = grouped(random_factors(20, N_CLASSES, N_FEATURES, seed + 2), [k % N_CLASSES for k in range(20)])
    means = np.stack([(id_train.of_class(k) if own_reference else id_train).dense().numpy().mean(0) for k in CLASSES])
    sides = {
        name: (one.dense().numpy() - means[one.label.numpy()], one.label.numpy())
        for name, one in (("wild", wild), ("calibration", calibration), ("train", id_train))
    }
    expected = [np.full(len(wild), np.nan), np.full(20, np.nan)]
    for k in CLASSES if per_class else [None]:
        own = {name: (rows if k is None else rows[label == k]) for name, (rows, label) in sides.items()}
        others = [own["wild"], *([own["calibration"]] if is_pool else [])]
        weight = 1 / max(1, sum(map(len, others)))
        terms = [(rows, weight) for rows in others] + [(own["train"], -1 / len(own["train"]))] * is_pool
        for values, name in zip(expected, ("wild", "calibration"), strict=True):
            if any(map(len, others)):
                at = slice(None) if k is None else sides[name][1] == k
                try:
                    values[at] = slow_tau(terms, own[name], n_vectors)
                except AmbiguousTruthError:
                    reject()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(spectrum, "SMALL_SIDE", small_side)
        others = [calibration, wild] if is_pool else [wild]
        fitted = Spectrum(id_train, others, is_pool, n_vectors)
        found = fast_tau(fitted, [wild, calibration], per_class=per_class, class_conditional_reference=own_reference)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float64
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-5, atol=1e-9 * np.nanmax(other, initial=1e-300))


@given(st.integers(0, 10_000), st.integers(2, 40), st.booleans(), st.booleans(), st.sampled_from(SMALL_SIDES))
@settings(max_examples=30)
def test_with_v_of_the_pool_it_does_not_matter_which_samples_are_calibration(
    seed: int, n: int, per_class: bool, own_reference: bool, small_side: int
) -> None:
    """So p-values are exact. With v of the wild data it does matter: v fits them."""
    pool = random_factors(60, N_CLASSES, N_FEATURES, seed)
    id_train = grouped(random_factors(40, N_CLASSES, N_FEATURES, seed + 1), [k % N_CLASSES for k in range(40)])
    order = torch.randperm(60, generator=torch.Generator().manual_seed(seed))
    how = {"per_class": per_class, "class_conditional_reference": own_reference}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(spectrum, "SMALL_SIDE", small_side)
        found = {}
        for is_pool in (True, False):
            own = []
            for rows in (torch.arange(60), order):
                parts = [pool[rows[:n]], pool[rows[n:]]]
                fitted = Spectrum(id_train, parts if is_pool else parts[1:], is_pool)
                tau = torch.full((60,), torch.nan, dtype=torch.float64)
                tau[rows] = torch.cat(fast_tau(fitted, parts, **how))
                own.append(tau)
            found[is_pool] = own
    first, second = found[True]
    torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-9 * float(first.max()), equal_nan=True)
    first, second = found[False]
    assert not torch.allclose(first.nan_to_num(-1), second.nan_to_num(-1), rtol=1e-3)


def test_the_released_threshold_is_numpys_quantile_of_the_projections() -> None:
    tau = torch.tensor([1.0, 4.0, 9.0, 16.0], dtype=torch.float64)
    assert released_threshold(tau, 0.5) == pytest.approx(2.5**2)


@given(truth=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=20))
def test_separation_errors_are_shares_of_each_side(truth: list[tuple[bool, bool]]) -> None:
    """Slow reference: count."""
    found = separation_errors(*torch.tensor(truth).T)
    wild_id = [candidate for candidate, ood in truth if not ood]
    wild_ood = [candidate for candidate, ood in truth if ood]
    candidates = [ood for candidate, ood in truth if candidate]
    expected = [
        side.count(counted) / len(side) if side else math.nan
        for side, counted in ((wild_id, True), (wild_ood, False), (candidates, True))
    ]
    assert [found.err_in, found.err_out, found.precision] == pytest.approx(expected, nan_ok=True)
