"""prepare: decode the data sets, split the ID data, and mix the wild data."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from salcli.artifacts import layout
from salcli.artifacts.fingerprint import fingerprint
from salcli.artifacts.images import Description, read_image_set, write_streamed
from salcli.artifacts.splits import (
    read_id_split,
    write_id_split,
    write_wild_mixture,
    write_wild_truth,
)
from salcli.data.decoding import Shape, check_shape, decode, dtype_of, printable
from salcli.data.loading import load_source
from salcli.data.root import data_root
from salcli.data.splits import mix_wild, split_id, split_ood
from salcli.errors import DataError
from salcli.progress import Silent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from salcli.artifacts.layout import Artifact, Workspace
    from salcli.data.decoding import Block
    from salcli.data.image_set import Source
    from salcli.params import DataParams
    from salcli.progress import Progress


SHOWN = 3  # names of bad images


@dataclass(frozen=True)
class Prepared:
    """What was written, and how many samples there are of what."""

    what: str
    counts: dict[str, int]
    written: list[Path]
    note: str = ""


def prepare_unseen_set(
    workspace: Workspace, params: DataParams, name: str, progress: Progress | None = None
) -> Prepared:
    """Decode an OOD set that is only tested on."""
    return prepare_set(workspace, params, name, progress, place=layout.unseen_set)


def prepare_set(
    workspace: Workspace,
    params: DataParams,
    name: str,
    progress: Progress | None = None,
    *,
    place: Callable[[str], Artifact] = layout.prepared_set,
) -> Prepared:
    """Decode one data set."""
    root = data_root(params_root=params.root, workspace=workspace.root)
    source, shape = load_source(name, root), Shape(params.channels, params.image_size)
    if len(source) == 0:
        raise DataError(f"{name} holds no images; get it again with: salcli data fetch {name}")
    if name == params.id:
        _check_classes(name, source)
    check_shape(name, source, shape)
    path = workspace.target(place(name))
    decoded = _Decoded(name, root, source, {"image_size": shape.size, "channels": shape.channels})
    with (progress or Silent()).task(name, len(source), "images") as task:
        skip = params.on_bad_image == "skip"
        with closing(decode(source, shape, task, skip_bad=skip)) as blocks:
            axes = (len(source), *shape.axes)
            write_streamed(path, axes, dtype_of(source), decoded.watch(blocks), decoded.describe, may_be_fewer=skip)
    counts = {"images": decoded.n_kept, "classes": len(source.class_names), "skipped": len(decoded.bad)}
    return Prepared(name, counts, [path], decoded.note())


class _Decoded:
    """Keeps book of what passes on its way from the decoder to the file."""

    def __init__(self, name: str, root: Path, source: Source, made_with: dict[str, Any]) -> None:
        self.name, self.root, self.source, self.made_with = name, root, source, made_with
        self.kept: list[NDArray[np.int64]] = []
        self.bad: list[tuple[Path, str]] = []

    @property
    def n_kept(self) -> int:
        return sum(len(index) for index in self.kept)

    def watch(self, blocks: Iterable[Block]) -> Iterator[NDArray[Any]]:
        for block in blocks:
            self.kept.append(block.index)
            self.bad += block.bad
            yield block.images

    def describe(self) -> Description:
        kept = np.concatenate([*self.kept, np.empty(0, np.int64)])
        if len(kept) == 0:
            raise DataError(f"{self.name}: no image could be decoded; {self.note()}")
        labels, is_test = (
            None if array is None else array[kept] for array in (self.source.labels, self.source.is_test)
        )
        if labels is not None:
            lost = np.setdiff1d(np.asarray(self.source.labels), labels)
            if len(lost):
                raise DataError(
                    f"{self.name}: no image of class {self.source.class_names[lost[0]]} could be decoded; {self.note()}"
                )
        skipped = {"n_skipped": len(self.bad), "skipped": [name for name, _ in self._bad_names()[:SHOWN]]}
        made_with = {**self.made_with, **skipped}
        return Description(self.name, labels, self.source.class_names, is_test, made_with, self._files(kept))

    def _files(self, kept: NDArray[np.int64]) -> tuple[str, ...]:
        """Below the folder that all of them have in common: where that lies is nobody else's business."""
        if isinstance(self.source.pictures, np.ndarray):
            return ()
        top = os.path.commonpath([path.parent for path in self.source.pictures])
        return tuple(os.path.relpath(self.source.pictures[i], top) for i in kept)

    def note(self) -> str:
        if not self.bad:
            return ""
        shown = [f"{name} ({reason})" for name, reason in self._bad_names()[:SHOWN]]
        more = f" and {len(self.bad) - SHOWN} more" if len(self.bad) > SHOWN else ""
        return f"{self.name} without {', '.join(shown)}{more}"

    def _bad_names(self) -> list[tuple[str, str]]:
        return [(printable(path.relative_to(self.root)), reason) for path, reason in self.bad]


def _check_classes(name: str, source: Source) -> None:
    if source.labels is None:
        raise DataError(
            f"{name} has no labels, so it cannot be the ID set; put its images into one folder a class, "
            "or `labels` into its .npz file"
        )
    if len(source.class_names) < 2:
        raise DataError(
            f"{name} has one class only ({', '.join(source.class_names)}); ID data need at least two, a folder for each"
        )


def prepare_split(workspace: Workspace, params: DataParams, seed: int) -> Prepared:
    """Deal the ID data to training, calibration, wild and test."""
    id_set = read_image_set(workspace.find(layout.prepared_set(params.id)))
    if id_set.labels is None:
        raise DataError(f"{params.id} has no labels, so it cannot be the ID set")
    shares = params.id_shares.model_dump()
    split = split_id(id_set.labels, shares, seed, id_set.is_test)
    path = workspace.target(layout.id_split(seed))
    write_id_split(path, split, {"data": params.id, "shares": shares, "seed": seed})
    return Prepared(f"ID split, seed {seed}", {part: len(getattr(split, part)) for part in shares}, [path])


def prepare_wild(workspace: Workspace, params: DataParams, ood: str, seed: int) -> Prepared:
    """Mix the wild data, and keep the rest of the OOD data for the test."""
    id_set = read_image_set(workspace.find(layout.prepared_set(params.id)))
    ood_set = read_image_set(workspace.find(layout.prepared_ood_set(ood)))
    if id_set.images.shape[1:] != ood_set.images.shape[1:]:
        raise DataError(
            f"images of {ood} are {ood_set.images.shape[1:]}, those of {params.id} are {id_set.images.shape[1:]} "
            "(channels, height, width); they must agree"
        )
    found_split = workspace.find(layout.id_split(seed))
    id_pool = read_id_split(found_split).wild
    ood_split = split_ood(len(ood_set), ood_set.is_test, params.ood_wild_share, seed)
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
