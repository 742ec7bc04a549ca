"""prepare: decode (and with a frozen backbone embed) the data sets, split the ID data, and mix the wild data."""

from __future__ import annotations

import shutil
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from salcli.data.catalogue import custom_paths, data_root, load_source
from salcli.data.decoding import Block, Shape, check_kind, decode, one_ahead, vector_blocks
from salcli.data.duplicates import Digests, first_of_each, not_in
from salcli.data.folders import read_custom, top_folder
from salcli.data.sets import Samples, check_same_shape, some_of, with_calibration
from salcli.data.splits import IdSplit, hold_out, mix_wild, recycle_wild, split_id, split_ood, wild_as_it_is
from salcli.data.vectors import how_to_label
from salcli.errors import BadArtifactError, SalError, printable
from salcli.params.schema import RECYCLE, DataParams, Params
from salcli.progress import Progress, Silent
from salcli.store import formats
from salcli.store.layout import UNKNOWN, Artifact, Experiment, Workspace, prepared_set

if TYPE_CHECKING:
    from salcli.models.pretrained import Embedder

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
    params: Params,
    name: str,
    progress: Progress | None = None,
    artifact: Artifact | None = None,
    embedder: Embedder | None = None,
) -> Prepared:
    """Decode one data set. Of a frozen backbone, only the features are stored.

    An `embedder` that is given need not be built again; without one it is built where params.yaml asks for it.
    """
    data = params.data
    source, root = _source(workspace, data, name)
    if embedder is None and params.model.frozen:
        from salcli.pipeline.embed import embedder_for  # its code has a fingerprint of its own

        embedder = embedder_for(params, workspace)
    shape = _shape(data, embedder)
    check_kind(name, source, shape)
    artifact = artifact or prepared_set(name)
    path, done = workspace.target(artifact), workspace.target(artifact.unfinished)
    skip = data.on_bad_image == "skip" and shape is not None
    about: dict[str, Any] = {}
    if shape is not None:
        about = {"image_size": shape.size, "channels": shape.channels, "fit": source.fit}
    if embedder is not None:
        about["embedder"] = asdict(embedder.spec)
    with (progress or Silent()).task(name, len(source), source.kind) as task, ExitStack() as stack:
        decoded = _Decoded(name, root, source, about)
        if shape is None:
            blocks, axes = vector_blocks(source, task), source.array.shape[1:]
        elif embedder is None:
            blocks, axes = decode(source, shape, task, skip_bad=skip), shape.axes
        else:
            blocks, axes = decode(source, shape, Silent(), skip_bad=skip), (embedder.n_features,)
        watched = decoded.watch(blocks)
        arrays: Iterator[NDArray[Any]]
        if embedder is None:
            arrays = (block.images for block in stack.enter_context(closing(watched)))
        else:
            from salcli.pipeline.embed import computing_vectors, embedded

            ahead = stack.enter_context(closing(one_ahead(watched)))
            arrays = embedded(name, embedder, stack.enter_context(computing_vectors(params)), ahead, task, done)
        dtype = np.dtype(np.uint8 if len(axes) == 3 else np.float32)
        formats.write_streamed_samples(path, (len(source), *axes), dtype, arrays, decoded.describe)
        shutil.rmtree(done, ignore_errors=True)
    counts = {source.kind: decoded.n_kept, "classes": len(source.class_names), "skipped": len(decoded.bad)}
    return Prepared(name, counts, [path], decoded.note())


def _source(workspace: Workspace, data: DataParams, name: str) -> tuple[Samples, Path]:
    """The set as it is on disk, and the folder that its file names start from.

    A calibration set that comes from elsewhere stands behind the ID data, in the same file: so the splits index one
    array, and whatever depends on the ID data depends on both.
    """

    def custom(name: str, *, labeled: bool) -> tuple[Samples, Path]:
        paths = custom_paths(data.custom[name], workspace.root)
        return read_custom(name, paths, labeled=labeled, columns=data.columns.named), top_folder(paths)

    if name in data.custom:
        source, root = custom(name, labeled=name == data.id)
    else:
        root = data_root(params_root=data.root, workspace=workspace.root)
        source = load_source(name, root)
    if len(source) == 0:
        raise SalError(f"{name} holds no samples; get it again with: salcli data fetch {name}")
    if name == data.id:
        paths = custom_paths(data.custom[name], workspace.root) if name in data.custom else [root / f"{name}.npz"]
        check_classes(name, source, paths)
        if data.calibration is not None:
            source = with_calibration(name, source, data.calibration, custom(data.calibration, labeled=True)[0])
    return source, root


