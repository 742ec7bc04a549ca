"""The last layer of the ID classifier, which some scores change before they use it."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn


@dataclass(frozen=True)
class Head:
    """logits = features · weightᵀ + bias, in float64 on the CPU."""

    weight: Float[Tensor, "k d"]
    bias: Float[Tensor, " k"]

    @classmethod
    def of(cls, layer: nn.Linear) -> Head:
        """A copy of a network's last layer."""
        return cls(layer.weight.detach().cpu().double(), layer.bias.detach().cpu().double())

    def logits(self, features: Float[Tensor, "n d"]) -> Float[Tensor, "n k"]:
        """Of features that may have been changed."""
        return features.double() @ self.weight.T + self.bias
