"""ODIN: the one rival that needs gradients w.r.t. its input (Liang et al., 2018)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor


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
    from pytorch_ood.detector.odin import odin_preprocessing

    def loss(scaled_logits: Tensor, predicted: Int[Tensor, " n"]) -> Tensor:
        # the sign alone counts: the factor keeps gradients from vanishing in low precision
        cross_entropy = torch.nn.functional.cross_entropy(scaled_logits, predicted, reduction="sum")
        return temperature * cross_entropy

    with torch.inference_mode(False):
        changed = odin_preprocessing(
            network, normalised.clone(), criterion=loss, eps=epsilon, temperature=temperature, norm_std=list(std)
        )
    with torch.no_grad():
        return network(changed)
