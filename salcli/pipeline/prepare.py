"""prepare: decode the data sets, split the ID data, and mix the wild data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from salcli.data.catalogue import custom_path, data_root, load_source
from salcli.data.decoding import Block, Shape, check_shape, decode, dtype_of
from salcli.data.duplicates import first_of_each, not_in, pixel_digests
from salcli.data.folders import read_custom
from salcli.data.samples import Source
from salcli.data.splits import IdSplit, OodSplit, mix_wild, split_id, split_ood, wild_as_it_is
from salcli.errors import DataError, printable
from salcli.params.schema import DataParams
from salcli.progress import Progress, Silent
from salcli.store.formats import (
    Description,
    WildSet,
    read_id_split,
    read_samples,
    write_id_split,
    write_streamed_samples,
    write_wild_set,
    write_wild_truth,
)
from salcli.store.layout import UNKNOWN, Artifact, Experiment, Workspace, prepared_set

SHOWN = 3  # names of bad images


@dataclass(frozen=True)
class Prepared:
    """What was written, and how many samples there are of what."""

    what: str
    counts: dict[str, int]
    written: list[Path]
    note: str = ""


def prepare_set(
    workspace: Workspace,
    params: DataParams,
    name: str,
    progress: Progress | None = None,
    artifact: Artifact | None = None,
) -> Prepared:
    """Decode one data set."""
    if name in params.custom:
        path_of_set = custom_path(params.custom[name], workspace.root)
        source = read_custom(name, path_of_set, labeled=name == params.id)
        root = path_of_set if path_of_set.is_dir() else path_of_set.parent
    else:
        root = data_root(params_root=params.root, workspace=workspace.root)
        source = load_source(name, root)
    shape = Shape(params.channels, params.image_size)
    if len(source) == 0:
        raise DataError(f"{name} holds no images; get it again with: salcli data fetch {name}")
    if name == params.id:
        check_classes(name, source)
    check_shape(name, source, shape)
    path = workspace.target(artifact or prepared_set(name))
    decoded = _Decoded(name, root, source, {"image_size": shape.size, "channels": shape.channels, "fit": source.fit})
    with (progress or Silent()).task(name, len(source), "images") as task:
        skip = params.on_bad_image == "skip"
        with closing(decode(source, shape, task, skip_bad=skip)) as blocks:
            axes, dtype = (len(source), *shape.axes), dtype_of(source)
            write_streamed_samples(path, axes, dtype, decoded.watch(blocks), decoded.describe, may_be_fewer=skip)
    counts = {"images": decoded.n_kept, "classes": len(source.class_names), "skipped": len(decoded.bad)}
    return Prepared(name, counts, [path], decoded.note())


class _Decoded:
    """Records what passes from the decoder to the file."""

    def __init__(self, name: str, root: Path, source: Source, about: dict[str, Any]) -> None:
        self.name, self.root, self.source, self.about = name, root, source, about
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
        return Description(
            self.name, labels, self.source.class_names, is_test, {**self.about, **skipped}, self._files(kept)
        )

    def _files(self, kept: NDArray[np.int64]) -> tuple[str, ...]:
        return tuple(str(self._below_root(self.source.files[i])) for i in kept) if self.source.files else ()

    def _below_root(self, path: Path) -> Path:
        """A list may name files in other folders."""
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


def prepare_split(
    workspace: Workspace, params: DataParams, experiment: Experiment, progress: Progress | None = None
) -> Prepared:
    """Split the ID data into training, calibration, wild and test samples."""
    id_set = read_samples(workspace.find(prepared_set(params.id)))
    if id_set.labels is None:
        raise DataError(f"{params.id} has no labels, so it cannot be the ID set")
    shares, is_custom = params.id_shares.model_dump(), params.id in params.custom
    kept = np.arange(len(id_set))
    if is_custom:
        with (progress or Silent()).task(f"compare {params.id}", len(id_set), "images") as task:
            kept = first_of_each(pixel_digests(id_set.array, task=task))
    is_test = None if id_set.is_test is None else id_set.is_test[kept]
    names = id_set.class_names if is_custom else ()
    split = split_id(id_set.labels[kept], shares, experiment.seed, is_test, class_names=names)
    split = IdSplit(**{part: kept[index] for part, index in vars(split).items()})
    path = workspace.target(experiment.split)
    about = workspace.about(experiment.split, data=params.id, shares=shares, seed=experiment.seed)
    write_id_split(path, split, about)
    counts = {part: len(getattr(split, part)) for part in shares}
    note = _left_out(len(id_set) - len(kept), params.id, params.id)
    return Prepared(f"ID split, seed {experiment.seed}", counts, [path], note)


def _left_out(n: int, name: str, other: str) -> str:
    """Copies of an image in several parts would break their separation: a test must not use training images."""
    if n == 0:
        return ""
    if name == other:
        return f"{name}: {n} images are copies of others in it, pixel by pixel, and are left out"
    return f"{name}: {n} images are also in {other}, pixel by pixel, and are left out"


def prepare_wild(
    workspace: Workspace, params: DataParams, experiment: Experiment, progress: Progress | None = None
) -> Prepared:
    """Mix the wild data, and keep the rest of the OOD data for the test."""
    ood, seed, pi = experiment.ood, experiment.seed, experiment.pi
    id_set, ood_set = (read_samples(workspace.find(prepared_set(name))) for name in (params.id, ood))
    if id_set.array.shape[1:] != ood_set.array.shape[1:]:
        raise DataError(
            f"images of {ood} are {ood_set.array.shape[1:]}, those of {params.id} are {id_set.array.shape[1:]} "
            "(channels, height, width); they must agree"
        )
    id_pool, pool = read_id_split(workspace.find(experiment.split)).wild, np.arange(len(ood_set))
    if ood in params.custom:
        n_compared = len(id_set) + len(ood_set)
        with (progress or Silent()).task(f"compare {ood} with {params.id}", n_compared, "images") as task:
            # twice in wild data that come as they are is twice in the wild; a test set must not have what is wild
            pool = not_in(id_set.array, ood_set.array, task, each_once=pi != UNKNOWN)
    if pi == UNKNOWN:
        ood_split = OodSplit(pool, np.empty(0, np.int64))
        mixture = wild_as_it_is(pool, len(id_set))
    else:
        is_test = None if ood_set.is_test is None else ood_set.is_test[pool]
        ood_split = split_ood(len(pool), is_test, params.ood_wild_share, seed)
        ood_split = OodSplit(pool[ood_split.wild], pool[ood_split.test])
        mixture = mix_wild(id_pool, ood_split.wild, len(id_set), float(pi), seed)
    about = {"id": params.id, "ood": ood, "pi": pi, "seed": seed}
    path, truth_path = workspace.target(experiment.wild), workspace.target(experiment.truth)
    write_wild_set(path, WildSet(mixture.source, ood_split.test), workspace.about(experiment.wild, **about))
    write_wild_truth(truth_path, mixture.is_ood, workspace.about(experiment.truth, **about))
    n_ood = {} if mixture.is_ood is None else {"of it OOD": int(mixture.is_ood.sum())}
    counts = {"wild": len(mixture.source), **n_ood, "OOD test": len(ood_split.test)}
    note = _left_out(len(ood_set) - len(pool), ood, params.id)
    what = f"wild data {'with ' if n_ood else ''}{experiment}"
    return Prepared(what, counts, [path, truth_path], note)
