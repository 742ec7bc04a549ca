"""The random views that contrastive methods learn from: whole batches at once, on whatever device they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from salcli.compute import colours
from salcli.compute.crops import draw_boxes, resized_crops

if TYPE_CHECKING:
    from torch import Tensor

JITTER_SHARE = 0.8  # of the images change their colours …
GRAY_SHARE = 0.2  # … and of these and the others some lose them
STRENGTH = 0.4  # of brightness, contrast and saturation: factors from 0.6 to 1.4
TURN = 0.1  # of the hue, in each direction


class Distortions:
    """Draws on the CPU, so that the same seed gives the same views on every device."""

    def __init__(self, smallest_crop: float, generator: torch.Generator) -> None:
        self._smallest_crop, self._generator = smallest_crop, generator

    def mirrored(self, images: Tensor) -> Tensor:
        """Half of the images, left to right. Before any rotation: afterwards it would be another rotation."""
        is_mirrored = (self._uniform(len(images)) < 0.5).to(images.device)
        return torch.where(is_mirrored[:, None, None, None], images.flip(3), images)

    def cropped(self, images: Tensor) -> Tensor:
        """A box of each image, stretched to its size."""
        return resized_crops(images, draw_boxes(len(images), images.shape[2], self._smallest_crop, self._generator))

    def recoloured(self, images: Tensor) -> Tensor:
        """Jitter of the colours in a random order, then gray; images in [0, 255].

        Images without colours have neither saturation nor hue, and are gray already.
        """
        n, has_colours = len(images), images.shape[1] == 3
        steps = ("brightness", "contrast", "saturation", "hue") if has_colours else ("brightness", "contrast")
        is_jittered = self._uniform(n) < JITTER_SHARE
        order = self._uniform(n, len(steps)).argsort(dim=1)
        amount = 2 * self._uniform(n, len(steps)) - 1  # from −1 to 1
        is_gray = self._uniform(n) < GRAY_SHARE if has_colours else torch.zeros(n, dtype=torch.bool)
        result = images.float() / 255
        for place in range(len(steps)):
            for kind, name in enumerate(steps):
                mine = (is_jittered & (order[:, place] == kind)).nonzero().squeeze(1)
                factor = TURN * amount[mine, kind] if name == "hue" else 1 + STRENGTH * amount[mine, kind]
                here = mine.to(images.device)
                result[here] = getattr(colours, name)(result[here], factor.to(images.device))
        gray = is_gray.to(images.device)[:, None, None, None]
        return 255 * torch.where(gray, colours.grays(result), result)

    def __call__(self, images: Tensor) -> Tensor:
        """A crop, recoloured."""
        return self.recoloured(self.cropped(images))

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self._generator)
