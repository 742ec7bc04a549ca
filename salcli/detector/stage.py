"""The stage that makes a detector: SAL's OOD classifier, calibrated on held-out ID data, in one file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from salcli import __version__
from salcli.data.vectors import Columns
from salcli.detector.detector import BATCH_SIZE, Detector, round_to_float16, score_samples
from salcli.detector.images import ImageFormat
from salcli.detector.vectors import VectorFormat
from salcli.engine.batches import Rows
from salcli.engine.device import resolve_device
from salcli.errors import BadArtifactError, DataError, MetricsError
from salcli.models.network import OodClassifier
from salcli.models.pretrained import Embedder
from salcli.params.schema import Params
from salcli.pipeline.embed import embedder_for
from salcli.pipeline.inputs import id_samples
from salcli.progress import Progress, Silent, Task
from salcli.store.files import Found, fingerprint, read_header
from salcli.store.formats import read_network
from salcli.store.layout import Experiment, Workspace, prepared_set


@dataclass(frozen=True)
class MadeDetector:
    """A detector that was written, for the table of the command."""

    experiment: Experiment
    n_classes: int
    n_calibration: int
    threshold: float  # that keeps ID_QUANTILE of the calibration data
    written: list[Path]


def run(
    workspace: Workspace,
    params: Params,
    experiment: Experiment,
    progress: Progress | None = None,
) -> MadeDetector:
    """Make the detector of one variant of SAL.

    Its network must not have seen its calibration data, or its p-values would mean nothing. So a network that was
    trained with another split or classifier is refused (by Workspace.find).
    """
    found = workspace.find(experiment.network(experiment.variant))
    classifier = workspace.find(experiment.classifier)
    network = read_network(found, OodClassifier).to(resolve_device(params.device))
    held_out = id_samples(workspace, params, "calibration", experiment)
    prepared = workspace.find(prepared_set(params.data.id))
    embedder = embedder_for(params, workspace)
    if params.detector.float16:
        round_to_float16(network.backbone)
    with (progress or Silent()).task(f"detector, {experiment}", len(held_out), "samples") as task:
        calibration = _calibration_scores(network, held_out.rows, task)
    detector = Detector(
        network,
        _format(held_out.rows, prepared, embedder, params.data.columns.named),
        held_out.class_names,
        calibration,
        provenance={
            "salcli": __version__,
            "id": params.data.id,
            **asdict(experiment),
            "made_from": {
                "network": fingerprint(found.path),
                "classifier": fingerprint(classifier.path),
                "split": fingerprint(workspace.find(experiment.split).path),
            },
            "network": read_header(found).about,
            "classifier": read_header(classifier).about,
        },
        embedder=embedder,
        float16=params.detector.float16,
        device=params.device,
    )
    path = workspace.target(experiment.detector)
    detector.save(path)
    return MadeDetector(experiment, len(detector.class_names), len(calibration), detector.threshold, [path])


def _calibration_scores(network: OodClassifier, rows: Rows, task: Task) -> NDArray[np.float32]:
    """In ascending order."""
    parts = []
    for start in range(0, len(rows), BATCH_SIZE):
        parts.append(score_samples(network, rows.read(slice(start, start + BATCH_SIZE))).score)
        task.advance(len(parts[-1]))
    if not parts:
        raise DataError("there are no calibration data; give data.id_shares.calibration a larger share")
    scores = np.sort(np.concatenate(parts))
    if not np.isfinite(scores).all():
        raise MetricsError(
            "not all calibration scores are finite, so no threshold is defined; "
            "train the network again with a smaller learning rate: salcli train-ood"
        )
    return scores


def _format(rows: Rows, prepared: Found, embedder: Embedder | None, columns: Columns) -> ImageFormat | VectorFormat:
    """How `prepare` converted the ID samples."""
    about = read_header(prepared).about
    if embedder is not None:
        # JSON has lists for tuples
        if json.loads(json.dumps(asdict(embedder.spec))) != about.get("embedder"):
            raise BadArtifactError(
                f"{prepared.path} was embedded with another backbone or other preprocessing than params.yaml says; "
                f"{prepared.fix}"
            )
        wanted = embedder.spec.preprocessing
        return ImageFormat(about["channels"], wanted.resize, about["fit"], wanted.interpolation)
    if len(rows.sample_shape) == 1:
        return VectorFormat(rows.sample_shape[0], columns)
    channels, size, _ = rows.sample_shape
    return ImageFormat(channels, size, about["fit"])
