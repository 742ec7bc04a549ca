"""detector: SAL's OOD classifier, calibrated on held-out ID data, as one file that predicts on its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from salcli import __version__
from salcli.artifacts import layout
from salcli.artifacts.checkpoint import read_header, read_network
from salcli.artifacts.detector import ImageFormat, StoredDetector, write_detector
from salcli.artifacts.fingerprint import check_made_with, fingerprint
from salcli.artifacts.images import read_image_set, read_made_with
from salcli.calibration import ID_QUANTILE, threshold_that_keeps
from salcli.compute.devices import resolve_device
from salcli.detector.scorer import BATCH_SIZE, Scorer
from salcli.errors import DataError, MetricsError
from salcli.models.network import OodClassifier
from salcli.progress import Silent
from salcli.stages.inputs import classifier_of, id_images

if TYPE_CHECKING:
    from pathlib import Path

    from salcli.artifacts.layout import Workspace
    from salcli.compute.image_rows import ImageRows
    from salcli.params import Params
    from salcli.progress import Progress, Task

METHOD = "sal"


@dataclass(frozen=True)
class MadeDetector:
    """The figures of a detector and where it was written."""

    ood: str
    seed: int
    n_classes: int
    n_calibration: int
    threshold: float  # that keeps ID_QUANTILE of the calibration data
    written: list[Path]


def run(workspace: Workspace, params: Params, ood: str, seed: int, progress: Progress | None = None) -> MadeDetector:
    """Make one detector. Its calibration data must be unknown to its network, or its p-values would mean nothing."""
    _, classifier = classifier_of(workspace, seed)  # trained on the training part of the split that is here now
    found = workspace.find(layout.trained_network(METHOD, ood, seed))
    network, made_with = read_network(found, OodClassifier), read_header(found).about
    check_made_with(found, str(made_with.get("network")), classifier)
    images = id_images(workspace, params.data.id, "calibration", seed).images
    what = f"detector, {ood}, seed {seed}"
    with (progress or Silent()).task(what, len(images), "images") as task:
        calibration = _calibration_scores(Scorer(network, resolve_device(params.device)), images, task)
    id_set = workspace.find(layout.prepared_set(params.data.id))
    detector = StoredDetector(
        network=network,
        images=_image_format(images, read_made_with(id_set)),
        class_names=read_image_set(id_set).class_names,
        calibration=calibration,
        provenance={
            "salcli": __version__,
            "id": params.data.id,
            "ood": ood,
            "seed": seed,
            "made_from": {
                "network": fingerprint(found),
                "classifier": fingerprint(classifier),
                "split": fingerprint(workspace.find(layout.id_split(seed))),
            },
            "network": made_with,
            "classifier": read_header(classifier).about,
        },
    )
    path = workspace.target(layout.detector(ood, seed))
    write_detector(path, detector)
    threshold = threshold_that_keeps(calibration, ID_QUANTILE)
    return MadeDetector(ood, seed, len(detector.class_names), len(calibration), threshold, [path])


def _calibration_scores(scorer: Scorer, images: ImageRows, task: Task) -> np.ndarray[Any, np.dtype[np.float32]]:
    """In ascending order."""
    parts = []
    for start in range(0, len(images), BATCH_SIZE):
        parts.append(scorer(images.read(slice(start, start + BATCH_SIZE))).score)
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


def _image_format(images: ImageRows, made_with: dict[str, Any]) -> ImageFormat:
    """What `prepare` says it did."""
    first = images.sets[0]
    channels, size = first.shape[1:3]
    dtype = "uint8" if first.dtype == np.uint8 else "float32"
    return ImageFormat(int(channels), int(size), made_with["fit"], dtype)  # type: ignore[arg-type]
