"""Changes of colour, each image of a batch by a factor of its own. Images are float (n, C, H, W) in [0, 1]."""

from __future__ import annotations

import torch
from torch import Tensor

LUMA = (0.2989, 0.587, 0.114)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Times the factor."""
    return _blend(images, torch.zeros_like(images), factor)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Away from the mean gray of the image."""
    return _blend(images, grays(images).mean(dim=(1, 2, 3), keepdim=True), factor)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Away from the image's own gray."""
    return _blend(images, grays(images), factor)


def grays(images: Tensor) -> Tensor:
    """What an eye sees without colours (n, 1, H, W); images that are not red, green, blue have none."""
    if images.shape[1] != 3:
        return images
    return (images * images.new_tensor(LUMA)[:, None, None]).sum(dim=1, keepdim=True)


def hue(images: Tensor, turn: Tensor) -> Tensor:
    """All colours turned on the colour wheel, by a share of the whole circle."""
    red, green, blue = images.unbind(dim=1)
    value, low = images.amax(dim=1), images.amin(dim=1)
    chroma = value - low
    safe = torch.where(chroma > 0, chroma, torch.ones_like(chroma))
    sector = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    turned = (sector + 6 * turn[:, None, None]) % 6  # of six sectors
    channels = []
    for offset in (5, 3, 1):
        place = (offset + turned) % 6
        channels.append(value - chroma * place.minimum(4 - place).clamp(0, 1))
    return torch.stack(channels, dim=1)


def _blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    share = factor[:, None, None, None]
    return (share * images + (1 - share) * other).clamp(0, 1)