def original_images(
    workspace: Workspace, params: Params, prepared: Artifact, index: NDArray[np.int64], size: int
) -> list[NDArray[np.uint8] | None]:
    """Images of a set of which only features are stored, to look at; None for a file that is gone."""
    source, root = _source(workspace, params.data, prepared.name)
    names = formats.read_file_names(workspace.find(prepared))
    if names and source.files:  # bad images may have been skipped, so positions need not agree
        files = tuple(root / names[i] for i in index)
        source = replace(source, files=files, labels=None, is_test=None)
    else:
        source = source.take(index)
    images: list[NDArray[np.uint8] | None] = [None] * len(index)
    with closing(decode(source, Shape(3, size), Silent(), skip_bad=True)) as blocks:
        for block in blocks:
            for i, image in zip(block.index, block.images, strict=True):
                images[int(i)] = image
    return images


def _shape(data: DataParams, embedder: Embedder | None) -> Shape | None:
    """The shape of images; None where the project works on vectors that are given as such."""
    if embedder is not None:
        wanted = embedder.spec.preprocessing
        return Shape(len(wanted.mean), wanted.resize, wanted.interpolation, wanted.crop)
    if data.image_size is None or data.channels is None:
        return None
    return Shape(data.channels, data.image_size)


# -- what passes from the decoder to the file


class _Decoded:
    """Records what passes from the decoder to the file."""

    def __init__(self, name: str, root: Path, source: Samples, about: dict[str, Any]) -> None:
        self.name, self.root, self.source, self.about = name, root, source, about
        self.kept: list[NDArray[np.int64]] = []
        self.digests: list[Digests] = []
        self.bad: list[tuple[Path, str]] = []

    @property
    def n_kept(self) -> int:
        return sum(len(index) for index in self.kept)

    def watch(self, blocks: Generator[Block]) -> Generator[Block]:
        with closing(blocks):
            for block in blocks:
                self.kept.append(block.index)
                self.digests.append(block.digests)
                self.bad += block.bad
                yield block

    def describe(self) -> tuple[Samples, Digests, dict[str, Any]]:
        """What goes with the array."""
        if self.n_kept == 0:
            raise SalError(f"{self.name}: no image could be decoded; {self.note()}")
        source = self.source.take(np.concatenate(self.kept)) if self.bad else self.source
        if self.source.labels is not None and source.labels is not None:
            lost = np.setdiff1d(self.source.labels, source.labels)
            if len(lost):
                raise SalError(
                    f"{self.name}: no image of class {source.class_names[lost[0]]} could be decoded; {self.note()}"
                )
        skipped = {"n_skipped": len(self.bad), "skipped": [name for name, _ in self._bad_names()[:SHOWN]]}
        files, origin_files = (tuple(map(self._below_root, paths)) for paths in (source.files, source.origin_files))
        source = replace(source, files=files, origin_files=origin_files)
        return source, np.concatenate(self.digests), {**self.about, **skipped, "name": self.name}

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


def check_classes(name: str, source: Samples, paths: Sequence[Path]) -> None:
    """ID data need labels, of two classes at least."""
    if source.labels is None:
        fix = "put its images into one folder a class, or `labels` into its .npz file"
        if source.is_vectors:
            fix = how_to_label(paths[0])
        raise SalError(f"{name} has no labels, so it cannot be the ID set; {fix}")
    if len(source.class_names) < 2:
        fix = "" if source.is_vectors else ", a folder for each"
        raise SalError(f"{name} has one class only ({', '.join(source.class_names)}); ID data need at least two{fix}")
    if source.is_vectors:
        alone = np.flatnonzero(np.bincount(source.labels, minlength=len(source.class_names)) < 2)
        if len(alone):
            raise SalError(
                f"{name}: {len(alone):,} of {len(source.class_names):,} classes have one vector only "
                f"({some_of([source.class_names[k] for k in alone])}), but training, calibration and test need some; "
                "add vectors, or name the column of the classes: data.columns.label"
            )


def prepare_split(workspace: Workspace, params: DataParams, experiment: Experiment) -> Prepared:
    """Split the ID data into training, calibration, wild and test samples.

    With a calibration set from elsewhere, that is the calibration part.
    """
    found = workspace.find(prepared_set(params.id))
    id_set = formats.read_samples(found)
    if id_set.labels is None:
        raise SalError(f"{params.id} has no labels, so it cannot be the ID set")
    shares, is_custom = params.id_shares.model_dump(), params.id in params.custom
    digests, own, added = formats.read_digests(found), np.arange(len(id_set)), np.empty(0, np.int64)
    if id_set.is_calibration is not None:
        own, added = np.flatnonzero(~id_set.is_calibration), np.flatnonzero(id_set.is_calibration)
    kept = own[first_of_each(digests[own])] if is_custom else own
    is_test = None if id_set.is_test is None else id_set.is_test[kept]
    names = id_set.class_names if is_custom else ()
    split = split_id(id_set.labels[kept], shares, experiment.seed, is_test, class_names=names)
    split = IdSplit(**{part: kept[index] for part, index in vars(split).items()})
    note = _left_out(len(own) - len(kept), params.id, params.id)
    if params.calibration is not None:
        if len(added) == 0:
            raise BadArtifactError(f"{found.path} was made without the set {params.calibration}; {found.fix}")
        new = added[not_in(digests[own], digests[added], each_once=True)]
        if len(new) == 0:
            raise SalError(
                f"all {len(added)} samples of {params.calibration} are also in {params.id}; calibration needs others"
            )
        split = replace(split, calibration=new)
        note = "; ".join(filter(None, (note, _left_out(len(added) - len(new), params.calibration, params.id))))
    path = workspace.target(experiment.split)
    about = workspace.about(experiment.split, data=params.id, shares=shares, seed=experiment.seed)
    formats.write_id_split(path, split, about)
    counts = {part: len(getattr(split, part)) for part in shares}
    return Prepared(f"ID split, seed {experiment.seed}", counts, [path], note)


