"""The losses of OE, Energy-OE, WOODS and SCONE against their definitions, written out sample by sample."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from helpers.networks import random_images, spec
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from salcli.methods.logits import energy
from salcli.methods.wild import ConstrainedEnergyLoss, EnergyClassifier, Woods, energy_oe_loss, oe_loss
from salcli.models.network import Classifier

Batch = Callable[..., tuple[Tensor, Tensor, Tensor]]
Line = Callable[[float, float], nn.Linear]


def log_sum(logits: Tensor) -> float:
    return math.log(sum(math.exp(float(value)) for value in logits))


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> float:
    losses = [log_sum(row) - float(row[label]) for row, label in zip(logits, labels, strict=True)]
    return sum(losses) / len(losses)


@given(seed=st.integers(0, 50), n=st.integers(1, 6), m=st.integers(1, 6), weight=st.floats(0.01, 10))
def test_oe_is_cross_entropy_and_that_to_the_uniform_distribution(
    batch: Batch, seed: int, n: int, m: int, weight: float
) -> None:
    id_logits, labels, wild_logits = batch(seed, n, m)
    to_uniform = [sum(log_sum(row) - float(value) for value in row) / len(row) for row in wild_logits]
    expected = mean_cross_entropy(id_logits, labels) + weight * sum(to_uniform) / m
    assert float(oe_loss(id_logits, labels, wild_logits, weight)) == pytest.approx(expected, rel=1e-4)


@given(seed=st.integers(0, 50), m_in=st.floats(-9, 1), m_out=st.floats(-9, 1))
def test_energy_oe_has_a_squared_hinge_on_both_sides(batch: Batch, seed: int, m_in: float, m_out: float) -> None:
    id_logits, labels, wild_logits = batch(seed)
    of_id = [max(0, -log_sum(row) - m_in) ** 2 for row in id_logits]
    of_wild = [max(0, m_out + log_sum(row)) ** 2 for row in wild_logits]
    hinges = sum(of_id) / len(of_id) + sum(of_wild) / len(of_wild)
    expected = mean_cross_entropy(id_logits, labels) + 0.1 * hinges
    found = energy_oe_loss(id_logits, labels, wild_logits, 0.1, (m_in, m_out))
    assert float(found) == pytest.approx(expected, rel=1e-4)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def penalty(broken_by: float, multiplier: float, weight: float) -> float:
    if weight * broken_by + multiplier >= 0:
        return multiplier * broken_by + weight / 2 * broken_by**2
    return -(multiplier**2) / (2 * weight)


@pytest.mark.parametrize("margin", [0.0, -2.0])
@pytest.mark.parametrize("seed", range(5))
def test_woods_and_scone_minimise_an_augmented_lagrangian_whose_numbers_change(
    seed: int, margin: float, batch: Batch, line: Line, constraints: dict[str, float]
) -> None:
    id_logits, labels, wild_logits = batch(seed)
    loss_before = 0.3
    loss = ConstrainedEnergyLoss(line(-0.8, 2.0), loss_before, margin=margin, **constraints)
    alarms = sum(sigmoid(-0.8 * log_sum(row) + 2) for row in id_logits) / len(id_logits)
    missed = sum(sigmoid(0.8 * (log_sum(row) - margin) - 2) for row in wild_logits) / len(wild_logits)
    broken_by = [alarms - 0.05, mean_cross_entropy(id_logits, labels) - 2 * loss_before]
    multipliers, weights = [0.0, 0.0], [1.0, 1.0]
    for _ in range(4):
        expected = missed + sum(penalty(*each) for each in zip(broken_by, multipliers, weights, strict=True))
        assert loss(id_logits, labels, wild_logits).detach().item() == pytest.approx(expected, rel=1e-4)
        found = loss.update(id_logits, labels)
        for j in range(2):
            rising = weights[j] * broken_by[j] + multipliers[j] >= 0
            multipliers[j] += 0.7 * (broken_by[j] if rising else -multipliers[j] / weights[j])
            weights[j] *= 1.5 if broken_by[j] > 0.05 else 1
    assert found.false_alarms == pytest.approx(alarms, rel=1e-4)
    assert found.excess == pytest.approx(max(broken_by), rel=1e-4)


def test_woods_calls_ood_what_has_a_lower_energy_than_its_threshold() -> None:
    """Of the start: the logits are those of the ID classifier."""
    classifier = Classifier(spec("small-cnn", n_classes=3, channels=1)).eval()
    network, images = EnergyClassifier.on_top_of(classifier, threshold=1.5).eval(), random_images(6, 1, 8, 8)
    with torch.no_grad():
        logits = network(images)
        torch.testing.assert_close(logits, classifier(images))
    torch.testing.assert_close(Woods().score(network, [logits]), energy(logits) - 1.5)
