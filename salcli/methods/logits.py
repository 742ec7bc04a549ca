"""Scores of the logits, and of nothing but one forward pass: MSP, MLS, GEN, Energy, GradNorm."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from salcli.methods.base import Count, Positive, PostHoc, Section, method
from salcli.sal.gradients import Representation


def msp(logits: Float[Tensor, "n k"], temperature: float = 1.0) -> Float[Tensor, " n"]:
    """Minus the largest softmax probability."""
    return -(logits.double() / temperature).softmax(dim=1).amax(dim=1)


def energy(logits: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
    """Minus the logsumexp of the logits: the energy of its authors, at temperature 1."""
    return -logits.double().logsumexp(dim=1)


def gradnorm(features: Float[Tensor, "n d"], logits: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
    """−‖p − uniform‖₁ · ‖f‖₁: the gradient is an outer product, so its norm is a product and needs no backward pass."""
    spread = (logits.double().softmax(dim=1) - 1 / logits.shape[1]).abs().sum(dim=1)
    return -spread * features.double().abs().sum(dim=1)


@method("msp", label="MSP", paper="Hendrycks and Gimpel, 2017")
class Msp(PostHoc):
    """Minus the largest softmax probability."""

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        return msp(x.logits)


@method("mls", label="MLS", paper="Hendrycks et al., 2022")
class MaxLogit(PostHoc):
    """Minus the largest logit."""

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        return -x.logits.double().amax(dim=1)


@method("gen", label="GEN", paper="Liu et al., 2023")
class Gen(PostHoc):
    """The generalized entropy Σ pᵞ (1 − p)ᵞ of the most probable classes."""

    class Params(Section):
        """gamma: γ; most_classes: how many count at most."""

        gamma: Positive
        most_classes: Count

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        p = x.logits.double().softmax(dim=1)
        p = p.topk(min(self.params.most_classes, p.shape[1]), dim=1).values
        return (p * (1 - p)).pow(self.params.gamma).sum(dim=1)


@method("energy", label="Energy", paper="Liu et al., 2020")
class Energy(PostHoc):
    """Minus the logsumexp of the logits."""

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        return energy(x.logits)


@method("gradnorm", label="GradNorm", paper="Huang et al., 2021")
class GradNorm(PostHoc):
    """Minus the L1 norm of the head's gradient towards uniform targets."""

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        return gradnorm(x.feature, x.logits)
