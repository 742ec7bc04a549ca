"""Galleries of the report: which samples are shown, in which order, and what stands below each.

Images are shown as thumbnails, those of a frozen backbone read from their files again; vectors by their row ids and by
the columns that data.columns.show names.
"""

from __future__ import annotations

import base64
import io
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

import numpy as np
from markupsafe import Markup
from PIL import Image

from salcli.errors import BadArtifactError, ReviewError
from salcli.pipeline.loading import id_samples, ood_test_samples, wild_file_names, wild_samples
from salcli.pipeline.prepare import original_images
from salcli.project.review import ReviewRow, just_below, ranked_candidates
from salcli.report.page_data import Findings
from salcli.report.stage_tables import score_label
from salcli.store.files import Found
from salcli.store.formats import RepresentationFile, read_file_names, read_shown
from salcli.store.layout import Artifact, Experiment, Workspace, prepared_set, unseen_set

if TYPE_CHECKING:
    from torch import Tensor

    from salcli.engine.batches import Rows
    from salcli.params.schema import Params

T = TypeVar("T")
LARGEST = 112  # pixels of a thumbnail; smaller images stay as they are, without loss
FOR_LABELING = 512
LOSSLESS_UP_TO = 40
N_BELOW, N_MISTAKES = 48, 36


@dataclass(frozen=True)
class Thumbnail:
    """One sample and what is known of it."""

    index: int
    source: Markup  # a data: address; empty for vectors
    size: int
    class_name: str
    score: float
    file: str  # or row id
    columns: Mapping[str, str]


@dataclass(frozen=True)
class Gallery:
    """The first of `n_all` samples in an order."""

    pictures: list[Thumbnail]
    n_all: int
    class_word: str  # what the class is: predicted as, of class
    score_name: str

    @property
    def classes(self) -> list[tuple[str, int]]:
        """Every class that is shown, and how often."""
        return sorted(Counter(picture.class_name for picture in self.pictures).items())

    @property
    def class_numbers(self) -> dict[str, int]:
        """What the page's script tells classes apart by: their names may be anything."""
        return {name: i for i, (name, _) in enumerate(self.classes)}


@dataclass(frozen=True)
class Galleries:
    """Four kinds of samples; None where there are none, or where nothing can be shown of them."""

    candidates: Gallery | None = None
    below: Gallery | None = None
    misses: Gallery | None = None
    false_alarms: Gallery | None = None


def read_galleries(workspace: Workspace, params: Params, findings: Findings, top: int) -> Galleries:
    """At most `top` samples of each kind: wild ones with the highest outlier score first, then mistakes."""
    experiment, found = findings.experiment, findings.candidates
    wild, stored = _wild_views(workspace, params, experiment), workspace.find(prepared_set(experiment.ood))
    if not wild.are_images and not read_file_names(stored):
        return Galleries()  # numbers without names

    def gallery(index: np.ndarray, n_all: int) -> Gallery:
        files = wild_file_names(workspace, params, experiment, index)
        pictures = wild.pictures(findings, index, found.predicted, found.wild_score, files)
        return Gallery(pictures, n_all, "predicted as", score_label(found.score_name))

    ranked, below = ranked_candidates(found), just_below(found, min(top, N_BELOW))
    candidates, others = gallery(ranked[:top], len(ranked)), gallery(below, len(found.wild_score) - len(ranked))
    return Galleries(candidates, others, *_mistakes(workspace, params, findings, min(top, N_MISTAKES)))


def _mistakes(
    workspace: Workspace, params: Params, findings: Findings, top: int
) -> tuple[Gallery | None, Gallery | None]:
    """OOD test images with the most ID-like scores, if there are any, and ID test images with the least."""
    evaluation, experiment = findings.evaluation, findings.experiment
    if evaluation is None:
        return None, None
    test, main = id_samples(workspace, params, "test", experiment), evaluation.main

    def gallery(rows: Rows, stored: Artifact, labels: Tensor, scores: np.ndarray, *, is_id: bool) -> Gallery:
        if len(rows) != len(scores):
            raise BadArtifactError(
                f"there are scores of {len(scores)} test images on {evaluation.test_set}, but {len(rows)} images; "
                "score them again: salcli evaluate"
            )
        index = np.argsort(scores if is_id else -scores, kind="stable")[:top]
        views = _Views(workspace, params, rows, (stored,))
        pictures = views.pictures(findings, index, labels.numpy(), scores, views.files(index))
        n_all = int(((scores < main.threshold) == is_id).sum())
        return Gallery(pictures, n_all, "of class" if is_id else "predicted as", "score")

    false_alarms = gallery(test.rows, prepared_set(params.data.id), test.labels, main.id, is_id=True)
    if not len(main.ood):
        return None, false_alarms
    rows = ood_test_samples(workspace, params, experiment, evaluation.unseen)
    stored = (unseen_set if evaluation.unseen else prepared_set)(evaluation.test_set)
    seen_as = RepresentationFile.open(workspace.find(experiment.test_representation(evaluation.unseen))).predicted
    return gallery(rows, stored, seen_as, main.ood, is_id=False), false_alarms


