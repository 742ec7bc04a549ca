"""Random changes of training images: whole batches at once, on whatever device they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from torch import Tensor

SHIFT = 4  # pixels, in each direction


class Augmentation:
    """Draws on the CPU, so that the same seed gives the same images on every device."""

    def __init__(self, kind: str, generator: torch.Generator) -> None:
        self._kind, self._generator = kind, generator

    def __call__(self, images: Tensor, n_drawn: int | None = None, part: slice = slice(None)) -> Tensor:
        """Changed images (n, C, H, W). Of several processes each draws for all `n_drawn` images and takes its part."""
        if self._kind == "none":
            return images
        n = len(images) if n_drawn is None else n_drawn
        is_mirrored = torch.rand(n, generator=self._generator)[part] < 0.5
        shift = torch.randint(0, 2 * SHIFT + 1, (n, 2), generator=self._generator)[part]
        return mirror_and_shift(images, is_mirrored.to(images.device), shift.to(images.device))


def mirror_and_shift(images: Tensor, is_mirrored: Tensor, shift: Tensor) -> Tensor:
    """Mirror some images; then pad all with zeros and cut the old size out again at `shift` (rows, columns)."""
    n, _, height, width = images.shape
    images = torch.where(is_mirrored[:, None, None, None], images.flip(3), images)
    padded = pad(images, (SHIFT,) * 4)
    rows = shift[:, :1] + torch.arange(height, device=images.device)  # n, H
    columns = shift[:, 1:] + torch.arange(width, device=images.device)  # n, W
    sample = torch.arange(n, device=images.device)[:, None, None]
    # channels last while indexing: each pixel is one piece of memory
    cut = padded.permute(0, 2, 3, 1)[sample, rows[:, :, None], columns[:, None, :]]
    return cut.permute(0, 3, 1, 2)
