"""Random resized crops of whole batches: each image is cut and stretched in its own way."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ASPECT = (3 / 4, 4 / 3)  # width by height
N_TRIES = 10  # for a box that fits; then the whole image is taken


def draw_boxes(n: int, side: int, smallest: float, generator: torch.Generator) -> Tensor:
    """Boxes (n × 4: top, left, height, width) in a square of `side` pixels, on the CPU.

    Their area is uniform between the `smallest` share and the whole, their aspect log-uniform between 3:4 and 4:3.
    """
    area = torch.empty(n, N_TRIES, dtype=torch.float64).uniform_(smallest, 1, generator=generator) * side**2
    logs = math.log(ASPECT[0]), math.log(ASPECT[1])
    aspect = torch.empty(n, N_TRIES, dtype=torch.float64).uniform_(*logs, generator=generator).exp()
    size = torch.stack([(area / aspect).sqrt().round(), (area * aspect).sqrt().round()], dim=2)  # height, width
    fits = ((size >= 1) & (size <= side)).all(dim=2)
    first = fits.int().argmax(dim=1)
    chosen = torch.where(fits.any(dim=1)[:, None], size[torch.arange(n), first], float(side))
    corner = torch.rand(n, 2, dtype=torch.float64, generator=generator)  # below 1, so it never leaves the square
    return torch.cat([(corner * (side - chosen + 1)).floor(), chosen], dim=1).long()


def resized_crops(images: Tensor, boxes: Tensor) -> Tensor:
    """Each image's own box (n × 4), stretched to the whole image by bilinear interpolation; float32."""
    top, left, height, width = boxes.to(images.device).unbind(dim=1)
    stretched = _stretched_rows(images.float(), top, height)
    return _stretched_rows(stretched.transpose(2, 3), left, width).transpose(2, 3)


def _stretched_rows(images: Tensor, start: Tensor, length: Tensor) -> Tensor:
    """`length` rows from `start` on, made as many as the image has."""
    n, _, n_rows, _ = images.shape
    place = (torch.arange(n_rows, device=images.device) + 0.5) * length[:, None] / n_rows - 0.5
    place = place.clamp(min=0).minimum(length[:, None] - 1.0)  # n, rows: inside of the crop, nothing beside it counts
    lower = place.floor()
    upper = (lower + 1).minimum(length[:, None] - 1.0)
    weight = (place - lower)[:, :, None, None]
    rows, sample = images.transpose(1, 2), torch.arange(n, device=images.device)[:, None]
    first, second = (rows[sample, (start[:, None] + part).long()] for part in (lower, upper))
    return torch.lerp(first, second, weight).transpose(1, 2)