def _left_out(n: int, name: str, other: str) -> str:
    """Copies of a sample in several parts would break their separation: a test must not use training samples."""
    if n == 0:
        return ""
    if name == other:
        return f"{name}: {n} samples are exact copies of others in it, and are left out"
    return f"{name}: {n} samples are also in {other}, exactly equal, and are left out"


def _recycled(source: NDArray[np.int64], n_id: int, name: str) -> str:
    """What is drawn twice is no second sample: errors of the filter look more certain than they are."""
    drawn = source[source < n_id]
    n_samples = len(np.unique(drawn))
    if len(drawn) == n_samples:
        return ""
    return f"{name}: {len(drawn):,} wild ID samples are draws of {n_samples:,}, as in the authors' code"


def prepare_wild(workspace: Workspace, params: DataParams, experiment: Experiment) -> Prepared:
    """Mix the wild data, hold out a share of them, and keep the rest of the OOD data for the test."""
    ood, seed, pi = experiment.ood, experiment.seed, experiment.pi
    sets = {name: workspace.find(prepared_set(name)) for name in (params.id, ood)}
    id_set, ood_set = (formats.read_samples(found) for found in sets.values())
    check_same_shape({params.id: id_set.array.shape[1:], ood: ood_set.array.shape[1:]})
    id_pool, pool = formats.read_id_split(workspace.find(experiment.split)).wild, np.arange(len(ood_set))
    if params.may_hold_copies(ood):
        # twice in wild data that come as they are is twice in the wild; a test set must not have what is wild
        pool = not_in(*(formats.read_digests(found) for found in sets.values()), each_once=pi != UNKNOWN)
    ood_test = np.empty(0, np.int64)
    if pi == UNKNOWN:
        wild, is_ood = wild_as_it_is(pool, len(id_set))
    else:
        is_test = None if ood_set.is_test is None else ood_set.is_test[pool]
        for_wild, for_test = split_ood(len(pool), is_test, params.ood_wild_share, seed)
        ood_test = pool[for_test]
        mix = recycle_wild if params.mixing == RECYCLE else mix_wild
        wild, is_ood = mix(id_pool, pool[for_wild], len(id_set), float(pi), seed)
    about = {"id": params.id, "ood": ood, "pi": pi, "seed": seed}
    if params.mixing == RECYCLE:
        about["mixing"] = RECYCLE
    is_held = np.zeros(len(wild), np.bool_)
    if params.wild_holdout:
        digests = np.concatenate([formats.read_digests(found) for found in sets.values()])[wild]
        is_held = hold_out(len(wild), params.wild_holdout, seed, np.unique(digests, return_inverse=True)[1])
        about["wild_holdout"] = params.wild_holdout
    held_out, wild = wild[is_held], wild[~is_held]
    is_ood = None if is_ood is None else is_ood[~is_held]
    written = []
    for artifact, kind, index in (
        (experiment.wild, formats.WILD_SET, wild),
        (experiment.wild_holdout, formats.WILD_HOLDOUT, held_out),
        (experiment.ood_test, formats.OOD_TEST, ood_test),
    ):
        written.append(workspace.target(artifact))
        formats.write_index(written[-1], kind, index, workspace.about(artifact, **about))
    written.append(workspace.target(experiment.truth))
    formats.write_wild_truth(written[-1], is_ood, workspace.about(experiment.truth, **about))
    n_ood = {} if is_ood is None else {"of it OOD": int(is_ood.sum())}
    counts = {"wild": len(wild), **n_ood, "held out": len(held_out), "OOD test": len(ood_test)}
    note = _left_out(len(ood_set) - len(pool), ood, params.id) or _recycled(wild, len(id_set), params.id)
    what = f"wild data {'with ' if n_ood else ''}{experiment}"
    return Prepared(what, counts, written, note)
