"""The images that stages work on, picked from prepared sets by stored indices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from salcli.artifacts import layout
from salcli.artifacts.images import read_image_set
from salcli.artifacts.splits import read_id_split, read_ood_test, read_wild_source

if TYPE_CHECKING:
    from salcli.artifacts.layout import Workspace

IdPart = Literal["train", "calibration", "test"]


@dataclass(frozen=True)
class LabeledImages:
    """A part of the ID data."""

    images: Tensor  # n, C, H, W, uint8
    labels: Tensor  # n
    index: np.ndarray  # n, into the ID data
    n_classes: int

    def __len__(self) -> int:
        return len(self.labels)


def id_images(workspace: Workspace, name: str, part: IdPart, seed: int) -> LabeledImages:
    """One part of the ID data."""
    image_set = read_image_set(workspace.find(layout.prepared_set(name)))
    index = getattr(read_id_split(workspace.find(layout.id_split(seed))), part)
    assert image_set.labels is not None
    return LabeledImages(
        torch.from_numpy(image_set.images[index]),
        torch.from_numpy(image_set.labels[index]),
        index,
        len(image_set.class_names),
    )


def wild_images(workspace: Workspace, id_name: str, ood_name: str, seed: int) -> Tensor:
    """The wild data, without a word about what is ID and what is OOD."""
    source = read_wild_source(workspace.find(layout.wild_mixture(ood_name, seed)))
    sets = (read_image_set(workspace.find(layout.prepared_set(name))) for name in (id_name, ood_name))
    return torch.from_numpy(np.concatenate([image_set.images for image_set in sets])[source])


def ood_test_images(workspace: Workspace, name: str, seed: int) -> Tensor:
    """The OOD test set."""
    image_set = read_image_set(workspace.find(layout.prepared_set(name)))
    return torch.from_numpy(image_set.images[read_ood_test(workspace.find(layout.wild_mixture(name, seed)))])
