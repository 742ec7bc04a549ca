"""Classifiers: a head that is linear in the features, on every kind of backbone."""

import pytest
import torch
from helpers.networks import random_images, spec
from torch import Tensor

from salcli.models.network import Classifier, OodClassifier


def outputs(network: Classifier, images: Tensor) -> tuple[Tensor, ...]:
    """Class logits, and the OOD logit of a network that has one."""
    result = network(images)
    return (result,) if isinstance(result, Tensor) else result


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("small-cnn", (1, 8, 8)),
        ("mlp", (2,)),
        ("linear", (40,)),
        ("resnet18", (3, 16, 16)),
        ("wrn-10-2", (3, 32, 32)),
        ("torchvision:mobilenet_v3_small", (1, 32, 32)),
    ],
)
@pytest.mark.parametrize("kind", [Classifier, OodClassifier])
def test_the_head_is_linear_in_the_features(name: str, shape: tuple[int, ...], kind: type[Classifier]) -> None:
    torch.manual_seed(0)
    network = kind(spec(name, 5, shape[0])).eval()
    images = random_images(3, *shape)
    features = network.features(images)
    assert features.shape == (3, network.n_features)
    logits, *further = outputs(network, images)
    assert torch.equal(network.head(features), logits)
    assert logits.shape == (3, 5)
    assert [output.shape for output in further] == ([(3,)] if kind is OodClassifier else [])
    outputs(network.train(), images)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in network.head.parameters())
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in network.parameters() if p.ndim == 4)


def test_dropout_is_random_in_training_and_absent_afterwards_as_in_an_ood_classifier_on_top() -> None:
    torch.manual_seed(0)
    images = random_images(4, 3, 8, 8)
    network = Classifier(spec("wrn-10-1", drop_rate=0.3))
    assert not torch.equal(network(images), network(images))
    network.eval()
    assert torch.equal(network(images), network(images))
    assert torch.equal(OodClassifier.on_top_of(network).eval()(images)[0], network(images))
