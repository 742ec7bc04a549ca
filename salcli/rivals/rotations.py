"""The four rotations that CSI learns to tell apart (Tack et al., 2020), stacked: all images at 0°, at 90°, …"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

N_ROTATIONS = 4


def rotated(images: Shaped[Tensor, "n c s s"]) -> Shaped[Tensor, "m c s s"]:
    """All images in all rotations, 4 · n."""
    return torch.cat([torch.rot90(images, turns, (2, 3)) for turns in range(N_ROTATIONS)])


def rotation_labels(n_images: int, device: torch.device) -> Int[Tensor, " m"]:
    """Which rotation each of the 4 · n images has."""
    return torch.arange(N_ROTATIONS, device=device).repeat_interleave(n_images)


def joint_labels(labels: Int[Tensor, " n"], n_classes: int) -> Int[Tensor, " m"]:
    """One class for every pair of class and rotation: K · rotation + class."""
    return rotation_labels(len(labels), labels.device) * n_classes + labels.repeat(N_ROTATIONS)


def marginal_logits(joint: Float[Tensor, "m j"]) -> Float[Tensor, "n k"]:
    """Class logits of n images from joint logits (4n × 4K): the mean over rotations of the logits of the true rotation.

    Its largest softmax probability is CSI's score with labels; its largest entry is the predicted class.
    """
    n, k = joint.shape[0] // N_ROTATIONS, joint.shape[1] // N_ROTATIONS
    blocks = joint.reshape(N_ROTATIONS, n, N_ROTATIONS, k)
    return torch.stack([blocks[turns, :, turns] for turns in range(N_ROTATIONS)]).mean(dim=0)
