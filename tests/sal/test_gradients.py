"""Gradients in factored form equal what autograd finds, in memory and streamed from a file."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from helpers.quick import EXPERIMENT
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from salcli.params.schema import Params
from salcli.pipeline.inputs import classifier, id_samples, wild_samples
from salcli.sal.gradients import (
    Factors,
    FactorSource,
    Gradients,
    Representation,
    RepresentationSource,
    last_layer_residual,
    mean_gradient,
)
from salcli.store.formats import RepresentationFile
from salcli.store.layout import Workspace

SIZES = st.tuples(st.integers(1, 8), st.integers(1, 5), st.integers(1, 6))  # n, K, D
SEEDS = st.integers(0, 10_000)


def in_memory(source: FactorSource) -> Factors:
    """All chunks in one."""
    chunks = list(source.chunks())
    parts = [[getattr(chunk, name) for chunk in chunks] for name in ("residual", "feature", "label")]
    return Factors(*(torch.cat(part) for part in parts))


def assert_same(one: Factors, other: Factors) -> None:
    """To the last bit."""
    for name in ("residual", "feature", "label"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


# --- the closed form


@settings(max_examples=40)
@given(sizes=SIZES, seed=SEEDS)
def test_gradients_equal_per_sample_autograd(sizes: tuple[int, int, int], seed: int) -> None:
    """Slow reference: differentiate every sample's loss w.r.t. the weight of the last layer, with any labels."""
    n, n_classes, n_features = sizes
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(n_classes, n_features, generator=rng, dtype=torch.float64)
    bias = torch.randn(n_classes, generator=rng, dtype=torch.float64)
    feature = torch.randn(n, n_features, generator=rng, dtype=torch.float64)
    true, label = torch.randint(n_classes, (2, n), generator=rng)

    def loss(weight: Tensor, feature: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(weight @ feature + bias, label)

    expected = vmap(grad(loss), in_dims=(None, 0, 0))(weight, feature, label)  # n, K, D
    x = Representation(feature, feature @ weight.T + bias, true)
    (whole,) = Gradients(x, label).chunks()
    (row,) = Gradients(x, label, label_row_only=True).chunks()
    torch.testing.assert_close(whole.dense(), expected.flatten(1), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(row.dense(), expected[torch.arange(n), label], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("what", ["calibration", "wild"])
def test_the_stored_representations_give_the_gradients_of_the_trained_network(
    what: Literal["calibration", "wild"], built: Path, quick_params: Params
) -> None:
    """With the true label for ID data, with the predicted one for wild data."""
    workspace = Workspace(built)
    network = classifier(workspace, EXPERIMENT)
    if what == "wild":
        samples = wild_samples(workspace, quick_params, EXPERIMENT).read(slice(24))
        artifact, label = EXPERIMENT.wild_representation, network(samples).argmax(1)
    else:
        part = id_samples(workspace, quick_params, what, EXPERIMENT)
        samples, label = part.rows.read(slice(24)), part.labels[:24]
        artifact = EXPERIMENT.id_representation(what)

    def loss(weight: Tensor, sample: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(functional_call(network, {"head.weight": weight}, sample[None]), label[None])

    with torch.no_grad():
        expected = vmap(grad(loss), in_dims=(None, 0, 0))(network.head.weight, samples, label)
    file = RepresentationFile.open(workspace.find(artifact))
    found = in_memory(Gradients(file, file.label).between(slice(24)))
    torch.testing.assert_close(found.dense(), expected.flatten(1), rtol=1e-4, atol=1e-6)


def test_a_confident_prediction_keeps_its_gradient_in_single_precision() -> None:
    """p rounds to 1 in float32, but p − 1 must not round to 0."""
    logits = torch.tensor([[20.0, 0.0, -1.0]])
    assert logits.softmax(dim=1)[0, 0] == 1
    wrong = math.exp(-20) + math.exp(-21)
    residual = last_layer_residual(logits, torch.tensor([0]))
    assert residual.dtype == torch.float32
    assert float(residual[0, 0]) == pytest.approx(-wrong / (1 + wrong), rel=1e-6)


# --- the mean


def test_the_mean_gradient_is_the_mean_of_the_dense_gradients(random_factors: Callable[..., Factors]) -> None:
    factors = random_factors(50, 4, 5)
    torch.testing.assert_close(mean_gradient(factors).flatten(), factors.dense().mean(0))


def test_the_mean_gradient_is_added_up_in_double_precision() -> None:
    """In float32 the small gradients would be lost beside the big one."""
    feature = torch.tensor([[1e8]] + [[1.0]] * 100)
    factors = Factors(torch.ones(101, 1), feature, torch.zeros(101, dtype=torch.int64))
    assert float(mean_gradient(factors)) == pytest.approx((1e8 + 100) / 101, rel=1e-12)


def test_no_samples_have_no_mean_gradient(random_factors: Callable[..., Factors]) -> None:
    with pytest.raises(ValueError, match="no samples"):
        mean_gradient(random_factors(3, 2, 2).of_class(7))


# --- files


@pytest.mark.parametrize("label_row_only", [False, True])
@pytest.mark.parametrize("rows_per_chunk", [1, 4, 20, 8192])
def test_a_file_gives_the_same_gradients_as_memory_whatever_the_chunk(
    rows_per_chunk: int,
    label_row_only: bool,
    random_representation: Callable[..., Representation],
    stored: Callable[..., RepresentationFile],
) -> None:
    """All samples, each class, and neighbours, with the true labels and with others; then parts of these parts."""
    x = random_representation(21, 4, 3)
    file = stored(x, rows_per_chunk)
    assert isinstance(file, RepresentationSource)
    assert all(len(chunk) <= rows_per_chunk for chunk in file.chunks())
    assert torch.equal(file.predicted, x.predicted)
    for label in (x.label, (x.label + torch.arange(21)) % 4):
        streamed, direct = (Gradients(source, label, label_row_only) for source in (file, x))
        (slow,) = direct.chunks()
        assert_same(in_memory(streamed), slow)
        torch.testing.assert_close(mean_gradient(streamed), mean_gradient(slow))
        for gradients in (streamed, direct):
            assert isinstance(gradients, FactorSource)
            assert_same(in_memory(gradients.between(slice(5, 14))), slow[5:14])
            assert_same(in_memory(gradients.between(slice(2, 20)).between(slice(3, 9))), slow[5:11])
            for k in range(4):
                own = gradients.of_class(k)
                assert len(own) == len(own.label) == int((label == k).sum()) > 0
                assert_same(in_memory(own), slow[label == k])
                assert_same(in_memory(own.of_class(k).between(slice(1, None))), slow[label == k][1:])
                assert len(own.of_class((k + 1) % 4)) == 0
