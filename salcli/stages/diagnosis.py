"""The truth about the wild data: for diagnosis, after everything is decided. The one place that reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from salcli.artifacts import layout
from salcli.artifacts.splits import read_wild_truth
from salcli.errors import BadArtifactError

if TYPE_CHECKING:
    from torch import Tensor

    from salcli.artifacts.layout import Workspace


def known_truth(workspace: Workspace, n_wild: int, ood: str, seed: int) -> Tensor | None:
    """Which of the wild samples are OOD, None where nobody knows. There must be gradients of `n_wild` of them."""
    place = layout.wild_truth(ood, seed)
    if not workspace.has(place):
        return None
    found = workspace.find(place)
    truth = read_wild_truth(found)
    if truth is None:
        return None
    is_ood = torch.from_numpy(truth)
    if len(is_ood) != n_wild:
        raise BadArtifactError(
            f"{found.path} knows {len(is_ood)} wild samples, but there are gradients of {n_wild}; "
            f"make them again: {workspace.how_to_make(layout.wild_gradients(ood, seed))}"
        )
    return is_ood
