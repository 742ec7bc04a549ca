"""All that a report says about one experiment, read from its files: numbers, curves, and the samples in its galleries.

What does not exist is None, or left out. Images are shown as thumbnails, those of a frozen backbone read from their
files again; vectors by their row ids and by the columns that data.columns.show names.
"""

from __future__ import annotations

import base64
import io
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import pandas as pd
from markupsafe import Markup
from PIL import Image

from salcli.errors import BadArtifactError, SalError
from salcli.pipeline.loading import id_samples, ood_test_samples, wild_origins, wild_samples
from salcli.pipeline.prepare import original_images
from salcli.project.review import ReviewRow, just_below, ranked_candidates
from salcli.report.stage_tables import score_label
from salcli.sal.metrics import ID_QUANTILE, roc_points, threshold_that_keeps
from salcli.store.files import read_arrays, reading_json
from salcli.store.formats import (
    Candidates,
    RepresentationFile,
    read_candidates,
    read_file_names,
    read_samples,
    read_shown,
)
from salcli.store.layout import TEST_SCORES, Artifact, Experiment, Workspace, prepared_set, unseen_set

if TYPE_CHECKING:
    from salcli.engine.batches import Rows
    from salcli.params.schema import Params

LARGEST = 112  # pixels of a thumbnail; smaller images stay as they are, without loss
FOR_LABELING = 512
LOSSLESS_UP_TO = 40
N_BELOW, N_MISTAKES = 48, 36
Gallery = dict[str, Any]


@dataclass(frozen=True)
class MethodScores:
    """One method's outlier scores of the test data. `ood` is empty where there is no OOD test data."""

    method: str
    label: str
    id: np.ndarray
    ood: np.ndarray
    metrics: dict[str, Any]  # its row of metrics.json, between 0 and 1

    @property
    def threshold(self) -> float:
        """The lowest score with at least 95% of the ID test data at or below it."""
        return threshold_that_keeps(self.id, ID_QUANTILE)

    @property
    def roc(self) -> tuple[np.ndarray, np.ndarray] | None:
        """FPR and TPR."""
        return roc_points(self.id, self.ood) if len(self.ood) else None


@dataclass(frozen=True)
class Findings:
    experiment: Experiment
    class_names: tuple[str, ...]
    candidates: Candidates
    filter: dict[str, Any]  # of filter.json
    curves: dict[str, pd.DataFrame]  # training, by network
    theory: dict[str, Any] | None  # of theory.json
    estimates: dict[str, Any] | None  # of estimates.json: what held-out wild data tell without labels
    unseen: str  # the test set, empty for the OOD set of the wild data
    methods: list[MethodScores]  # the best first; none before an evaluation
    main: MethodScores | None  # the variant of SAL that the report is about, or the best method if it has no scores

    @property
    def test_set(self) -> str:
        return self.unseen or self.experiment.ood

    @property
    def has_ood(self) -> bool:
        return any(len(one.ood) for one in self.methods)

    def label(self, network: str) -> str:
        """What tables call the network of a method."""
        return {"classifier": "ID classifier", **{one.method: one.label for one in self.methods}}.get(network, network)


def read_findings(workspace: Workspace, params: Params, experiment: Experiment, unseen: str = "") -> Findings:
    """The candidates have to exist, all else may be missing.

    Scores are those on the test set that is asked for; else on the first that has OOD samples, or that exists.
    """
    candidates = read_candidates(workspace.find(experiment.candidates))
    names = [unseen] if unseen else ["", *params.data.test_ood]
    there = [name for name in names if unseen or workspace.has(experiment.evaluation("scores.h5", name))]
    methods: list[MethodScores] = []
    for i, name in enumerate(there):
        found = _read_scores(workspace, experiment, name)
        if i == 0 or any(len(one.ood) for one in found):
            unseen, methods = name, found
        if any(len(one.ood) for one in methods):
            break
    return Findings(
        experiment=experiment,
        candidates=candidates,
        class_names=read_samples(workspace.find(prepared_set(params.data.id))).class_names,
        filter=_json(workspace, experiment.filter_metrics) or {},
        curves=_curves(workspace, params, experiment),
        theory=_json(workspace, experiment.theory("json")),
        estimates=_json(workspace, experiment.estimates),
        unseen=unseen,
        methods=methods,
        main=next((one for one in methods if one.method == experiment.variant), methods[0] if methods else None),
    )


def _json(workspace: Workspace, artifact: Artifact) -> dict[str, Any] | None:
    if not workspace.has(artifact):
        return None
    with reading_json(workspace.find(artifact)) as content:
        return dict(content.items())


