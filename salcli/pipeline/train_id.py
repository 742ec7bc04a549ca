"""train-id: fit the classifier h_w on labeled ID data (Eq. 3), or use given weights.

By SGD; or, on vectors, by a full fit of the linear head.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from torch import Tensor

from salcli.engine.device import Compute, computing
from salcli.engine.inference import BATCH_SIZE, accuracy, outputs_of
from salcli.engine.linear_heads import ROUNDS, Examples, FullFit
from salcli.engine.training import Epoch, reproducible, train
from salcli.errors import WeightsError
from salcli.methods.base import LBFGS, Start
from salcli.models.network import Classifier, check_custom_head
from salcli.models.pretrained import PRETRAINED, load_given
from salcli.params.schema import Params
from salcli.pipeline.loading import id_samples
from salcli.pipeline.network_spec import code_of_network, network_spec
from salcli.progress import Progress, Silent
from salcli.store.files import fingerprint, write_csv, write_json
from salcli.store.formats import ResumePoint, write_network
from salcli.store.layout import Experiment, Workspace

CLEARLY_BETTER = 0.2  # accuracy that another order of the classes has to gain before we mention it
DEVIATIONS = 3


@dataclass(frozen=True)
class ClassCheck:
    """How a given network does on held-out ID data, and in which order its classes would do best."""

    accuracy: float
    n_samples: int
    class_names: tuple[str, ...]
    best_order: tuple[str, ...]  # what output 0, 1, … most likely means
    best_accuracy: float

    @property
    def is_near_chance(self) -> bool:
        chance = 1 / len(self.class_names)
        return self.accuracy <= chance + DEVIATIONS * math.sqrt(chance * (1 - chance) / self.n_samples)

    @property
    def has_other_order(self) -> bool:
        return self.best_accuracy >= self.accuracy + CLEARLY_BETTER


@dataclass(frozen=True)
class TrainedClassifier:
    """The metrics of the run and what was written. Given weights have no last epoch."""

    seed: int
    last_epoch: Epoch | None
    train_accuracy: float
    test_accuracy: float
    written: list[Path]
    class_check: ClassCheck | None = None  # of a network that was used as it was given


def run(
    workspace: Workspace, params: Params, experiment: Experiment, progress: Progress | None = None
) -> TrainedClassifier:
    """Train one classifier."""
    progress, seed = progress or Silent(), experiment.seed
    training = id_samples(workspace, params, "train", experiment)
    test = id_samples(workspace, params, "test", experiment)
    weights = _given_weights(workspace, params)
    about = workspace.about(
        experiment.classifier,
        data=params.data.id,
        seed=seed,
        train_id=params.train_id.model_dump(),
        model=params.model.model_dump(),
        numerics=params.numerics.model_dump(),
        **({"weights": fingerprint(weights)} if isinstance(weights, Path) else {}),
        **code_of_network(workspace, params.model),
    )
    is_fitted = params.train_id.solver == LBFGS
    is_given = not is_fitted and params.train_id.epochs == 0
    with computing(params.device, params.numerics) as compute:
        with reproducible(seed, "train-id") as generator:
            network = Classifier(network_spec(params.model, training))
            if weights:
                _start_from(weights, network, progress, is_given=is_given)
            elif is_given:
                check_custom_head(network)
            state, what = workspace.target(experiment.resume_state("train-id")), f"train-id, seed {seed}"
            if is_fitted:
                compute.place(network)
                examples = Examples.of_classes(training.rows, training.labels)
                fit = FullFit(network.head, network.features, examples, params.train_id.penalty, seed, compute.device)
                with progress.task(what, ROUNDS, "rounds") as task:
                    curve, about["penalty"] = fit.run(task)
            else:
                course = Start(seed, training, compute, network.spec).run(network, params.train_id, generator)
                settings = {**about, "processes": compute.processes.size}
                with progress.task(what, course.total_samples, "samples") as task:
                    curve = train(course, task, ResumePoint(state, settings, task))
        with progress.task("accuracy", len(training) + len(test), "samples") as task:
            train_accuracy, test_accuracy = (accuracy(network, part, compute, task) for part in (training, test))
        check = _check_classes(workspace, params, experiment, network, compute) if is_given else None
        artifacts = experiment.classifier, experiment.train_id("csv"), experiment.train_id("json")
        written = [workspace.target(artifact) for artifact in artifacts]
        if compute.processes.is_main:
            write_network(written[0], network, about)
            write_csv(written[1], [asdict(epoch) for epoch in curve], fieldnames=("epoch", "loss", "accuracy"))
            write_json(written[2], {"train_accuracy": train_accuracy, "test_accuracy": test_accuracy})
            state.unlink(missing_ok=True)
    return TrainedClassifier(seed, curve[-1] if curve else None, train_accuracy, test_accuracy, written, check)


def _given_weights(workspace: Workspace, params: Params) -> Path | Literal["pretrained"] | None:
    """Those of a frozen backbone are used by `prepare`."""
    given = params.model.weights
    if given is None or params.model.frozen:
        return None
    return PRETRAINED if given == PRETRAINED else workspace.given(given)


def _start_from(
    weights: Path | Literal["pretrained"], network: Classifier, progress: Progress, *, is_given: bool
) -> None:
    with progress.task("weights", 1, "files") as task:
        report = load_given(network, weights)
        if report.note and not is_given:
            task.note(report.note)
        task.advance(1)
    if is_given and not report.head_was_loaded:
        raise WeightsError(
            f"{weights} has no head for {network.spec.n_classes} classes, so it cannot be used without training; "
            "set train_id.epochs to 1 or more"
        )


def _check_classes(
    workspace: Workspace, params: Params, experiment: Experiment, network: Classifier, compute: Compute
) -> ClassCheck:
    """On held-out data: if the network's classes were in another order, nothing else would tell."""
    held_out = id_samples(workspace, params, "calibration", experiment)
    if len(held_out) == 0:
        held_out = id_samples(workspace, params, "train", experiment)
    (logits,) = outputs_of(network, network.forward, held_out.rows, BATCH_SIZE, compute)
    return class_check(logits.argmax(1), held_out.labels, held_out.class_names)


def class_check(predicted: Tensor, labels: Tensor, class_names: tuple[str, ...]) -> ClassCheck:
    """The order is the assignment of outputs to classes under which most samples are right."""
    from scipy.optimize import linear_sum_assignment  # slow to load, and needed for given weights only

    counts = np.zeros((len(class_names), len(class_names)), dtype=np.int64)  # output × class
    np.add.at(counts, (predicted.numpy(), labels.numpy()), 1)
    outputs, classes = linear_sum_assignment(counts, maximize=True)
    return ClassCheck(
        accuracy=float(np.trace(counts) / len(labels)),
        n_samples=len(labels),
        class_names=class_names,
        best_order=tuple(class_names[k] for k in classes),
        best_accuracy=float(counts[outputs, classes].sum() / len(labels)),
    )
