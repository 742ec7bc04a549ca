"""What every backbone is: a module that turns images into features, and says how wide they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Backbone(nn.Module):
    """Normalised images (n, C, H, W) to features (n × D). The linear head stands outside of it."""

    n_features: int

    # How published weights of this network name their parts (see salcli/models/weights.py).
    weights_prefix: str = ""  # stands before our names and not before theirs
    head_names: tuple[str, ...] = ("fc", "linear", "classifier")
    unused_weights: tuple[str, ...] = ()  # beginnings of names that have no counterpart here
    head_has_bias: bool = True

    memory_format = torch.channels_last  # convolutions are faster so, on CPUs and GPUs

    def new_head(self, n_classes: int) -> nn.Linear:
        """The linear layer that the features go into."""
        return nn.Linear(self.n_features, n_classes)

    @property
    def level_widths(self) -> tuple[int, ...]:
        """Of the features that `levels` gives."""
        return (self.n_features,)

    def levels(self, images: Tensor) -> tuple[Tensor, ...]:
        """Features of several depths, each n × its own width; the last are those that the backbone gives."""
        return (self(images),)


def mean_over_pixels(maps: Tensor) -> Tensor:
    """Maps (n, C, H, W) to features (n × C)."""
    return maps.mean(dim=(2, 3))
