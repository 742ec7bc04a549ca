"""Gradients in factored form: equal to what autograd finds, in memory and streamed from a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from conftest import OOD, SEED
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from salcli.artifacts import layout
from salcli.artifacts.checkpoint import read_network
from salcli.artifacts.gradients import GradientFile, writing_gradients
from salcli.artifacts.layout import Found, Workspace
from salcli.models.network import Classifier
from salcli.sal.gradients import Factors, FactorSource, last_layer_residual, mean_gradient
from salcli.stages.inputs import id_images, wild_images

if TYPE_CHECKING:
    from pathlib import Path

    from salcli.params import Params

SIZES = st.tuples(st.integers(1, 8), st.integers(1, 5), st.integers(1, 6))  # n, K, D
SEEDS = st.integers(0, 10_000)


def random_factors(n: int, n_classes: int, n_features: int, seed: int = 0) -> Factors:
    """Gradients of a random head on random features, in float64, with labels that need not be the predicted ones."""
    rng = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, n_classes, generator=rng, dtype=torch.float64)
    feature = torch.randn(n, n_features, generator=rng, dtype=torch.float64)
    label = torch.randint(n_classes, (n,), generator=rng)
    return Factors(last_layer_residual(logits, label), feature, label)


def single_precision(factors: Factors) -> Factors:
    """The same, as a file holds it."""
    return Factors(factors.residual.float(), factors.feature.float(), factors.label)


def stored(path: Path, factors: Factors) -> GradientFile:
    """The gradients in a real file, written in two batches."""
    n_classes, n_features = factors.residual.shape[1], factors.feature.shape[1]
    factors = single_precision(factors)
    with writing_gradients(path, len(factors), n_classes, n_features, "a network", {}) as writer:
        for rows in np.array_split(np.arange(len(factors)), 2):
            batch = factors[torch.from_numpy(rows)]
            writer.append(batch, batch.label, rows)
    return GradientFile.open(Found(path))


def in_memory(source: FactorSource) -> Factors:
    """All chunks in one."""
    chunks = list(source.chunks())
    parts = [[getattr(chunk, name) for chunk in chunks] for name in ("residual", "feature", "label")]
    return Factors(*(torch.cat(part) for part in parts))


def assert_same(one: Factors, other: Factors) -> None:
    """To the last bit."""
    for name in ("residual", "feature", "label"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


@given(sizes=SIZES, seed=SEEDS)
def test_the_closed_form_equals_per_sample_autograd(sizes: tuple[int, int, int], seed: int) -> None:
    """The slow truth: differentiate every sample's loss by the weight of the last layer."""
    n, n_classes, n_features = sizes
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(n_classes, n_features, generator=rng, dtype=torch.float64)
    bias = torch.randn(n_classes, generator=rng, dtype=torch.float64)
    feature = torch.randn(n, n_features, generator=rng, dtype=torch.float64)
    label = torch.randint(n_classes, (n,), generator=rng)

    def loss(weight: Tensor, feature: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(weight @ feature + bias, label)

    expected = vmap(grad(loss), in_dims=(None, 0, 0))(weight, feature, label)  # n, K, D
    factors = Factors(last_layer_residual(feature @ weight.T + bias, label), feature, label)
    torch.testing.assert_close(factors.dense(), expected.flatten(1), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("what", ["calibration", "wild"])
def test_the_stored_gradients_are_those_of_the_trained_network(
    what: str, workspace: Workspace, quick_params: Params
) -> None:
    """With the true label for ID data, with the predicted one for wild data."""
    network = read_network(workspace.find(layout.classifier(SEED)), Classifier).eval()
    if what == "wild":
        images = wild_images(workspace, quick_params.data.id, OOD, SEED).read(slice(24))
        label = network(images).argmax(1)
        place = layout.wild_gradients(OOD, SEED)
    else:
        samples = id_images(workspace, quick_params.data.id, what, SEED)
        images, label = samples.images.read(slice(24)), samples.labels[:24]
        place = layout.id_gradients(what, SEED)

    def loss(weight: Tensor, image: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(functional_call(network, {"head.weight": weight}, image[None]), label[None])

    with torch.no_grad():
        expected = vmap(grad(loss), in_dims=(None, 0, 0))(network.head.weight, images, label)
    found = GradientFile.open(workspace.find(place)).dense(slice(0, 24))
    torch.testing.assert_close(found, expected.flatten(1), rtol=1e-4, atol=1e-6)


def test_a_confident_prediction_keeps_its_gradient_in_single_precision() -> None:
    """p rounds to 1 in float32, but p − 1 must not round to 0."""
    logits = torch.tensor([[20.0, 0.0, -1.0]])
    assert logits.softmax(dim=1)[0, 0] == 1
    wrong = np.exp(-20) + np.exp(-21)
    residual = last_layer_residual(logits, torch.tensor([0]))
    assert residual.dtype == torch.float32
    assert float(residual[0, 0]) == pytest.approx(-wrong / (1 + wrong), rel=1e-6)


@given(sizes=SIZES, seed=SEEDS)
def test_a_residual_pulls_to_its_label_and_away_from_all_others(sizes: tuple[int, int, int], seed: int) -> None:
    factors = random_factors(*sizes, seed)
    torch.testing.assert_close(factors.residual.sum(1), torch.zeros(sizes[0], dtype=torch.float64))
    own = torch.zeros_like(factors.residual, dtype=torch.bool)
    own[torch.arange(sizes[0]), factors.label] = True
    assert (factors.residual[own] <= 0).all()
    assert (factors.residual[~own] > 0).all()


@given(sizes=SIZES, seed=SEEDS)
def test_relabelled_gradients_are_those_that_the_other_labels_would_have_given(
    sizes: tuple[int, int, int], seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(sizes[0], sizes[1], generator=rng, dtype=torch.float64)
    feature = torch.randn(sizes[0], sizes[2], generator=rng, dtype=torch.float64)
    one, other = torch.randint(sizes[1], (2, sizes[0]), generator=rng)
    factors = Factors(last_layer_residual(logits, one), feature, one)
    relabelled = factors.relabelled(other)
    assert torch.equal(relabelled.label, other)
    torch.testing.assert_close(relabelled.residual, last_layer_residual(logits, other))
    for each in (factors, relabelled):
        torch.testing.assert_close(each.probabilities(), logits.softmax(dim=1))


@given(sizes=SIZES, seed=SEEDS)
def test_the_predicted_row_is_one_row_of_the_dense_gradient(sizes: tuple[int, int, int], seed: int) -> None:
    factors = random_factors(*sizes, seed)
    matrices = factors.dense().reshape(sizes)
    expected = [matrices[i, label] for i, label in enumerate(factors.label)]
    torch.testing.assert_close(factors.predicted_row().dense(), torch.stack(expected))


def test_the_mean_gradient_is_the_mean_of_the_dense_gradients() -> None:
    factors = random_factors(50, 4, 5)
    torch.testing.assert_close(mean_gradient(factors).flatten(), factors.dense().mean(0))


def test_the_mean_gradient_is_added_up_in_double_precision() -> None:
    """In float32 the small gradients would be lost beside the big one."""
    feature = torch.tensor([[1e8]] + [[1.0]] * 100)
    factors = Factors(torch.ones(101, 1), feature, torch.zeros(101, dtype=torch.int64))
    assert float(mean_gradient(factors)) == pytest.approx((1e8 + 100) / 101, rel=1e-12)


def test_no_samples_have_no_mean_gradient() -> None:
    with pytest.raises(ValueError, match="no samples"):
        mean_gradient(random_factors(3, 2, 2).of_class(7))


@pytest.mark.parametrize("rows_per_chunk", [1, 4, 20, 8192])
def test_a_file_gives_the_same_gradients_as_memory_whatever_the_chunk(
    rows_per_chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every view of the file against the same view of tensors: all rows, a class, other labels, one row of each."""
    monkeypatch.setattr(GradientFile, "_rows_per_chunk", rows_per_chunk)
    factors = single_precision(random_factors(21, 4, 3))
    file = stored(tmp_path / "gradients.h5", factors)
    other = (factors.label + torch.arange(21)) % 4
    assert isinstance(file, FactorSource)
    assert all(len(chunk) <= rows_per_chunk for chunk in file.chunks())
    views = [(file, factors)]
    views += [(one.relabelled(other), slow.relabelled(other)) for one, slow in views]
    views += [(one.predicted_row(), slow.predicted_row()) for one, slow in views]
    views += [(one.of_class(k), slow.of_class(k)) for one, slow in views for k in range(4)]
    for streamed, slow in views:
        assert len(streamed) == len(slow) > 0
        assert torch.equal(streamed.label, slow.label)
        assert_same(in_memory(streamed), slow)
        torch.testing.assert_close(mean_gradient(streamed), mean_gradient(slow))
    assert torch.equal(file.dense(slice(5, 9)), factors.dense()[5:9])


def test_a_class_without_samples_is_an_empty_source(tmp_path: Path) -> None:
    file = stored(tmp_path / "gradients.h5", random_factors(10, 3, 2))
    assert len(file.of_class(5)) == 0
    assert list(file.of_class(5).chunks()) == []


def test_a_class_within_a_class_is_no_larger_than_either(tmp_path: Path) -> None:
    factors = single_precision(random_factors(30, 3, 2))
    file = stored(tmp_path / "gradients.h5", factors)
    for source in (factors, file):
        assert len(source.of_class(0).of_class(1)) == 0
        assert_same(in_memory(source.of_class(1).of_class(1)), factors.of_class(1))


def test_a_stored_file_says_with_which_params_it_was_made(workspace: Workspace, quick_params: Params) -> None:
    for place in (layout.id_gradients("train", SEED), layout.wild_gradients(OOD, SEED)):
        about = GradientFile.open(workspace.find(place)).about
        assert about["data.id"] == quick_params.data.id
        assert about["extract_grads"] == quick_params.extract_grads.model_dump()
