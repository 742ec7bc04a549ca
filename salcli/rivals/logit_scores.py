"""Scores of one forward pass, without a look at the training data. Higher = more ID-like."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from salcli.sal.scores import uniform_gradient_norm


def msp(logits: Float[Tensor, "n k"], temperature: float = 1.0) -> Float[Tensor, " n"]:
    """The largest softmax probability (Hendrycks and Gimpel, 2017), of logits divided by the temperature."""
    return (logits.double() / temperature).softmax(dim=1).amax(dim=1)


def energy(logits: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
    """logsumexp of the logits, temperature 1 (Liu et al., 2020)."""
    return logits.double().logsumexp(dim=1)


def gradnorm(features: Float[Tensor, "n d"], logits: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
    """L1 norm of the head's gradient towards uniform targets (Huang et al., 2021).

    In closed form: the gradient is an outer product, so its norm is a product of norms. No backward pass is needed.
    """
    return uniform_gradient_norm(logits.double().softmax(dim=1), features.double())
