"""ODIN: the one rival that takes gradients w.r.t. its input."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from salcli.errors import ModelError
from salcli.methods.base import InputScore, NotNegative, Positive, Section, method
from salcli.methods.logits import msp
from salcli.models.network import Classifier


@method("odin", label="ODIN", paper="Liang et al., 2018")
class Odin(InputScore):
    """Minus the largest softmax probability at a temperature, after a step ε that makes the prediction more certain."""

    class Params(Section):
        """ε is a step in pixels on a scale of 0 to 1; of vectors, in standard deviations."""

        temperature: Positive
        epsilon: NotNegative

    def outputs(self, network: Classifier) -> Callable[[Tensor], Tensor]:
        return lambda samples: odin_logits(
            network.logits_of_normalised,
            network.normalised(samples),
            # a nearly constant dimension of vectors has a tiny std: divided by it, one step would saturate the softmax
            network.spec.std if samples.ndim > 2 else (1.0,),
            self.params.temperature,
            self.params.epsilon,
        )

    def score(self, outputs: Tensor) -> Float[Tensor, " n"]:
        return msp(outputs, self.params.temperature)


def odin_logits(
    network: Callable[[Tensor], Tensor],
    normalised: Float[Tensor, n * shape],
    std: Sequence[float],
    temperature: float,
    epsilon: float,
) -> Float[Tensor, "n k"]:
    """Logits after the step. Works inside inference mode, in which passes over samples run."""
    with torch.inference_mode(False), torch.enable_grad():
        sample = normalised.clone().requires_grad_()
        scaled = network(sample) / temperature
        # only the sign counts: the factor keeps gradients from vanishing in low precision
        loss = temperature * cross_entropy(scaled, scaled.max(dim=1).indices, reduction="sum")
        gradient = torch.autograd.grad(loss, sample, allow_unused=True)[0] if loss.requires_grad else None
        if gradient is None:
            raise ModelError(
                "odin needs gradients w.r.t. its input, and this network has none (its backbone runs under "
                "torch.no_grad); name the other methods in evaluate.methods, or another filter.score"
            )
    step = gradient.sign() / gradient.new_tensor(std).view(-1, *[1] * (gradient.ndim - 2))
    with torch.no_grad():
        return network(normalised - epsilon * step)
