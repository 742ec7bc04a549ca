"""Specs, images and weights for tests of networks."""

import torch
from torch import Tensor, nn

from salcli.models.network import NetworkSpec


def spec(name: str, n_classes: int = 10, channels: int = 3, drop_rate: float = 0.0) -> NetworkSpec:
    return NetworkSpec(name, n_classes, (0.4,) * channels, (0.25,) * channels, drop_rate)


def random_images(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def shaken(module: nn.Module) -> nn.Module:
    """With batch norms that do something: fresh ones have mean 0, variance 1."""
    generator = torch.Generator().manual_seed(2)
    for tensor in module.state_dict().values():
        if tensor.ndim == 1 and tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.2)
    return module
