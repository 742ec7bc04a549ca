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
from salcli.compute.image_rows import ImageRows
from salcli.data.duplicates import not_in, pixel_digests
from salcli.data.splits import split_ood
from salcli.errors import DataError
from salcli.models.network import Classifier
from salcli.progress import Silent

if TYPE_CHECKING:
    from salcli.artifacts.layout import Found, Workspace
    from salcli.params import DataParams
    from salcli.progress import Progress

IdPart = Literal["train", "calibration", "test"]


@dataclass(frozen=True)
class LabeledImages:
    """A part of the ID data."""

    images: ImageRows
    labels: Tensor  # n
    index: np.ndarray  # n, into the ID data
    n_classes: int
    class_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)


def id_images(workspace: Workspace, name: str, part: IdPart, seed: int) -> LabeledImages:
    """One part of the ID data."""
    image_set = read_image_set(workspace.find(layout.prepared_set(name)))
    index = getattr(read_id_split(workspace.find(layout.id_split(seed))), part)
    assert image_set.labels is not None
    return LabeledImages(
        ImageRows((image_set.images,), index),
        torch.from_numpy(image_set.labels[index]),
        index,
        len(image_set.class_names),
        image_set.class_names,
    )


def classifier_of(workspace: Workspace, seed: int) -> tuple[Classifier, Found]:
    """The ID classifier, once it is sure that it was trained on the training part of the split that is here now.

    With another split it may have seen wild, calibration or test samples.
    """
    found = workspace.find(layout.classifier(seed))
    network = read_network(found, Classifier)
    check_made_with(found, str(read_header(found).about.get("split")), whole_split(workspace, seed))
    return network, found


def mixture_of(workspace: Workspace, ood: str, seed: int) -> Found:
    """The wild mixture, once it is sure that its ID samples are from the wild part of the split that is here now."""
    found = workspace.find(layout.wild_mixture(ood, seed))
    check_made_with(found, read_split_of_mixture(found), whole_split(workspace, seed))
    return found


def whole_split(workspace: Workspace, seed: int) -> Found:
    """The split that is here now."""
    found = workspace.find(layout.id_split(seed))
    read_id_split(found)  # a damaged one would only look like another one
    return found


def wild_images(workspace: Workspace, id_name: str, ood_name: str, seed: int) -> ImageRows:
    """The wild data, without a word about what is ID and what is OOD."""
    source = read_wild_source(mixture_of(workspace, ood_name, seed))
    places = layout.prepared_set(id_name), layout.prepared_ood_set(ood_name)
    return ImageRows(tuple(read_image_set(workspace.find(place)).images for place in places), source)


def ood_test_images(workspace: Workspace, name: str, seed: int) -> ImageRows:
    """The OOD images that were kept out of the wild data."""
    image_set = read_image_set(workspace.find(layout.prepared_ood_set(name)))
    return ImageRows((image_set.images,), read_ood_test(mixture_of(workspace, name, seed)))


def unseen_ood_images(
    workspace: Workspace, params: DataParams, name: str, seed: int, ood: str = "", progress: Progress | None = None
) -> ImageRows:
    """OOD images of another kind than those in the wild data: all of them, or what was published for testing.

    A set that hides in the wild data of another experiment is tested on what is kept out there: two sets may be
    made of the same pictures. Of a set of the user's own, pictures are left out that are in the ID data or in the
    wild data of the experiment `ood`.
    """
    image_set = read_image_set(workspace.find(layout.unseen_set(name)))
    if name in params.ood:
        # dealt as `prepare` deals it to the wild data and the test of its own experiment
        pool = np.arange(len(image_set))
        if name in params.own:
            id_set = read_image_set(workspace.find(layout.prepared_set(params.id)))
            pool = not_in(id_set.images, image_set.images, each_once=True)
        is_test = None if image_set.is_test is None else image_set.is_test[pool]
        index = pool[split_ood(len(pool), is_test, params.ood_wild_share, seed).test]
    else:
        index = np.arange(len(image_set)) if image_set.is_test is None else np.flatnonzero(image_set.is_test)
    if ood and name in params.own:
        rows = ImageRows((image_set.images,), index)
        is_known = _is_known(rows, wild_images(workspace, params.id, ood, seed), name, progress or Silent())
        if is_known.all():
            raise DataError(
                f"all {len(index)} images of {name} are in the ID data or in the wild data ({ood}), too; "
                "a test needs images that are not"
            )
        index = index[~is_known]
    return ImageRows((image_set.images,), index)


def _is_known(rows: ImageRows, wild: ImageRows, name: str, progress: Progress) -> np.ndarray:
    """Which of the pictures are in the ID data or in the wild data, so that networks may have been trained on them."""
    id_set, ood_set = wild.sets
    in_wild = wild.source[wild.source >= len(id_set)] - len(id_set)
    with progress.task(
        f"compare {name} with ID and wild data", len(rows) + len(id_set) + len(in_wild), "images"
    ) as task:
        known = [pixel_digests(id_set, task=task), pixel_digests(ood_set, in_wild, task)]
        return np.isin(pixel_digests(rows.sets[0], rows.source, task), np.concatenate(known))
