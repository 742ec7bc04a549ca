"""Gradients in factored form equal what autograd finds, in memory and streamed from a file."""

import math
from collections.abc import Callable

import pytest
import torch
from helpers.representations import random_representation
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.functional import cross_entropy

from salcli.sal.gradients import Factors, FactorSource, Gradients, Representation, last_layer_residual, mean_gradient
from salcli.store.formats import RepresentationFile

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


def test_a_confident_prediction_keeps_its_gradient_in_single_precision() -> None:
    """p rounds to 1 in float32, but p − 1 must not round to 0."""
    logits = torch.tensor([[20.0, 0.0, -1.0]])
    assert logits.softmax(dim=1)[0, 0] == 1
    wrong = math.exp(-20) + math.exp(-21)
    residual = last_layer_residual(logits, torch.tensor([0]))
    assert residual.dtype == torch.float32
    assert float(residual[0, 0]) == pytest.approx(-wrong / (1 + wrong), rel=1e-6)


def test_the_mean_gradient_is_added_up_in_double_precision() -> None:
    """In float32 the small gradients would be lost beside the big one."""
    feature = torch.tensor([[1e8]] + [[1.0]] * 100)
    factors = Factors(torch.ones(101, 1), feature, torch.zeros(101, dtype=torch.int64))
    assert float(mean_gradient(factors)) == pytest.approx((1e8 + 100) / 101, rel=1e-12)


# --- parts of a file, which tests/store compares with memory


@pytest.mark.parametrize("rows_per_chunk", [4, 8192])
def test_parts_of_a_file_have_the_gradients_of_the_same_rows_in_memory(
    rows_per_chunk: int, stored: Callable[..., RepresentationFile]
) -> None:
    """With other labels than those of the file: classes, neighbours, and parts of these parts."""
    x = random_representation(21, 4, 3)
    label = (x.label + torch.arange(21)) % 4
    streamed, (slow,) = Gradients(stored(x, rows_per_chunk), label), Gradients(x, label).chunks()
    assert_same(in_memory(streamed), slow)
    torch.testing.assert_close(mean_gradient(streamed).flatten(), slow.dense().double().mean(0))
    assert_same(in_memory(streamed[2:20][3:9]), slow[5:11])
    for k in range(4):
        own = streamed.of_class(k)
        assert len(own) == len(own.label) == int((label == k).sum()) > 0
        assert_same(in_memory(own.of_class(k)[1:]), slow[label == k][1:])
        with pytest.raises(ValueError, match="no samples"):
            mean_gradient(own.of_class((k + 1) % 4))
