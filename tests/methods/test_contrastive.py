"""KNN+ and CSI: the contrastive loss, the rotations and the scores, against slow loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from salcli.methods.contrastive import (
    N_ROTATIONS,
    joint_labels,
    marginal_logits,
    nearest_is_alike,
    rotated,
    rotation_labels,
    supervised_contrast,
)


def some_features(n: int, width: int = 5, seed: int = 0) -> Tensor:
    return normalize(torch.randn(n, width, generator=torch.Generator().manual_seed(seed)), dim=1)


def slow_contrast(features: Tensor, labels: Tensor, temperature: float) -> float:
    total = 0.0
    for i, anchor in enumerate(features):
        likeness = [math.exp(float(anchor @ other) / temperature) for other in features]
        everything = sum(value for j, value in enumerate(likeness) if j != i)
        pairs = [j for j in range(len(features)) if j != i and labels[j] == labels[i]]
        if pairs:
            total -= sum(math.log(likeness[j] / everything) for j in pairs) / len(pairs)
    return total / len(features)


label_lists = st.lists(st.integers(0, 3), min_size=2, max_size=12)


@given(labels=label_lists, temperature=st.sampled_from([0.07, 0.1, 0.5, 2.0]), seed=st.integers(0, 99))
def test_the_loss_is_that_of_two_loops(labels: list[int], temperature: float, seed: int) -> None:
    features = some_features(len(labels), seed=seed)
    loss = float(supervised_contrast(features, torch.tensor(labels), temperature))
    assert loss == pytest.approx(slow_contrast(features, torch.tensor(labels), temperature), rel=1e-4, abs=1e-5)


@given(labels=label_lists, scale=st.sampled_from([0.01, 0.1, 1.0]), is_one_point=st.booleans())
def test_gradients_are_finite_also_at_low_temperatures(labels: list[int], scale: float, is_one_point: bool) -> None:
    raw = torch.ones(len(labels), 5) if is_one_point else some_features(len(labels))
    raw.requires_grad_()
    supervised_contrast(normalize(raw, dim=1), torch.tensor(labels), scale).backward()
    assert raw.grad is not None
    assert raw.grad.isfinite().all()


def test_the_nearest_view_of_another_image() -> None:
    at = torch.tensor([0.0, 0.1, 1.0, 0.02, 0.12, 1.1])  # angles: two views of three images, the third far away
    features = torch.stack([at.cos(), at.sin()], dim=1)
    alike = nearest_is_alike(features, torch.tensor([0, 0, 1, 0, 0, 1]), n_images=3)
    assert alike.tolist() == [True, True, False, True, True, False]  # its own other view does not count


@given(n=st.integers(1, 5), side=st.integers(1, 4), channels=st.sampled_from([1, 3]))
def test_rotations_are_quarter_turns_in_stacked_blocks(n: int, side: int, channels: int) -> None:
    images = torch.arange(n * channels * side * side, dtype=torch.int64).reshape(n, channels, side, side)
    turned, label = rotated(images), rotation_labels(n, images.device)
    assert len(turned) == len(label) == 4 * n
    for row, (image, turns) in enumerate(zip(turned, label, strict=True)):
        assert torch.equal(image, images[row % n].rot90(int(turns), (1, 2)))


def test_joint_labels_name_every_pair_of_class_and_rotation_once() -> None:
    assert joint_labels(torch.tensor([0, 2]), 3).tolist() == [0, 2, 3, 5, 6, 8, 9, 11]
    assert sorted(joint_labels(torch.arange(3), 3).tolist()) == list(range(12))


@given(n=st.integers(1, 4), k=st.integers(1, 5), seed=st.integers(0, 99))
def test_marginal_logits_are_the_mean_over_the_true_rotations(n: int, k: int, seed: int) -> None:
    joint = torch.randn(4 * n, 4 * k, generator=torch.Generator().manual_seed(seed))
    logits = marginal_logits(joint)
    for image in range(n):
        for name in range(k):
            own = [joint[turns * n + image, turns * k + name] for turns in range(N_ROTATIONS)]
            assert float(logits[image, name]) == pytest.approx(float(sum(own)) / 4, abs=1e-5)
