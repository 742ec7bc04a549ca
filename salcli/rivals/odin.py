"""ODIN: the one rival that needs gradients w.r.t. its input (Liang et al., 2018)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy


def odin_logits(
    network: Callable[[Tensor], Tensor],
    normalised: Float[Tensor, "n c h w"],
    std: Sequence[float],
    temperature: float,
    epsilon: float,
) -> Float[Tensor, "n k"]:
    """Logits after a step of ε that makes the prediction more certain; their softmax at the temperature is the score.

    The input is normalised, and the sign of its gradient is divided by the std of each channel. Works inside
    inference mode, which a pass over images runs in.
    """
    with torch.inference_mode(False), torch.enable_grad():
        image = normalised.clone().requires_grad_()
        scaled = network(image) / temperature
        # the sign alone counts: the factor keeps gradients from vanishing in low precision
        loss = temperature * cross_entropy(scaled, scaled.max(dim=1).indices, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, image)
    step = gradient.sign() / gradient.new_tensor(std).view(-1, *[1] * (gradient.ndim - 2))
    with torch.no_grad():
        return network(normalised - epsilon * step)
