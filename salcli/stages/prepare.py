"""prepare: decode the data sets, split the ID data, and mix the wild data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from salcli.artifacts import layout
from salcli.artifacts.fingerprint import fingerprint
from salcli.artifacts.images import read_image_set, write_image_set
from salcli.artifacts.splits import (
    read_id_split,
    write_id_split,
    write_wild_mixture,
    write_wild_truth,
)
from salcli.data.catalogue import data_set
from salcli.data.splits import mix_wild, split_id, split_ood
from salcli.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from salcli.artifacts.layout import Workspace
    from salcli.params import DataParams


@dataclass(frozen=True)
class Prepared:
    """What was written, and how many samples there are of what."""

    what: str
    counts: dict[str, int]
    written: list[Path]


def prepare_set(workspace: Workspace, name: str) -> Prepared:
    """Decode one data set."""
    image_set = data_set(name).load()
    path = workspace.target(layout.prepared_set(name))
    write_image_set(path, image_set, name)
    return Prepared(name, {"images": len(image_set), "classes": len(image_set.class_names)}, [path])


def prepare_split(workspace: Workspace, params: DataParams, seed: int) -> Prepared:
    """Deal the ID data to training, calibration, wild and test."""
    labels = read_image_set(workspace.find(layout.prepared_set(params.id))).labels
    if labels is None:
        raise DataError(f"{params.id} has no labels, so it cannot be the ID set")
    shares = params.id_shares.model_dump()
    split = split_id(labels, shares, seed)
    path = workspace.target(layout.id_split(seed))
    write_id_split(path, split, {"data": params.id, "shares": shares, "seed": seed})
    return Prepared(f"ID split, seed {seed}", {part: len(getattr(split, part)) for part in shares}, [path])


def prepare_wild(workspace: Workspace, params: DataParams, ood: str, seed: int) -> Prepared:
    """Mix the wild data, and keep the rest of the OOD data for the test."""
    id_set = read_image_set(workspace.find(layout.prepared_set(params.id)))
    ood_set = read_image_set(workspace.find(layout.prepared_set(ood)))
    if id_set.images.shape[1:] != ood_set.images.shape[1:]:
        raise DataError(
            f"images of {ood} are {ood_set.images.shape[1:]}, those of {params.id} are {id_set.images.shape[1:]} "
            "(channels, height, width); they must agree"
        )
    found_split = workspace.find(layout.id_split(seed))
    id_pool = read_id_split(found_split).wild
    ood_split = split_ood(len(ood_set), ood_set.region, params.ood_wild_share, seed)
    mixture = mix_wild(id_pool, ood_split.wild, len(id_set), params.pi, seed)
    path, truth_path = (workspace.target(place(ood, seed)) for place in (layout.wild_mixture, layout.wild_truth))
    made_with = {"id": params.id, "ood": ood, "pi": params.pi, "seed": seed, "split": fingerprint(found_split)}
    write_wild_mixture(path, mixture.source, ood_split.test, made_with)
    write_wild_truth(truth_path, mixture.is_ood, made_with)
    counts = {
        "wild": len(mixture.source),
        "of it OOD": int(mixture.is_ood.sum()),
        "OOD test": len(ood_split.test),
    }
    return Prepared(f"wild data with {ood}, seed {seed}", counts, [path, truth_path])
