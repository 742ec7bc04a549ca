"""ODIN, beside its definition: one sample at a time, with one backward pass each."""

from __future__ import annotations

import pytest
import torch
from helpers.networks import random_images, shaken

from salcli.methods.logits import msp
from salcli.methods.odin import Odin
from salcli.models.network import Classifier, NetworkSpec

STD = (0.2, 0.3, 0.5)


@pytest.fixture
def network() -> Classifier:
    torch.manual_seed(0)
    classifier = Classifier(NetworkSpec("small-cnn", 4, (0.4, 0.5, 0.6), STD))
    shaken(classifier.backbone)
    return classifier.eval()


def scores(odin: Odin, network: Classifier, images: torch.Tensor) -> torch.Tensor:
    """As a pass over samples computes them."""
    with torch.inference_mode():
        return odin.score(odin.outputs(network)(images))


@pytest.mark.parametrize("temperature", [1.0, 1000.0])
@pytest.mark.parametrize("epsilon", [0.0014, 0.1])
def test_odin_is_msp_after_a_step_that_makes_the_prediction_more_certain(
    network: Classifier, temperature: float, epsilon: float
) -> None:
    images, expected = random_images(6, 3, 8, 8), []
    for image in images:
        x = network.normalised(image[None]).requires_grad_()
        certainty = (network.head(network.backbone(x)) / temperature).log_softmax(1).max()
        (gradient,) = torch.autograd.grad(certainty, x)
        step = epsilon * gradient.sign() / torch.tensor(STD)[:, None, None]
        logits = network.head(network.backbone(x + step)).double() / temperature
        expected.append(float(logits.softmax(1).max().detach()))
    odin = Odin(Odin.Params(temperature=temperature, epsilon=epsilon))
    assert scores(odin, network, images).tolist() == pytest.approx(expected, rel=1e-5)


def test_without_a_step_odin_is_msp_at_its_temperature_and_with_one_it_is_higher(network: Classifier) -> None:
    images = random_images(6, 3, 8, 8)
    without, small = (Odin(Odin.Params(temperature=2.0, epsilon=epsilon)) for epsilon in (0.0, 1e-4))
    with torch.no_grad():
        torch.testing.assert_close(scores(without, network, images), msp(network(images), 2.0))
    assert (scores(small, network, images) > scores(without, network, images)).all()


def test_the_network_keeps_no_gradients(network: Classifier) -> None:
    scores(Odin(Odin.Params(temperature=1.0, epsilon=0.1)), network, random_images(2, 3, 8, 8))
    assert all(parameter.grad is None for parameter in network.parameters())
