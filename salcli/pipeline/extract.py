"""extract-grads: features and logits of every sample in one forward pass: the gradients (Eq. 4, 5), factored."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from salcli.engine.batches import Rows
from salcli.engine.device import computing
from salcli.engine.inference import in_batches
from salcli.errors import SalError
from salcli.params.schema import Params
from salcli.pipeline.loading import IdPart, classifier, id_samples, ood_test_samples, wild_holdout_samples, wild_samples
from salcli.progress import Progress, Silent
from salcli.sal.gradients import Representation
from salcli.store.formats import writing_representation
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
    parts = {part: id_samples(workspace, params, part, experiment) for part in ID_PARTS}
    wanted = [(f"ID {part}", experiment.id_representation(part), own.rows, own.labels) for part, own in parts.items()]
    return _extract(workspace, params, experiment, progress, wanted)


def run_wild(
    workspace: Workspace, params: Params, experiment: Experiment, progress: Progress | None = None
) -> list[Extracted]:
    """The wild data, those held out, and the OOD test data that were kept out of them, with predicted labels."""
    ood, given = experiment.ood, (workspace, params, experiment)
    wanted = [
        (f"wild, {ood}", experiment.wild_representation, wild_samples(*given), None),
        (f"held-out wild, {ood}", experiment.wild_holdout_representation, wild_holdout_samples(*given), None),
        (f"test, {ood}", experiment.test_representation(), ood_test_samples(*given), None),
    ]
    return _extract(*given, progress, wanted)


def run_unseen(
    workspace: Workspace, params: Params, experiment: Experiment, unseen: str, progress: Progress | None = None
) -> list[Extracted]:
    """An OOD set that is only tested on."""
    rows = ood_test_samples(workspace, params, experiment, unseen)
    wanted = [(f"test, {unseen}", experiment.test_representation(unseen), rows, None)]
    return _extract(workspace, params, experiment, progress, wanted)


def _extract(
    workspace: Workspace,
    params: Params,
    experiment: Experiment,
    progress: Progress | None,
    wanted: Sequence[tuple[str, Artifact, Rows, Tensor | None]],  # where there are no labels, predicted ones are used
) -> list[Extracted]:
    network, size, results = classifier(workspace, experiment), params.extract_grads.batch_size, []
    used = {"extract_grads": params.extract_grads.model_dump(), "numerics": params.numerics.model_dump()}
    with computing(params.device, params.numerics) as compute:
        for what, artifact, rows, labels in wanted:
            path, shape = workspace.target(artifact), (len(rows), network.spec.n_classes, network.n_features)
            about = workspace.about(artifact, seed=experiment.seed, **used)
            # of several processes, one writes
            writing = writing_representation(path, *shape, about) if compute.processes.is_main else nullcontext()
            name, start = f"extract-grads, {what}, seed {experiment.seed}", 0
            with (progress or Silent()).task(name, len(rows), "samples") as task, writing as append:
                for feature, logits in in_batches(network, network.features_and_logits, rows, size, compute, task):
                    if not (logits.isfinite().all() and feature.isfinite().all()):
                        raise SalError(
                            f"the classifier of seed {experiment.seed} gives features that are NaN or infinite; train "
                            "it again with a smaller learning rate: salcli train-id"
                        )
                    label = logits.argmax(1) if labels is None else labels[start : start + len(logits)]
                    if append:
                        append(Representation(feature, logits, label))
                    start += len(logits)
            results.append(Extracted(what, experiment, *shape, path))
    return results
