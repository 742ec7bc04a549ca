"""A small perceptron for points in the plane, as in the paper's figures of toy data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from salcli.errors import ModelError
from salcli.models.backbone import Backbone

if TYPE_CHECKING:
    from torch import Tensor


class Mlp(Backbone):
    """Two hidden layers on points that come as images of one pixel, one channel for each coordinate."""

    n_features = 32

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(in_channels, self.n_features),
            nn.ReLU(),
            nn.Linear(self.n_features, self.n_features),
            nn.ReLU(),
        )

    def forward(self, points: Tensor) -> Tensor:
        """Features (n × 32) of normalised points (n, C, 1, 1)."""
        if points.shape[2:] != (1, 1):
            height, width = points.shape[2:]
            raise ModelError(f"mlp takes points (images of 1×1), got images of {height}×{width}; use another backbone")
        features: Tensor = self.layers(points)
        return features
