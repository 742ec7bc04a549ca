"""extract-grads: the last-layer gradient of every ID and every wild sample, in one forward pass (Eq. 4, 5)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from salcli.artifacts import layout
from salcli.artifacts.fingerprint import fingerprint
from salcli.artifacts.gradients import writing_gradients
from salcli.compute.numerics import Compute, computing
from salcli.errors import TrainingError
from salcli.inference import in_batches
from salcli.progress import Silent
from salcli.sal.gradients import Factors, last_layer_residual
from salcli.stages.inputs import classifier_of, id_images, mixture_of, wild_images

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from torch import Tensor

    from salcli.artifacts.gradients import GradientWriter
    from salcli.artifacts.layout import Workspace
    from salcli.compute.image_rows import ImageRows
    from salcli.models.network import Classifier
    from salcli.params import Params
    from salcli.progress import Progress


@dataclass(frozen=True)
class ExtractedGradients:
    """One gradient file. Dense, it would have n_samples × n_classes × n_features numbers."""

    what: str
    seed: int
    n_samples: int
    n_classes: int
    n_features: int
    written: Path


def run_id(
    workspace: Workspace, params: Params, seed: int, progress: Progress | None = None
) -> list[ExtractedGradients]:
    """Gradients of ID training and calibration data, with their true labels."""
    results = []
    with computing(params) as compute:
        extractor = _Extractor.load(workspace, params, seed, compute, progress or Silent())
        for part in ("train", "calibration"):
            samples = id_images(workspace, params.data.id, part, seed)
            path = workspace.target(layout.id_gradients(part, seed))
            made_with = {"data": f"ID {part}", "seed": seed, **_params_used(params)}
            results.append(extractor.write(path, samples.images, samples.labels, samples.index, made_with))
    return results


def run_wild(
    workspace: Workspace, params: Params, ood: str, seed: int, progress: Progress | None = None
) -> ExtractedGradients:
    """Gradients of the wild data, with predicted labels. `index` is the place in the wild set."""
    images = wild_images(workspace, params.data.id, ood, seed)
    mixture = fingerprint(mixture_of(workspace, ood, seed))
    made_with = {"data": f"wild, {ood}", "seed": seed, "wild": mixture, **_params_used(params)}
    path = workspace.target(layout.wild_gradients(ood, seed))
    with computing(params) as compute:
        extractor = _Extractor.load(workspace, params, seed, compute, progress or Silent())
        return extractor.write(path, images, None, np.arange(len(images)), made_with)


def _params_used(params: Params) -> dict[str, Any]:
    return {
        "data.id": params.data.id,
        "extract_grads": params.extract_grads.model_dump(),
        "numerics": params.numerics.model_dump(),
    }


@dataclass(frozen=True)
class _Extractor:
    network: Classifier
    fingerprint: str
    batch_size: int
    compute: Compute
    progress: Progress

    @classmethod
    def load(cls, workspace: Workspace, params: Params, seed: int, compute: Compute, progress: Progress) -> _Extractor:
        network, found = classifier_of(workspace, seed)
        return cls(network, fingerprint(found), params.extract_grads.batch_size, compute, progress)

    def write(
        self, path: Path, images: ImageRows, labels: Tensor | None, index: np.ndarray, made_with: dict[str, Any]
    ) -> ExtractedGradients:
        """Predicted labels are used where there are none."""
        n_classes, n_features = self.network.spec.n_classes, self.network.n_features
        what, seed = made_with["data"], made_with["seed"]
        with (
            self.progress.task(f"extract-grads, {what}, seed {seed}", len(images), "images") as task,
            self._writing(path, len(images), made_with) as writer,
        ):
            start = 0
            for feature, logits in in_batches(
                self.network, self.network.features_and_logits, images, self.batch_size, self.compute, task
            ):
                if not (logits.isfinite().all() and feature.isfinite().all()):
                    raise TrainingError(
                        f"the classifier of seed {seed} gives features that are not finite; train it again with a "
                        "smaller learning rate: salcli train-id"
                    )
                rows = slice(start, start + len(logits))
                predicted = logits.argmax(1)
                label = predicted if labels is None else labels[rows]
                if writer:
                    factors = Factors(last_layer_residual(logits, label), feature, label)
                    writer.append(factors, predicted, index[rows])
                start = rows.stop
        return ExtractedGradients(what, seed, len(images), n_classes, n_features, path)

    def _writing(
        self, path: Path, n_samples: int, made_with: dict[str, Any]
    ) -> AbstractContextManager[GradientWriter | None]:
        """Of several processes, one writes."""
        if not self.compute.processes.is_main:
            return nullcontext()
        shape = n_samples, self.network.spec.n_classes, self.network.n_features
        return writing_gradients(path, *shape, self.fingerprint, made_with)
