"""Rivals that are fitted to the ID training data or change the last layer's input, each beside its definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rivals import SEEDS, activations, random_matrix

from salcli.rivals.activation_scores import ash, fitted_dice, fitted_react
from salcli.rivals.feature_scores import TiedGaussians, VirtualLogits, vim_rule
from salcli.rivals.head import Head
from salcli.rivals.logit_scores import energy

# --- energy of cut activations and weights


def random_head(seed: int, n_classes: int = 4, n_features: int = 7) -> Head:
    return Head(random_matrix(seed, n_classes, n_features), random_matrix(seed + 1, 1, n_classes)[0])


def slow_energy(features: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> list[float]:
    """Sums written out."""
    scores = []
    for row in features.astype(float).tolist():
        logits = [sum(x * w for x, w in zip(row, own, strict=True)) + b for own, b in zip(weight, bias, strict=True)]
        scores.append(math.log(sum(math.exp(logit) for logit in logits)))
    return scores


@settings(max_examples=20)
@given(seed=SEEDS, percentile=st.floats(1, 99.9))
def test_react_is_the_energy_of_features_cut_at_the_percentile(seed: int, percentile: float) -> None:
    head, features, known = random_head(seed), activations(seed + 2, 5), activations(seed + 3, 40)
    limit = np.percentile(known.numpy().astype(float), percentile)
    cut = np.minimum(features.numpy(), limit)
    found = fitted_react(head, known, percentile)(features)
    assert found.tolist() == pytest.approx(slow_energy(cut, head.weight.numpy(), head.bias.numpy()), abs=1e-5)


@settings(max_examples=20)
@given(seed=SEEDS, percentile=st.floats(1, 99.9))
def test_dice_is_the_energy_of_the_weights_that_contribute_most(seed: int, percentile: float) -> None:
    head, features, known = random_head(seed), activations(seed + 2, 5), activations(seed + 3, 40)
    weight = head.weight.numpy().copy()
    contribution = weight * known.double().mean(0).numpy()
    limit = np.percentile(contribution, percentile)
    if np.abs(contribution - limit).min() < 1e-6:
        return  # the limit is one of the contributions: which side it is on is a matter of rounding
    weight[contribution <= limit] = 0
    found = fitted_dice(head, known, percentile)(features)
    assert found.tolist() == pytest.approx(slow_energy(features.numpy(), weight, head.bias.numpy()), abs=1e-5)


@settings(max_examples=20)
@given(seed=SEEDS, n_features=st.integers(1, 40))
def test_ash_keeps_each_samples_largest_activations_and_scales_them(seed: int, n_features: int) -> None:
    head, features = random_head(seed, n_features=n_features), activations(seed + 2, 5, n_features)
    shaped = np.zeros((5, n_features))
    for row, own in zip(shaped, features.numpy().astype(float), strict=True):
        kept = np.argsort(own)[::-1][: max(1, n_features - round(0.95 * n_features))]
        row[kept] = own[kept] * math.exp(own.sum() / own[kept].sum()) if own.any() else 0
    logits = shaped @ head.weight.numpy().T + head.bias.numpy()  # large ones: exp alone would overflow
    expected = logits.max(1) + np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1))
    np.testing.assert_allclose(ash(features, head, 95.0), expected, rtol=1e-9, atol=1e-9)


def test_a_sample_without_activations_has_the_energy_of_the_bias() -> None:
    head, nothing = random_head(0), torch.zeros(1, 7)
    expected = pytest.approx(float(head.bias.logsumexp(0)))
    assert float(ash(nothing, head, 95.0)) == expected
    known = activations(1, 20)
    assert float(fitted_react(head, known, 90.0)(nothing)) == expected
    assert float(fitted_dice(head, known, 90.0)(nothing)) == expected


# --- Mahalanobis


def slow_mahalanobis(features: np.ndarray, known: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Means, centred samples, numpy's pseudo-inverse, every distance."""
    means = {k: known[labels == k].mean(0) for k in np.unique(labels)}
    centred = np.stack([row - means[k] for row, k in zip(known, labels, strict=True)])
    precision = np.linalg.pinv(centred.T @ centred / len(known), rcond=1e-12, hermitian=True)
    return np.array([-min((x - m) @ precision @ (x - m) for m in means.values()) for x in features])


@settings(max_examples=20)
@given(seed=SEEDS, n_classes=st.integers(1, 4))
def test_mahalanobis_is_the_distance_to_the_nearest_class_mean(seed: int, n_classes: int) -> None:
    known, features = random_matrix(seed, 60, 5), random_matrix(seed + 1, 6, 5, 3)
    labels = torch.arange(60) % n_classes * 2  # the classes between them have no sample
    fitted = TiedGaussians.fit(known, labels)
    assert fitted.rank == 5
    expected = slow_mahalanobis(features.numpy(), known.numpy(), labels.numpy())
    np.testing.assert_allclose(fitted.score(features), expected, rtol=1e-8)


@pytest.mark.parametrize("cause", ["dead units", "equal units", "few samples"])
def test_a_singular_covariance_is_inverted_where_it_can_be(cause: str) -> None:
    known, features = random_matrix(0, 60, 5).float(), random_matrix(1, 6, 5).float()
    if cause == "dead units":
        known[:, 3:] = 0
    elif cause == "equal units":
        known[:, 4] = known[:, 3]
        known[:, 2] = known[:, 3]
    else:
        known = known[:5]
    labels = torch.arange(len(known)) % 2
    fitted = TiedGaussians.fit(known, labels)
    assert fitted.rank == 3
    expected = slow_mahalanobis(features.double().numpy(), known.double().numpy(), labels.numpy())
    np.testing.assert_allclose(fitted.score(features), expected, rtol=1e-5)
    assert fitted.score(features).max() < 0


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
def test_vim_is_energy_less_what_the_principal_space_leaves_over(seed: int, dim: int) -> None:
    # directions of clearly different spread, so that there is one principal space
    stretched = torch.tensor([64.0, 32, 16, 8, 4, 2, 1], dtype=torch.float64) / 16
    head, known, features = (
        random_head(seed),
        random_matrix(seed + 2, 200, 7) * stretched,
        random_matrix(seed + 3, 5, 7),
    )
    fitted = VirtualLogits.fit(head, known, dim)
    assert fitted.dim == dim
    expected = slow_vim(features.numpy(), head, known.numpy(), dim)
    np.testing.assert_allclose(fitted.score(features), expected, rtol=1e-9, atol=1e-9)


def test_vim_leaves_a_direction_over_where_the_training_features_span_few() -> None:
    """Else their own left-over is zero, and its scale infinite."""
    head = Head(random_matrix(0, 4, 7), torch.zeros(4, dtype=torch.float64))
    known, features = activations(1, 50), activations(2, 5)
    known[:, 3:] = 0
    fitted = VirtualLogits.fit(head, known, 5)
    assert (fitted.dim, fitted.rank) == (2, 3)
    expected = slow_vim(features.double().numpy(), head, known.double().numpy(), 2)
    np.testing.assert_allclose(fitted.score(features), expected, rtol=1e-6)
    collapsed = VirtualLogits.fit(head, torch.zeros(50, 7), 3)
    assert collapsed.rank == 0
    torch.testing.assert_close(collapsed.score(features), energy(head.logits(features)))


@pytest.mark.parametrize(("width", "dim"), [(1, 0), (64, 32), (128, 64), (767, 383), (768, 512), (2048, 1000)])
def test_the_authors_rule_stays_below_the_width(width: int, dim: int) -> None:
    assert vim_rule(width) == dim < width
