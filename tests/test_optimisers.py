"""SGD against torch's, LARS and the schedules against their definitions written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from salcli.compute.lars import TRUST, Lars
from salcli.compute.schedules import drops, warm_up_then_cosine
from salcli.compute.sgd import Sgd


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}])
def test_sgd_is_torchs_to_the_last_bit_and_goes_on_from_its_state(options: dict[str, float]) -> None:
    ends = []
    for make in (Sgd, torch.optim.SGD):
        weights = [nn.Parameter(torch.linspace(-1, 1, n)) for n in (3, 5)]
        optimiser = make(weights, lr=0.1, **options)
        for step in range(4):
            optimiser.zero_grad()
            sum((weight * step).sin().sum() for weight in weights).backward()
            optimiser.step()
            state = optimiser.state_dict()
            optimiser = make(weights, lr=7.0, **options)
            optimiser.load_state_dict(state)
        ends.append(torch.cat([weight.detach() for weight in weights]))
        assert all(weight.grad is not None and not weight.grad.requires_grad for weight in weights)
    assert torch.equal(*ends)


def gradients_of(weights: list[list[float]], step: int) -> list[list[float]]:
    """Anything that changes with weights and step; the third layer has none."""
    return [[math.sin(w + i + step) for i, w in enumerate(layer)] for layer in weights[:2]] + [[0.0, 0.0]]


def slow_lars(weights: list[list[float]], rates: list[float], momentum: float, decay: float) -> list[list[float]]:
    speed = [[0.0] * len(layer) for layer in weights]
    for step, rate in enumerate(rates):
        for place, gradient in enumerate(gradients_of(weights, step)):
            layer = weights[place]
            weight_norm, gradient_norm = (math.sqrt(sum(x * x for x in values)) for values in (layer, gradient))
            local = 1.0
            if weight_norm > 0 and gradient_norm > 0:
                local = TRUST * weight_norm / (gradient_norm + decay * weight_norm)
            for i in range(len(layer)):
                speed[place][i] = momentum * speed[place][i] + local * (gradient[i] + decay * layer[i])
            weights[place] = [w - rate * v for w, v in zip(layer, speed[place], strict=True)]
    return weights


@pytest.mark.parametrize("decay", [0.0, 1e-6, 0.1])
def test_lars_is_what_its_paper_says(decay: float) -> None:
    start = [[0.5, -1.0, 2.0], [0.0, 0.0], [1.0, 2.0]]  # an ordinary layer, one of zeros, one without a gradient
    rates = [0.1, 1.0, 0.7, 0.2]
    layers = [nn.Parameter(torch.tensor(layer, dtype=torch.float64)) for layer in start]
    unused = nn.Parameter(torch.ones(2))
    optimiser = Lars([*layers, unused], lr=1.0, momentum=0.9, weight_decay=decay)
    for step, rate in enumerate(rates):
        optimiser.param_groups[0]["lr"] = rate
        values = [layer.tolist() for layer in layers]
        for layer, gradient in zip(layers, gradients_of(values, step), strict=True):
            layer.grad = torch.tensor(gradient, dtype=torch.float64)
        optimiser.step()
    expected = slow_lars([list(layer) for layer in start], rates, 0.9, decay)
    for layer, values in zip(layers, expected, strict=True):
        assert layer.tolist() == pytest.approx(values, rel=1e-7, abs=1e-12)
    assert unused.tolist() == [1.0, 1.0]


def test_the_length_of_a_gradient_does_not_matter_to_lars() -> None:
    results = []
    for scale in (1.0, 1000.0):
        weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
        optimiser = Lars([weight], lr=1.0, momentum=0.9, weight_decay=0.0)
        weight.grad = scale * torch.tensor([0.3, -0.2], dtype=torch.float64)
        optimiser.step()
        results.append(weight.detach().clone())
    torch.testing.assert_close(*results)


def rates_of(make: str, n_steps: int, **options: float) -> list[float]:
    optimiser = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    schedule = (warm_up_then_cosine if make == "cosine" else drops)(optimiser, n_steps, **options)
    rates = []
    for _ in range(n_steps):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        schedule.step()
    return rates


def test_warm_up_is_a_line_to_where_the_cosine_then_is() -> None:
    rates = rates_of("cosine", 100, warm_up_share=0.1, start=0.02)
    assert rates[0] == pytest.approx(0.01)
    cosine = [0.25 * (1 + math.cos(math.pi * step / 100)) for step in range(100)]
    assert rates[10:] == pytest.approx(cosine[10:])
    assert rates[5] == pytest.approx((0.01 + cosine[10]) / 2)
    assert rates[-1] < 0.001


def test_without_warm_up_it_is_torchs_cosine() -> None:
    optimiser = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 20)
    expected = []
    for _ in range(20):
        expected.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        schedule.step()
    assert rates_of("cosine", 20, warm_up_share=0.0, start=0.1) == pytest.approx(expected)


def test_three_drops() -> None:
    rates = rates_of("drops", 100, factor=0.1)
    assert [rates[step] for step in (0, 59, 60, 74, 75, 89, 90, 99)] == pytest.approx(
        [0.5, 0.5, 0.05, 0.05, 0.005, 0.005, 0.0005, 0.0005]
    )
