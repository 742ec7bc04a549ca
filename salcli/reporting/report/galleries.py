"""Galleries of the report: which images are shown, in which order, and what stands below each."""

from __future__ import annotations

import base64
import io
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from markupsafe import Markup
from PIL import Image

from salcli.artifacts import layout
from salcli.artifacts.images import read_file_names
from salcli.errors import BadArtifactError
from salcli.reporting.score_names import score_label
from salcli.stages.inputs import classifier_of, id_images, ood_test_images, unseen_ood_images, wild_images
from salcli.stages.review import just_below, predicted_classes, ranked_candidates
from salcli.stages.wild_files import wild_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from salcli.artifacts.layout import Workspace
    from salcli.compute.image_rows import ImageRows
    from salcli.params import Params
    from salcli.reporting.report.experiment import Experiment

LARGEST = 112  # pixels of a thumbnail; smaller images stay as they are, without loss
LOSSLESS_UP_TO = 40


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
    """Images in an order; `n_all` is how many there are, of which the first are shown."""

    pictures: list[Picture]
    n_all: int

    @property
    def classes(self) -> list[tuple[str, int]]:
        """Every class that is shown, and how often."""
        return sorted(Counter(picture.class_name for picture in self.pictures).items())


def candidate_gallery(workspace: Workspace, params: Params, experiment: Experiment, top: int) -> Gallery:
    """Candidates, highest score first."""
    ranked = ranked_candidates(experiment.candidates)
    return _wild_gallery(workspace, params, experiment, ranked[:top], len(ranked))


def below_gallery(workspace: Workspace, params: Params, experiment: Experiment, top: int) -> Gallery:
    """Wild samples just below T, highest score first."""
    candidates = experiment.candidates
    n_all = len(candidates.wild_score) - len(candidates.index)
    return _wild_gallery(workspace, params, experiment, just_below(candidates, top), n_all)


def _wild_gallery(
    workspace: Workspace, params: Params, experiment: Experiment, index: np.ndarray, n_all: int
) -> Gallery:
    ood, seed, candidates = experiment.ood, experiment.seed, experiment.candidates
    names = predicted_classes(workspace, params, candidates, ood, seed)
    thumbnails = _thumbnails(wild_images(workspace, params.data.id, ood, seed), index)
    files = wild_files(workspace, params.data.id, ood, seed, index)
    score_name = score_label(candidates.score_name)
    pictures = [
        Picture(int(i), source, size, names[i], "predicted as", float(candidates.wild_score[i]), score_name, file)
        for i, (source, size), file in zip(index, thumbnails, files, strict=True)
    ]
    return Gallery(pictures, n_all)


def misses(workspace: Workspace, params: Params, experiment: Experiment, top: int) -> Gallery | None:
    """OOD test images with the most ID-like scores; None where there is no OOD test set."""
    evaluation = experiment.evaluation
    if evaluation is None or not len(evaluation.main.ood):
        return None
    scores = evaluation.main.ood
    if evaluation.unseen:
        place = layout.unseen_set(evaluation.unseen)
        rows = unseen_ood_images(workspace, params.data, evaluation.unseen, experiment.seed, experiment.ood)
    else:
        place = layout.prepared_ood_set(experiment.ood)
        rows = ood_test_images(workspace, experiment.ood, experiment.seed)
    _check_length(rows, scores)
    index = np.argsort(-scores, kind="stable")[:top]
    predicted = _predictions(workspace, experiment, rows, index)
    n_all = int((scores >= evaluation.main.threshold).sum())
    names = read_file_names(workspace.find(place))
    return _test_gallery(rows, index, predicted, "predicted as", scores, n_all, names)


def false_alarms(workspace: Workspace, params: Params, experiment: Experiment, top: int) -> Gallery | None:
    """ID test images with the least ID-like scores."""
    evaluation = experiment.evaluation
    if evaluation is None:
        return None
    scores = evaluation.main.id
    test = id_images(workspace, params.data.id, "test", experiment.seed)
    _check_length(test.images, scores)
    index = np.argsort(scores, kind="stable")[:top]
    labels = [experiment.class_names[label] for label in test.labels[torch.from_numpy(index)].tolist()]
    n_all = int((scores < evaluation.main.threshold).sum())
    names = read_file_names(workspace.find(layout.prepared_set(params.data.id)))
    return _test_gallery(test.images, index, labels, "of class", scores, n_all, names)


def _test_gallery(
    rows: ImageRows,
    index: np.ndarray,
    classes: Sequence[str],
    word: str,
    scores: np.ndarray,
    n_all: int,
    names: Sequence[str],  # of the files that the images of the set come from, if any
) -> Gallery:
    files = [names[i] if names else "" for i in rows.source[index]]
    pictures = [
        Picture(int(i), source, size, class_name, word, float(scores[i]), "score", file)
        for i, class_name, (source, size), file in zip(index, classes, _thumbnails(rows, index), files, strict=True)
    ]
    return Gallery(pictures, n_all)


def _predictions(workspace: Workspace, experiment: Experiment, rows: ImageRows, index: np.ndarray) -> list[str]:
    network, _ = classifier_of(workspace, experiment.seed)
    with torch.inference_mode():
        labels = network(rows.read(index)).argmax(1).tolist() if len(index) else []
    return [experiment.class_names[label] for label in labels]


def _check_length(rows: ImageRows, scores: np.ndarray) -> None:
    if len(rows) != len(scores):
        raise BadArtifactError(
            f"there are scores of {len(scores)} test images, but {len(rows)} images; score them again: salcli evaluate"
        )


def has_pictures(rows: ImageRows) -> bool:
    """Points in the plane are no pictures."""
    return rows.sets[0].dtype == np.uint8 and rows.sets[0].shape[1] in (1, 3)


def _thumbnails(rows: ImageRows, index: np.ndarray) -> list[tuple[Markup, int]]:
    """Addresses that hold the images themselves. One image at a time is in memory."""
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
    # no text of anybody: nothing in it is to be replaced
    return Markup(f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}"), size
