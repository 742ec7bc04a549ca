"""Galleries of the report: which images are shown, in which order, and what stands below each."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup
from PIL import Image

from salcli.errors import BadArtifactError
from salcli.pipeline.inputs import id_samples, ood_test_samples, wild_file_names, wild_samples
from salcli.pipeline.review import just_below, ranked_candidates
from salcli.report.findings import Evaluation, Findings
from salcli.report.tables import score_label
from salcli.store.formats import RepresentationFile, read_file_names
from salcli.store.layout import Artifact, Workspace, prepared_set, unseen_set

if TYPE_CHECKING:
    from salcli.engine.batches import Rows
    from salcli.params.schema import Params

LARGEST = 112  # pixels of a thumbnail; smaller images stay as they are, without loss
LOSSLESS_UP_TO = 40
N_BELOW, N_MISTAKES = 48, 36


@dataclass(frozen=True)
class Picture:
    """One image and what is known of it."""

    index: int
    source: Markup  # a data: address
    size: int
    class_name: str
    class_word: str  # what the class is: predicted as, of class
    score: float
    score_name: str
    file: str = ""


@dataclass(frozen=True)
class Gallery:
    """The first of `n_all` images in an order."""

    pictures: list[Picture]
    n_all: int

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
    """Four kinds of images; None where there are none, or where the data are not images."""

    candidates: Gallery | None = None
    below: Gallery | None = None
    misses: Gallery | None = None
    false_alarms: Gallery | None = None


def read_galleries(workspace: Workspace, params: Params, findings: Findings, top: int) -> Galleries:
    """At most `top` images of each kind."""
    wild = wild_samples(workspace, params, findings.experiment)
    if wild.arrays[0].dtype != np.uint8 or wild.sample_shape[0] not in (1, 3):
        return Galleries()  # points in the plane, or vectors
    return Galleries(
        *_wild_galleries(workspace, params, findings, wild, top),
        misses(workspace, params, findings, min(top, N_MISTAKES)),
        false_alarms(workspace, params, findings, min(top, N_MISTAKES)),
    )


def _wild_galleries(
    workspace: Workspace, params: Params, findings: Findings, wild: Rows, top: int
) -> tuple[Gallery, Gallery]:
    """Candidates, and the wild samples just below T; highest score first."""
    candidates = findings.candidates
    ranked, below = ranked_candidates(candidates), just_below(candidates, min(top, N_BELOW))
    galleries = []
    for index, n_all in ((ranked[:top], len(ranked)), (below, len(candidates.wild_score) - len(ranked))):
        files = wild_file_names(workspace, params, findings.experiment, index)
        names = [findings.class_names[label] for label in candidates.predicted[index].tolist()]
        word, score_name = "predicted as", score_label(candidates.score_name)
        galleries.append(_gallery(wild, index, names, word, candidates.wild_score, score_name, n_all, files))
    return galleries[0], galleries[1]


def misses(workspace: Workspace, params: Params, findings: Findings, top: int) -> Gallery | None:
    """OOD test images with the most ID-like scores; None where there is no OOD test data."""
    evaluation, experiment = findings.evaluation, findings.experiment
    if evaluation is None or not len(evaluation.main.ood):
        return None
    scores = evaluation.main.ood
    rows = ood_test_samples(workspace, params, experiment, evaluation.unseen)
    _check_length(rows, scores, evaluation)
    index = np.argsort(-scores, kind="stable")[:top]
    stored = RepresentationFile.open(workspace.find(experiment.test_representation(evaluation.unseen)))
    predicted = [findings.class_names[label] for label in stored.predicted.numpy()[index].tolist()]
    files = _files(workspace, (unseen_set if evaluation.unseen else prepared_set)(evaluation.test_set), rows, index)
    n_all = int((scores >= evaluation.main.threshold).sum())
    return _gallery(rows, index, predicted, "predicted as", scores, "score", n_all, files)


def false_alarms(workspace: Workspace, params: Params, findings: Findings, top: int) -> Gallery | None:
    """ID test images with the least ID-like scores."""
    evaluation = findings.evaluation
    if evaluation is None:
        return None
    scores = evaluation.main.id
    test = id_samples(workspace, params, "test", findings.experiment)
    _check_length(test.rows, scores, evaluation)
    index = np.argsort(scores, kind="stable")[:top]
    labels = [findings.class_names[label] for label in test.labels.numpy()[index].tolist()]
    files = _files(workspace, prepared_set(params.data.id), test.rows, index)
    n_all = int((scores < evaluation.main.threshold).sum())
    return _gallery(test.rows, index, labels, "of class", scores, "score", n_all, files)


def _files(workspace: Workspace, artifact: Artifact, rows: Rows, index: np.ndarray) -> list[str]:
    """The file that each sample comes from, empty where samples are not files."""
    names = read_file_names(workspace.find(artifact))
    return [names[i] if names else "" for i in rows.index[index]]


def _check_length(rows: Rows, scores: np.ndarray, evaluation: Evaluation) -> None:
    if len(rows) != len(scores):
        raise BadArtifactError(
            f"there are scores of {len(scores)} test images on {evaluation.test_set}, but {len(rows)} images; "
            "score them again: salcli evaluate"
        )


def _gallery(
    rows: Rows,
    index: np.ndarray,
    classes: Sequence[str],
    class_word: str,
    scores: np.ndarray,
    score_name: str,
    n_all: int,
    files: Sequence[str],
) -> Gallery:
    pictures = [
        Picture(int(i), source, size, class_name, class_word, float(scores[i]), score_name, file)
        for i, class_name, (source, size), file in zip(index, classes, thumbnails(rows, index), files, strict=True)
    ]
    return Gallery(pictures, n_all)


def thumbnails(rows: Rows, index: np.ndarray) -> list[tuple[Markup, int]]:
    """data: addresses that hold the images, and their sizes. One image at a time is in memory."""
    return [_thumbnail(rows.read([int(i)])[0].numpy()) for i in index]


def _thumbnail(image: np.ndarray) -> tuple[Markup, int]:
    picture = Image.fromarray(image[0] if len(image) == 1 else np.ascontiguousarray(image.transpose(1, 2, 0)))
    picture.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    content, size = io.BytesIO(), max(picture.size)
    if size <= LOSSLESS_UP_TO:
        kind = "png"
        picture.save(content, kind, optimize=True)
    else:
        kind = "jpeg"
        picture.save(content, kind, quality=82, optimize=True)
    # base64 only, so there is nothing to escape
    return Markup(f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}"), size
