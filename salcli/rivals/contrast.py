"""Supervised contrast: what views of one class share, against all other views of a batch (Khosla et al., 2020)."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def supervised_contrast(
    features: Float[Tensor, "n d"], labels: Int[Tensor, " n"], temperature: float
) -> Float[Tensor, ""]:
    """Mean over all views of minus the mean log-probability of the others of their class among all others.

    Features have unit length. A view that is alone in its class has no pair, and adds nothing to the sum. CSI calls
    the same loss SupNT-Xent, with a class for every pair of class and rotation.
    """
    similarity = _products(features) / temperature
    is_itself = torch.eye(len(features), dtype=torch.bool, device=features.device)
    others = similarity.masked_fill(is_itself, -torch.inf)
    log_probability = similarity - others.logsumexp(dim=1, keepdim=True)
    is_pair = (labels[:, None] == labels) & ~is_itself
    n_pairs = is_pair.sum(dim=1).clamp(min=1)
    return -(torch.where(is_pair, log_probability, 0.0).sum(dim=1) / n_pairs).mean()


def nearest_is_alike(features: Float[Tensor, "n d"], labels: Int[Tensor, " n"], n_images: int) -> Bool[Tensor, " n"]:
    """Whether the nearest view of another image is of the same class: how well the features tell classes apart.

    Views are stacked, so that row i is of image i mod `n_images`.
    """
    image = torch.arange(len(features), device=features.device) % n_images
    similarity = _products(features.detach())
    nearest = similarity.masked_fill(image[:, None] == image, -torch.inf).argmax(dim=1)
    return labels[nearest] == labels


def _products(features: Float[Tensor, "n d"]) -> Float[Tensor, "n n"]:
    """Of all pairs, in float32 also where autocast would take less: small temperatures magnify its rounding."""
    with torch.autocast(features.device.type, enabled=False):
        return features.float() @ features.float().T
