"""ODIN, beside its definition: one sample at a time, with one backward pass each."""

from __future__ import annotations

import pytest
import torch
from helpers.networks import random_images, shaken

from salcli.errors import ModelError
from salcli.methods.odin import Odin
from salcli.models.network import Classifier, NetworkSpec

STD = (0.2, 0.3, 0.5)


@pytest.mark.parametrize("temperature", [1.0, 1000.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.0014, 0.1])
def test_odin_is_msp_after_a_step_that_makes_the_prediction_more_certain(temperature: float, epsilon: float) -> None:
    torch.manual_seed(0)
    network = Classifier(NetworkSpec("small-cnn", 4, (0.4, 0.5, 0.6), STD)).eval()
    shaken(network.backbone)
    images, expected = random_images(6, 3, 8, 8), []
    for image in images:
        x = network.normalised(image[None]).requires_grad_()
        certainty = (network.head(network.backbone(x)) / temperature).log_softmax(1).max()
        (gradient,) = torch.autograd.grad(certainty, x)
        step = epsilon * gradient.sign() / torch.tensor(STD)[:, None, None]
        logits = network.head(network.backbone(x + step)).double() / temperature
        expected.append(float(logits.softmax(1).max().detach()))
    odin = Odin(Odin.Params(temperature=temperature, epsilon=epsilon))
    with torch.inference_mode():  # as a pass over samples computes them
        found = odin.score(odin.outputs(network)(images))
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_a_network_without_gradients_is_refused() -> None:
    network = Classifier(NetworkSpec("small-cnn", 4, (0.4, 0.5, 0.6), STD)).eval()
    network.backbone.forward = torch.no_grad()(network.backbone.forward)
    with pytest.raises(ModelError, match="odin needs gradients"):
        Odin(Odin.Params(temperature=1, epsilon=0.1)).outputs(network)(random_images(2, 3, 8, 8))


def test_a_nearly_constant_dimension_of_vectors_does_not_saturate_the_scores() -> None:
    """Divided by its std, ε would be a step of a million standard deviations."""
    torch.manual_seed(0)
    network = Classifier(NetworkSpec("linear", 2, (0.0,) * 4, (1.0, 0.05, 1e-9, 1e-20))).eval()
    vectors = torch.randn(20, 4) * torch.tensor(network.spec.std)
    odin = Odin(Odin.Params(temperature=1000, epsilon=0.0014))
    with torch.inference_mode():
        found, plain = odin.score(odin.outputs(network)(vectors)), network(vectors).softmax(1).amax(1)
    assert len(found.unique()) == 20
    assert torch.equal(found.argsort(), plain.argsort()), "of two classes and a linear network, the step is the same"
