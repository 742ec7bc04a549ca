"""prepare: decode the data sets, split the ID data, and mix the wild data."""

from __future__ import annotations

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
from salcli.data.duplicates import first_of_each, not_in, pixel_digests
from salcli.data.loading import load_source
from salcli.data.own_sets import read_own
from salcli.data.root import data_root, own_place
from salcli.data.splits import IdSplit, OodSplit, mix_wild, split_id, split_ood, wild_as_it_is
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
UNKNOWN = "unknown"  # data.pi of wild data that come as they are


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
    if name in params.own:
        place_of_set = own_place(params.own[name], workspace.root)
        source = read_own(name, place_of_set, labeled=name == params.id)
        root = place_of_set if place_of_set.is_dir() else place_of_set.parent
    else:
        root = data_root(params_root=params.root, workspace=workspace.root)
        source = load_source(name, root)
    shape = Shape(params.channels, params.image_size)
    if len(source) == 0:
        raise DataError(f"{name} holds no images; get it again with: salcli data fetch {name}")
    if name == params.id:
        check_classes(name, source)
    check_shape(name, source, shape)
    path = workspace.target(place(name))
    form = {"image_size": shape.size, "channels": shape.channels, "fit": source.fit}
    decoded = _Decoded(name, root, source, form)
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
        pictures = self.source.pictures
        return () if isinstance(pictures, np.ndarray) else tuple(str(self._below_root(pictures[i])) for i in kept)

    def _below_root(self, path: Path) -> Path:
        """A list may name files that lie elsewhere."""
        return path.relative_to(self.root) if path.is_relative_to(self.root) else path

    def note(self) -> str:
        if not self.bad:
            return ""
        shown = [f"{name} ({reason})" for name, reason in self._bad_names()[:SHOWN]]
        more = f" and {len(self.bad) - SHOWN} more" if len(self.bad) > SHOWN else ""
        return f"{self.name} without {', '.join(shown)}{more}"

    def _bad_names(self) -> list[tuple[str, str]]:
        return [(printable(self._below_root(path)), reason) for path, reason in self.bad]


def check_classes(name: str, source: Source) -> None:
    """ID data need labels, of two classes at least."""
    if source.labels is None:
        raise DataError(
            f"{name} has no labels, so it cannot be the ID set; put its images into one folder a class, "
            "or `labels` into its .npz file"
        )
    if len(source.class_names) < 2:
        raise DataError(
            f"{name} has one class only ({', '.join(source.class_names)}); ID data need at least two, a folder for each"
        )


def prepare_split(workspace: Workspace, params: DataParams, seed: int, progress: Progress | None = None) -> Prepared:
    """Deal the ID data to training, calibration, wild and test."""
    id_set = read_image_set(workspace.find(layout.prepared_set(params.id)))
    if id_set.labels is None:
        raise DataError(f"{params.id} has no labels, so it cannot be the ID set")
    shares = params.id_shares.model_dump()
    is_own = params.id in params.own
    dealt = np.arange(len(id_set))
    if is_own:
        with (progress or Silent()).task(f"compare {params.id}", len(id_set), "images") as task:
            dealt = first_of_each(pixel_digests(id_set.images, task=task))
    is_test = None if id_set.is_test is None else id_set.is_test[dealt]
    split = split_id(id_set.labels[dealt], shares, seed, is_test, class_names=id_set.class_names if is_own else ())
    split = IdSplit(**{part: dealt[index] for part, index in vars(split).items()})
    path = workspace.target(layout.id_split(seed))
    write_id_split(path, split, {"data": params.id, "shares": shares, "seed": seed})
    counts = {part: len(getattr(split, part)) for part in shares}
    return Prepared(f"ID split, seed {seed}", counts, [path], _left_out(len(id_set) - len(dealt), params.id, params.id))


def _left_out(n: int, name: str, other: str) -> str:
    """Copies of a picture in several parts would break the parts' discipline: what is trained on is not for a test."""
    if n == 0:
        return ""
    if name == other:
        return f"{name}: {n} images are copies of others in it, pixel by pixel, and are left out"
    return f"{name}: {n} images are in {other} as well, pixel by pixel, and are left out"


def prepare_wild(
    workspace: Workspace, params: DataParams, ood: str, seed: int, progress: Progress | None = None
) -> Prepared:
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
    pool = np.arange(len(ood_set))
    if ood in params.own:
        n_compared = len(id_set) + len(ood_set)
        with (progress or Silent()).task(f"compare {ood} with {params.id}", n_compared, "images") as task:
            # twice in wild data that come as they are is twice in the wild; a test set must not have what is wild
            pool = not_in(id_set.images, ood_set.images, task, each_once=params.pi != UNKNOWN)
    if params.pi == UNKNOWN:
        ood_split = OodSplit(pool, np.empty(0, np.int64))
        mixture = wild_as_it_is(pool, len(id_set))
    else:
        is_test = None if ood_set.is_test is None else ood_set.is_test[pool]
        ood_split = split_ood(len(pool), is_test, params.ood_wild_share, seed)
        ood_split = OodSplit(pool[ood_split.wild], pool[ood_split.test])
        mixture = mix_wild(id_pool, ood_split.wild, len(id_set), float(params.pi), seed)
    path, truth_path = (workspace.target(place(ood, seed)) for place in (layout.wild_mixture, layout.wild_truth))
    made_with = {"id": params.id, "ood": ood, "pi": params.pi, "seed": seed, "split": fingerprint(found_split)}
    write_wild_mixture(path, mixture.source, ood_split.test, made_with)
    write_wild_truth(truth_path, mixture.is_ood, made_with)
    n_ood = {} if mixture.is_ood is None else {"of it OOD": int(mixture.is_ood.sum())}
    counts = {"wild": len(mixture.source), **n_ood, "OOD test": len(ood_split.test)}
    note = _left_out(len(ood_set) - len(pool), ood, params.id)
    what = f"wild data {'with ' if n_ood else ''}{ood}, seed {seed}"
    return Prepared(what, counts, [path, truth_path], note)
