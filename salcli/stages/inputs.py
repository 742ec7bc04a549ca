"""The images that stages work on, picked from prepared sets by stored indices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from salcli.artifacts import layout
from salcli.artifacts.checkpoint import read_header, read_network
from salcli.artifacts.fingerprint import check_made_with
from salcli.artifacts.images import read_image_set
from salcli.artifacts.splits import read_id_split, read_ood_test, read_split_of_mixture, read_wild_source
from salcli.models.network import Classifier

if TYPE_CHECKING:
    from salcli.artifacts.layout import Found, Workspace

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


def classifier_of(workspace: Workspace, seed: int) -> tuple[Classifier, Found]:
    """The ID classifier, once it is sure that it was trained on the training part of the split that is here now.

    With another split it may have seen wild, calibration or test samples.
    """
    found = workspace.find(layout.classifier(seed))
    network = read_network(found, Classifier)
    check_made_with(found, str(read_header(found).about.get("split")), _whole_split(workspace, seed))
    return network, found


def mixture_of(workspace: Workspace, ood: str, seed: int) -> Found:
    """The wild mixture, once it is sure that its ID samples are from the wild part of the split that is here now."""
    found = workspace.find(layout.wild_mixture(ood, seed))
    check_made_with(found, read_split_of_mixture(found), _whole_split(workspace, seed))
    return found


def _whole_split(workspace: Workspace, seed: int) -> Found:
    found = workspace.find(layout.id_split(seed))
    read_id_split(found)  # a damaged one would only look like another one
    return found


def wild_images(workspace: Workspace, id_name: str, ood_name: str, seed: int) -> Tensor:
    """The wild data, without a word about what is ID and what is OOD."""
    source = read_wild_source(mixture_of(workspace, ood_name, seed))
    sets = (read_image_set(workspace.find(layout.prepared_set(name))) for name in (id_name, ood_name))
    return torch.from_numpy(np.concatenate([image_set.images for image_set in sets])[source])


def ood_test_images(workspace: Workspace, name: str, seed: int) -> Tensor:
    """The OOD test set."""
    image_set = read_image_set(workspace.find(layout.prepared_set(name)))
    return torch.from_numpy(image_set.images[read_ood_test(mixture_of(workspace, name, seed))])