def _read_scores(workspace: Workspace, experiment: Experiment, unseen: str) -> list[MethodScores]:
    found = workspace.find(experiment.evaluation("scores.h5", unseen))
    metrics = _json(workspace, experiment.evaluation("metrics.json", unseen)) or {}
    arrays, methods = read_arrays(found, TEST_SCORES), []
    for name in (path.removesuffix("/id") for path in arrays if path.endswith("/id")):
        own, ood = metrics.get(name, {}), arrays.get(f"{name}/ood", np.empty(0))
        methods.append(MethodScores(name, str(own.get("label", name)), arrays[f"{name}/id"], ood, own))
    if not methods:
        raise BadArtifactError(f"{found.path} holds no scores; {found.fix}")

    def rank(one: MethodScores) -> tuple[float, bool, str]:
        fpr95 = one.metrics.get("fpr95")
        return math.inf if fpr95 is None else fpr95, one.method != experiment.variant, one.method

    return sorted(methods, key=rank)


def _curves(workspace: Workspace, params: Params, experiment: Experiment) -> dict[str, pd.DataFrame]:
    """Training curves in the order of the pipeline."""
    artifacts = {"classifier": experiment.train_id("csv")}
    artifacts |= {name: experiment.curve(name) for name in (experiment.variant, *params.rivals)}
    artifacts |= {name: experiment.encoder_curve(name) for name in params.encoders}
    found = {name: workspace.find(artifact) for name, artifact in artifacts.items() if workspace.has(artifact)}
    curves = {}
    for name, one in found.items():
        try:
            curve = pd.read_csv(one.path) if one.path.stat().st_size else pd.DataFrame()
        except (ValueError, OSError) as error:
            raise one.damaged(error) from None
        if {"epoch", "loss"} <= {*curve.columns} and len(curve):
            curves[name] = curve
    return curves


# --- galleries


def read_galleries(workspace: Workspace, params: Params, findings: Findings, top: int) -> dict[str, Gallery | None]:
    """At most `top` samples of each kind: candidates, those below T, misses and false alarms.

    None where there are none, or where nothing can be shown of them.
    """
    galleries: dict[str, Gallery | None] = dict.fromkeys(("candidates", "below", "misses", "false_alarms"))
    experiment, found, sets = findings.experiment, findings.candidates, _wild_sets(params, findings.experiment)
    wild = wild_samples(workspace, params, experiment)
    if not _are_images(params, wild) and not read_file_names(workspace.find(sets[1])):
        return galleries  # numbers without names
    ranked, below = ranked_candidates(found), just_below(found, min(top, N_BELOW))
    n_others = len(found.wild_score) - len(ranked)
    for name, index, n_all in (("candidates", ranked[:top], len(ranked)), ("below", below, n_others)):
        files = [*map(str, wild_origins(workspace, params, experiment, index))]
        shown = _shown(workspace, params, wild, sets, index, files)
        about = "predicted as", score_label(found.score_name), n_all
        galleries[name] = _gallery(findings, index, shown, found.predicted, found.wild_score, *about)
    main = findings.main
    if main is None:
        return galleries
    test, n_mistakes = id_samples(workspace, params, "test", experiment), min(top, N_MISTAKES)
    sides = {"false_alarms": (test.rows, prepared_set(params.data.id), test.labels.numpy(), main.id, "of class")}
    if len(main.ood):
        rows = ood_test_samples(workspace, params, experiment, findings.unseen)
        stored = (unseen_set if findings.unseen else prepared_set)(findings.test_set)
        of_test = workspace.find(experiment.test_representation(findings.unseen))
        seen_as = RepresentationFile.open(of_test).predicted.numpy()
        sides["misses"] = (rows, stored, seen_as, main.ood, "predicted as")
    for name, (rows, stored, labels, scores, word) in sides.items():
        if len(rows) != len(scores):
            raise BadArtifactError(
                f"there are scores of {len(scores)} test images on {findings.test_set}, but {len(rows)} images; "
                "score them again: salcli evaluate"
            )
        is_id = name == "false_alarms"
        index = np.argsort(-scores if is_id else scores, kind="stable")[:n_mistakes]
        n_all, shown = (
            int(((scores > main.threshold) == is_id).sum()),
            _shown(workspace, params, rows, (stored,), index),
        )
        galleries[name] = _gallery(findings, index, shown, labels, scores, word, "score", n_all)
    return galleries


