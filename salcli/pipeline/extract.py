"""extract-grads: features and logits of every sample in one forward pass: the gradients (Eq. 4, 5), factored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from salcli.engine.batches import Rows
from salcli.engine.device import Compute, computing
from salcli.engine.inference import in_batches
from salcli.errors import TrainingError
from salcli.models.network import Classifier
from salcli.params.schema import Params
from salcli.pipeline.inputs import (
    IdPart,
    classifier,
    id_samples,
    ood_test_samples,
    wild_holdout_samples,
    wild_samples,
)
from salcli.progress import Progress, Silent
from salcli.sal.gradients import Representation
from salcli.store.formats import RepresentationWriter, writing_representation
from salcli.store.layout import Artifact, Experiment, Workspace

ID_PARTS: tuple[IdPart, ...] = ("train", "calibration", "test")


@dataclass(frozen=True)
class Extracted:
    """One representation file. Dense gradients would have n_samples × n_classes × n_features numbers."""

    what: str
    experiment: Experiment
    n_samples: int
    n_classes: int
    n_features: int
    written: Path


def run_id(
    workspace: Workspace, params: Params, experiment: Experiment, progress: Progress | None = None
) -> list[Extracted]:
    """All ID data but those in the wild set, with their true labels."""
    results = []
    with _extractor(workspace, params, experiment, progress) as extractor:
        for part in ID_PARTS:
            samples = id_samples(workspace, params, part, experiment)
            artifact = experiment.id_representation(part)
            results.append(extractor.write(f"ID {part}", artifact, samples.rows, samples.labels))
    return results


def run_wild(
    workspace: Workspace, params: Params, experiment: Experiment, progress: Progress | None = None
) -> list[Extracted]:
    """The wild data, those held out, and the OOD test data that were kept out of them, with predicted labels."""
    ood = experiment.ood
    with _extractor(workspace, params, experiment, progress) as extractor:
        wild, test = wild_samples(workspace, params, experiment), ood_test_samples(workspace, params, experiment)
        held_out = wild_holdout_samples(workspace, params, experiment)
        return [
            extractor.write(f"wild, {ood}", experiment.wild_representation, wild),
            extractor.write(f"held-out wild, {ood}", experiment.wild_holdout_representation, held_out),
            extractor.write(f"test, {ood}", experiment.test_representation(), test),
        ]


def run_unseen(
    workspace: Workspace, params: Params, experiment: Experiment, unseen: str, progress: Progress | None = None
) -> list[Extracted]:
    """An OOD set that is only tested on."""
    with _extractor(workspace, params, experiment, progress) as extractor:
        rows = ood_test_samples(workspace, params, experiment, unseen)
        return [extractor.write(f"test, {unseen}", experiment.test_representation(unseen), rows)]


@contextmanager
def _extractor(
    workspace: Workspace, params: Params, experiment: Experiment, progress: Progress | None
) -> Iterator[_Extractor]:
    network = classifier(workspace, experiment)
    with computing(params.device, params.numerics) as compute:
        yield _Extractor(workspace, params, experiment, network, compute, progress or Silent())


@dataclass(frozen=True)
class _Extractor:
    workspace: Workspace
    params: Params
    experiment: Experiment
    network: Classifier
    compute: Compute
    progress: Progress

    def write(self, what: str, artifact: Artifact, rows: Rows, labels: Tensor | None = None) -> Extracted:
        """Predicted labels are used where there are none."""
        network, path = self.network, self.workspace.target(artifact)
        shape = len(rows), network.spec.n_classes, network.n_features
        with (
            self.progress.task(f"extract-grads, {what}, seed {self.experiment.seed}", len(rows), "samples") as task,
            self._writer(artifact, path, shape) as writer,
        ):
            start, size = 0, self.params.extract_grads.batch_size
            for feature, logits in in_batches(network, network.features_and_logits, rows, size, self.compute, task):
                if not (logits.isfinite().all() and feature.isfinite().all()):
                    raise TrainingError(
                        f"the classifier of seed {self.experiment.seed} gives features that are NaN or infinite; train "
                        "it again with a smaller learning rate: salcli train-id"
                    )
                label = logits.argmax(1) if labels is None else labels[start : start + len(logits)]
                if writer:
                    writer.append(Representation(feature, logits, label))
                start += len(logits)
        return Extracted(what, self.experiment, *shape, path)

    def _writer(
        self, artifact: Artifact, path: Path, shape: tuple[int, int, int]
    ) -> AbstractContextManager[RepresentationWriter | None]:
        """Of several processes, one writes."""
        if not self.compute.processes.is_main:
            return nullcontext()
        used = {"extract_grads": self.params.extract_grads.model_dump(), "numerics": self.params.numerics.model_dump()}
        return writing_representation(path, *shape, self.workspace.about(artifact, seed=self.experiment.seed, **used))
