"""Training: SGD against torch's, LARS and schedules against their definitions, linear fits against scikit-learn."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.compute import CPU, Numerics, compute_with, rows_of
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.nn.functional import cross_entropy

from salcli.engine import linear_heads
from salcli.engine.augmentation import Augmentation
from salcli.engine.batches import Batch, Batches, EndlessRows, LabeledRows, Rows
from salcli.engine.device import Compute, Processes
from salcli.engine.linear_heads import PENALTIES, Examples, FullFit
from salcli.engine.training import (
    SCHEDULES,
    TRUST,
    BatchResult,
    Lars,
    Run,
    Sgd,
    drops,
    reproducible,
    train,
    warm_up_then_cosine,
)
from salcli.errors import SalError
from salcli.progress import Silent

N = 90


@dataclass(frozen=True)
class Config:
    epochs: int = 4
    batch_size: int = 20
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4


DEFAULT = Config()


def objective(network: nn.Module, batch: Batch) -> BatchResult:
    images, labels, others = batch
    logits = network(torch.cat([images, others]).float().flatten(1) / 255)
    loss = cross_entropy(logits[: len(labels)], labels) - 0.1 * logits[len(labels) :].log_softmax(1).mean()
    return BatchResult(loss, (logits[: len(labels)].argmax(1) == labels).sum())


def small_run(compute: Compute, config: Config = DEFAULT) -> Run:
    """Three classes of images by their brightness, a source of others, and dropout."""
    labels = torch.arange(N) % 3
    noise = np.random.default_rng(0).integers(0, 40, (N, 1, 4, 4))
    images = (labels.numpy()[:, None, None, None] * 100 + noise).astype(np.uint8)
    with reproducible(0, "a test") as generator:
        network = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 3))
    others = EndlessRows(rows_of(255 - images[:7]), compute, generator)
    training = LabeledRows(rows_of(images), labels, 3)
    source = Batches(training, compute, Augmentation("none", generator), {"others": others})
    return Run(network, objective, source, N, config, compute, generator, {"others": others})


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.filterwarnings(
    "ignore:Detected call of `lr_scheduler.step:UserWarning"
)  # float16 skips steps that overflow
def test_a_network_learns_in_every_precision(precision: str) -> None:
    curve = train(small_run(compute_with(precision), Config(epochs=20)), Silent())
    assert [epoch.epoch for epoch in curve] == list(range(1, 21))
    assert curve[-1].loss < curve[0].loss / 2
    assert curve[-1].accuracy > 0.9


def test_an_infinite_loss_is_an_error_that_names_the_epoch_and_the_learning_rate() -> None:
    def breaks(network: nn.Module, batch: Batch) -> BatchResult:
        return BatchResult(network(torch.full((1, 16), torch.inf)).sum(), torch.tensor(0))

    with pytest.raises(SalError, match=r"NaN or infinite in epoch 1; .*\(lr is 0.1\)"):
        train(replace(small_run(compute_with()), objective=breaks), Silent())


def test_batches_are_equal_parts_for_all_processes() -> None:
    run = small_run(Compute(CPU, Numerics(), Processes(0, 3)), Config(batch_size=20))
    assert (run.batch_size, run.n_batches, run.total_samples) == (18, 5, 4 * 5 * 18)
    with pytest.raises(SalError, match=r"batch of 2 .* 3 processes"):
        _ = replace(run, params=Config(batch_size=2)).batch_size


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}])
def test_sgd_is_torchs_to_the_last_bit_and_goes_on_from_its_state(options: dict[str, float]) -> None:
    ends = []
    for make in (Sgd, torch.optim.SGD):
        weights = [nn.Parameter(torch.linspace(-1, 1, n)) for n in (3, 5)]
        optimizer = make(weights, lr=0.1, **options)
        for step in range(4):
            optimizer.zero_grad()
            sum((weight * step).sin().sum() for weight in weights).backward()
            optimizer.step()
            state = optimizer.state_dict()
            optimizer = make(weights, lr=7.0, **options)
            optimizer.load_state_dict(state)
        ends.append(torch.cat([weight.detach() for weight in weights]))
        assert all(weight.grad is not None and not weight.grad.requires_grad for weight in weights)
    assert torch.equal(*ends)


@pytest.mark.parametrize("decay", [0.0, 1e-6, 0.1])
def test_lars_is_what_its_paper_says(decay: float) -> None:
    start = [[0.5, -1.0, 2.0], [0.0, 0.0], [1.0, 2.0]]  # an ordinary layer, one of zeros, one with a gradient of zero
    layers = [nn.Parameter(torch.tensor(layer, dtype=torch.float64)) for layer in start]
    unused = nn.Parameter(torch.ones(2))
    optimizer = Lars([*layers, unused], lr=1.0, momentum=0.9, weight_decay=decay)
    weights, speeds = [np.array(layer) for layer in start], [np.zeros(len(layer)) for layer in start]
    for step, rate in enumerate([0.1, 1.0, 0.7, 0.2]):
        optimizer.param_groups[0]["lr"] = rate
        for i, layer in enumerate(layers):
            gradient = np.sin(weights[i] + step) * (i < 2)
            layer.grad = torch.from_numpy(gradient)
            norms = np.linalg.norm(weights[i]), np.linalg.norm(gradient)
            local = TRUST * norms[0] / (norms[1] + decay * norms[0]) if min(norms) > 0 else 1.0
            speeds[i] = 0.9 * speeds[i] + local * (gradient + decay * weights[i])
            weights[i] = weights[i] - rate * speeds[i]
        optimizer.step()
        for layer, expected in zip(layers, weights, strict=True):
            np.testing.assert_allclose(layer.detach(), expected, rtol=1e-7, atol=1e-12)
    assert unused.tolist() == [1.0, 1.0]


def rates_of(make: Any, n_steps: int, **options: float) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    schedule = make(optimizer, n_steps, **options)
    rates = []
    for _ in range(n_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def test_warm_up_is_a_line_to_where_torchs_cosine_then_is() -> None:
    rates = rates_of(warm_up_then_cosine, 100, warm_up_share=0.1, start=0.02)
    assert rates[0] == pytest.approx(0.01)
    cosine = rates_of(torch.optim.lr_scheduler.CosineAnnealingLR, 100)
    assert rates[10:] == pytest.approx(cosine[10:])
    assert rates[5] == pytest.approx((0.01 + cosine[10]) / 2)
    assert rates_of(warm_up_then_cosine, 100, warm_up_share=0.0, start=0.1) == pytest.approx(cosine)


@pytest.mark.parametrize("n_steps", [1, 2, 4, 7, 40, 100, 1330])
def test_the_learning_rate_drops_at_60_75_and_90_percent(n_steps: int) -> None:
    """Step by step, as the authors define it."""
    expected = [0.5 * 0.2 ** sum(step / n_steps >= share for share in (0.6, 0.75, 0.9)) for step in range(n_steps)]
    assert rates_of(drops, n_steps, factor=0.2) == pytest.approx(expected, rel=1e-15)


def test_the_other_schedules_of_params_yaml_stay_constant_or_halve_the_rate() -> None:
    start = rates_of(SCHEDULES["constant"], 100)[0]
    assert rates_of(SCHEDULES["constant"], 100) == [start] * 100
    halved = [start / 2 ** sum(step >= drop for drop in (50, 75, 90)) for step in range(100)]
    assert rates_of(SCHEDULES["steps"], 100) == pytest.approx(halved)


def vectors(n: int, d: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


def fitted(examples: Examples, n_outputs: int, penalty: float | str) -> tuple[nn.Linear, float]:
    head = nn.Linear(examples.rows.sample_shape[0], n_outputs)
    _, used = FullFit(head, lambda x: x, examples, penalty, 0, CPU).run(Silent())
    return head, used


@pytest.mark.parametrize("penalty", [1.0, 0.01])
def test_a_class_head_is_scikit_learns(penalty: float) -> None:
    x = vectors(300, 12)
    y = x[:, :4].argmax(axis=1)
    head, _ = fitted(Examples.of_classes(Rows((x,), np.arange(300)), torch.from_numpy(y)), 4, penalty)
    reference = LogisticRegression(C=1 / (300 * penalty), tol=1e-8, max_iter=2000).fit(x, y)
    logits = head(torch.from_numpy(x)).softmax(1).detach().numpy()
    np.testing.assert_allclose(logits, reference.predict_proba(x), atol=2e-3)


def test_the_two_sides_of_an_ood_head_count_the_same() -> None:
    x = np.concatenate([vectors(400, 6), vectors(40, 6, seed=1) + 1])
    is_id = np.arange(440) < 400
    head, _ = fitted(Examples.of_two_sides(Rows((x,), np.arange(440)), is_id), 1, 0.1)
    weights = np.where(is_id, 440 / 800, 440 / 80)
    reference = LogisticRegression(C=1 / (440 * 0.1), tol=1e-8).fit(x, is_id, sample_weight=weights)
    np.testing.assert_allclose(head.weight.detach().numpy(), reference.coef_, atol=1e-3)


def test_noise_gets_a_larger_penalty_than_signal() -> None:
    x = vectors(100, 8)
    index, noise = np.arange(100), torch.from_numpy(np.random.default_rng(3).integers(2, size=100))
    signal = torch.from_numpy((x[:, 0] > 0).astype(np.int64))
    used = [fitted(Examples.of_classes(Rows((x,), index), labels), 2, "auto")[1] for labels in (noise, signal)]
    assert used[0] > used[1]
    assert set(used) <= set(PENALTIES)


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    x = vectors(100, 5)
    examples = Examples.of_classes(Rows((x,), np.arange(100)), torch.from_numpy(x[:, :3].argmax(axis=1)))
    whole, _ = fitted(examples, 3, 0.1)
    monkeypatch.setattr(linear_heads, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(linear_heads, "RESIDENT_BYTES", 0)
    in_chunks, _ = fitted(examples, 3, 0.1)
    torch.testing.assert_close(in_chunks.weight, whole.weight, atol=1e-4, rtol=1e-3)


def test_an_infinite_loss_of_a_full_fit_is_an_error() -> None:
    x = np.full((10, 2), np.nan, np.float32)
    with pytest.raises(SalError, match="NaN or infinite"):
        fitted(Examples.of_classes(Rows((x,), np.arange(10)), torch.arange(10) % 2), 2, 0.1)