def _gallery(
    findings: Findings,
    index: np.ndarray,
    shown: list[dict[str, Any]],
    labels: np.ndarray,
    scores: np.ndarray,
    class_word: str,
    score_name: str,
    n_all: int,
) -> Gallery:
    """The first of `n_all` samples in an order. `labels` and `scores` are of all, `shown` of those in `index`."""
    names = [findings.class_names[label] for label in labels[index]]
    counts = sorted(Counter(names).items())
    numbers = {name: k for k, (name, _) in enumerate(counts)}  # for the page's script: names may be anything
    pictures = [
        {"index": int(i), "class_name": name, "class_number": numbers[name], "score": float(scores[i]), **own}
        for i, name, own in zip(index, names, shown, strict=True)
    ]
    about = {"class_word": class_word, "score_name": score_name}
    return {"pictures": pictures, "n_all": n_all, "classes": counts, **about}


def wild_addresses(
    workspace: Workspace, params: Params, experiment: Experiment, rows: Sequence[ReviewRow], prefix: str | None
) -> tuple[list[str], list[dict[str, str]]]:
    """The address of the image of each wild sample, empty for vectors, and the columns to show beside it.

    Addresses hold the images, or begin with `prefix` and end in their file names.
    """
    index, files = np.array([row.index for row in rows], dtype=np.int64), [row.file for row in rows]
    wild, largest = wild_samples(workspace, params, experiment), FOR_LABELING if prefix is None else 0
    shown = _shown(workspace, params, wild, _wild_sets(params, experiment), index, files, largest)
    columns = [own["columns"] for own in shown]
    if prefix is None:
        return [str(own["source"]) for own in shown], columns
    if not _are_images(params, wild):
        raise SalError("these wild samples are vectors, which have no images; leave out --images")
    if not all(row.origin.is_image_file for row in rows):
        raise SalError("the files of these wild samples are not known; leave out --images, and tasks hold copies")
    return [prefix + quote(os.fsencode(file)) for file in files], columns


def _wild_sets(params: Params, experiment: Experiment) -> tuple[Artifact, Artifact]:
    return prepared_set(params.data.id), prepared_set(experiment.ood)


def _are_images(params: Params, rows: Rows) -> bool:
    """Or vectors of a frozen backbone, whose images are read from their files again."""
    return rows.arrays[0].dtype == np.uint8 or params.model.frozen


def _shown(
    workspace: Workspace,
    params: Params,
    rows: Rows,
    sets: Sequence[Artifact],
    index: np.ndarray,
    files: Sequence[str] | None = None,
    largest: int = LARGEST,
) -> list[dict[str, Any]]:
    """What can be shown of samples: their files or row ids, columns, and images of at most `largest` pixels, if not 0.

    Each array of the rows is that of one prepared set. Without `files` they are those of the sets; where they are
    hidden, because they would tell ID from OOD samples, columns would, too.
    """
    starts = np.cumsum([0, *map(len, rows.arrays)])
    which = np.searchsorted(starts, rows.index[index], side="right") - 1
    shown: list[dict[str, Any]] = [{} for _ in index]
    for k in np.unique(which):
        positions, stored = np.flatnonzero(which == k).tolist(), workspace.find(sets[k])
        own = rows.index[index[positions]] - starts[k]
        images: Iterable[np.ndarray | None] = [None] * len(own)
        if largest and rows.arrays[0].dtype == np.uint8:
            images = (rows.read([int(i)])[0].numpy() for i in index[positions])  # one in memory at a time
        elif largest and params.model.frozen:
            images = original_images(workspace, params, sets[k], own, largest)
        names, columns = read_file_names(stored), read_shown(stored)
        for position, i, image in zip(positions, own, images, strict=True):
            file = files[position] if files is not None else names[i] if names else ""
            source, size = (Markup(""), 0) if image is None else _thumbnail(image, largest)
            cells = {name: values[i] for name, values in columns.items()} if file else {}
            shown[position] = {"file": file, "source": source, "size": size, "columns": cells}
    return shown


def _thumbnail(image: np.ndarray, largest: int) -> tuple[Markup, int]:
    """A data: address that holds the image, and its size."""
    picture = Image.fromarray(image[0] if len(image) == 1 else np.ascontiguousarray(image.transpose(1, 2, 0)))
    picture.thumbnail((largest, largest), Image.Resampling.LANCZOS)
    content, size = io.BytesIO(), max(picture.size)
    kind = "png" if size <= LOSSLESS_UP_TO else "jpeg"
    picture.save(content, kind, quality=82, optimize=True)  # of jpeg; png has no quality
    # base64 only, so there is nothing to escape
    return Markup(f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}"), size