def wild_addresses(
    workspace: Workspace, params: Params, experiment: Experiment, rows: Sequence[ReviewRow], prefix: str | None
) -> tuple[list[str], list[dict[str, str]]]:
    """The address of the image of each wild sample, empty for vectors, and the columns to show beside it.

    Addresses hold the images, or begin with `prefix` and end in their file names.
    """
    index, files = np.array([row.index for row in rows], dtype=np.int64), [row.file for row in rows]
    views = _wild_views(workspace, params, experiment)
    columns = views.columns(index, files)
    if prefix is None:
        return [str(address) for address, _ in views.thumbnails(index, FOR_LABELING)], columns
    if not views.are_images:
        raise ReviewError("these wild samples are vectors, which have no images; leave out --images")
    if not all(row.is_image_file for row in rows):
        raise ReviewError("the files of these wild samples are not known; leave out --images, and tasks hold copies")
    return [prefix + quote(os.fsencode(file)) for file in files], columns


def _wild_views(workspace: Workspace, params: Params, experiment: Experiment) -> _Views:
    sets = prepared_set(params.data.id), prepared_set(experiment.ood)
    return _Views(workspace, params, wild_samples(workspace, params, experiment), sets)


@dataclass(frozen=True)
class _Views:
    """What can be shown of samples. Each array of the rows is that of one prepared set."""

    workspace: Workspace
    params: Params
    rows: Rows
    sets: tuple[Artifact, ...]

    def files(self, index: np.ndarray) -> list[str]:
        """The file or row id of each sample; empty where it has none."""
        return [names[i] if names else "" for names, i in self._stored(index, read_file_names)]

    @property
    def are_images(self) -> bool:
        """Or vectors of a frozen backbone, whose images are read from their files again."""
        return self.rows.arrays[0].dtype == np.uint8 or self.params.model.frozen

    def pictures(
        self, findings: Findings, index: np.ndarray, labels: np.ndarray, scores: np.ndarray, files: Sequence[str]
    ) -> list[Thumbnail]:
        """`labels` and `scores` of all samples, `files` of those in `index`."""
        shown = zip(index, self.thumbnails(index), files, self.columns(index, files), strict=True)
        return [
            Thumbnail(int(i), source, size, findings.class_names[labels[i]], float(scores[i]), file, cells)
            for i, (source, size), file, cells in shown
        ]

    def columns(self, index: np.ndarray, files: Sequence[str]) -> list[dict[str, str]]:
        """None where names are hidden because they would tell ID from OOD samples: columns would, too."""
        if not any(files):
            return [{} for _ in index]
        found = self._stored(index, read_shown)
        return [{name: cells[i] for name, cells in columns.items()} for columns, i in found]

    def thumbnails(self, index: np.ndarray, largest: int = LARGEST) -> list[tuple[Markup, int]]:
        """data: addresses that hold the images, and their sizes; empty for vectors."""
        if self.rows.arrays[0].dtype == np.uint8:
            return [_thumbnail(self.rows.read([int(i)])[0].numpy(), largest) for i in index]  # one in memory at a time
        images: list[np.ndarray | None] = [None] * len(index)
        located = self._located(index)
        for artifact in self.sets if self.params.model.frozen else ():
            own = [position for position, (one, _) in enumerate(located) if one == artifact]
            wanted = np.array([located[position][1] for position in own], dtype=np.int64)
            found = original_images(self.workspace, self.params, artifact, wanted, largest)
            for position, image in zip(own, found, strict=True):
                images[position] = image
        return [(Markup(""), 0) if image is None else _thumbnail(image, largest) for image in images]

    def _located(self, index: np.ndarray) -> list[tuple[Artifact, int]]:
        """The set of each sample, and its index there."""
        starts = np.cumsum([0, *(len(array) for array in self.rows.arrays)])
        rows = self.rows.index[index]
        which = np.searchsorted(starts, rows, side="right") - 1
        return [(self.sets[k], int(i)) for k, i in zip(which, rows - starts[which], strict=True)]

    def _stored(self, index: np.ndarray, read: Callable[[Found], T]) -> list[tuple[T, int]]:
        """What `read` finds in the file of each sample's set, and the sample's index there."""
        located = self._located(index)
        content = {artifact: read(self.workspace.find(artifact)) for artifact in {one for one, _ in located}}
        return [(content[artifact], i) for artifact, i in located]


def _thumbnail(image: np.ndarray, largest: int) -> tuple[Markup, int]:
    picture = Image.fromarray(image[0] if len(image) == 1 else np.ascontiguousarray(image.transpose(1, 2, 0)))
    picture.thumbnail((largest, largest), Image.Resampling.LANCZOS)
    content, size = io.BytesIO(), max(picture.size)
    kind = "png" if size <= LOSSLESS_UP_TO else "jpeg"
    picture.save(content, kind, quality=82, optimize=True)  # of jpeg; png has no quality
    # base64 only, so there is nothing to escape
    return Markup(f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}"), size
