"""filter: separate candidate outliers from the wild data (Eq. 6, 7 and Remark 2), by τ or by another score."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from salcli.engine.batches import Rows
from salcli.engine.device import computing, processes, resolve_device
from salcli.engine.inference import outputs_of
from salcli.methods.base import InputScore, Known
from salcli.methods.combined import finite
from salcli.methods.sal import protocol
from salcli.methods.separation import FilterScores, Separation, filter_scores, sentence, separate
from salcli.models.network import Classifier
from salcli.params.schema import Params
from salcli.pipeline.loading import (
    classifier,
    id_representation,
    id_samples,
    known_truth,
    wild_representation,
    wild_samples,
)
from salcli.progress import Progress, Silent, Task
from salcli.sal.gradients import of_each_sample
from salcli.sal.tau import SeparationErrors, separation_errors
from salcli.store.files import as_json, write_json
from salcli.store.formats import Candidates, RepresentationFile, write_candidates
from salcli.store.layout import Experiment, Workspace


@dataclass(frozen=True)
class IdFit:
    """How well the classifier fits the ID data: τ separates only where the ID risk is small."""

    train_risk: float  # mean cross-entropy
    train_accuracy: float
    calibration_accuracy: float  # NaN of none

    @classmethod
    def of(cls, id_train: RepresentationFile, calibration: RepresentationFile) -> IdFit:
        losses = of_each_sample(id_train, lambda x: cross_entropy(x.logits.double(), x.label, reduction="none"))
        accuracies = (float((one.predicted == one.label).double().mean()) for one in (id_train, calibration))
        return cls(float(losses.mean()), *accuracies)


@dataclass(frozen=True)
class Filtered:
    """The outcome. `errors` is None where the truth about the wild data is not known."""

    experiment: Experiment
    separation: Separation
    score: str
    errors: SeparationErrors | None
    fit: IdFit
    n_calibration: int
    n_id_train: int
    protocol: str  # whose threshold it is
    notes: list[str]  # what the fit of the score had to say
    written: list[Path]

    @property
    def sentence(self) -> str:
        return sentence(self.separation)


def run(workspace: Workspace, params: Params, experiment: Experiment, progress: Progress | None = None) -> Filtered:
    """Filter the wild data of one experiment, with the params of its variant."""
    params = params.for_variant(experiment.variant)
    own, notes, network = params.filter, list[str](), classifier(workspace, experiment)
    id_train, calibration = (id_representation(workspace, part, experiment) for part in ("train", "calibration"))
    wild = wild_representation(workspace, experiment)
    method, n_classes = params.filter_score(), id_train.n_classes
    with (progress or Silent()).task(f"filter, {experiment}, {own.score}", n_classes, "classes") as task:
        if isinstance(method, InputScore):
            scores = _by_input(method, network, workspace, params, experiment, task)
        else:
            about = {"seed": experiment.seed, "device": resolve_device(params.device), "note": notes.append}
            known = Known.of(network, id_train, wild=wild, calibration=calibration, task=task, **about)
            scores = filter_scores(method, known, own)
    found = separate(scores, own)
    candidates = Candidates(
        index=found.candidates,
        wild_score=scores.wild.numpy(),
        predicted=wild.predicted.numpy(),
        calibration_score=scores.calibration.numpy(),
        p_value=found.p_value,
        certified=found.certified,
        threshold=found.threshold,
        score_name=own.score,
    )
    # the truth, where it is known: after everything is decided
    is_ood = known_truth(workspace, len(wild), experiment)
    written = [workspace.target(artifact) for artifact in (experiment.candidates, experiment.filter_metrics)]
    result = Filtered(
        experiment=experiment,
        separation=found,
        score=own.score,
        errors=None if is_ood is None else separation_errors(torch.from_numpy(candidates.is_candidate), is_ood),
        fit=IdFit.of(id_train, calibration),
        n_calibration=len(calibration),
        n_id_train=len(id_train),
        protocol=protocol(own),
        notes=notes,
        written=written,
    )
    if processes().is_main:
        how = {"seed": experiment.seed, "filter": own.model_dump()}
        write_candidates(written[0], candidates, workspace.about(experiment.candidates, **how))
        write_json(written[1], as_json(_metrics(result)))
    return result


def _by_input(
    method: InputScore, network: Classifier, workspace: Workspace, params: Params, experiment: Experiment, task: Task
) -> FilterScores:
    """From the samples, whose gradients the score needs."""
    held_out = params.filter.calibration == "holdout"
    calibrating = id_samples(workspace, params, "calibration" if held_out else "train", experiment).rows
    with computing(params.device, params.numerics) as compute:

        def scored(rows: Rows) -> Tensor:
            size, outputs = params.extract_grads.batch_size, method.outputs(network)
            return finite(method.name, method.score(outputs_of(network, outputs, rows, size, compute, task)[0]))

        pair = scored(calibrating), scored(wild_samples(workspace, params, experiment))
    return FilterScores(*pair, pair if held_out else None)


def _metrics(result: Filtered) -> dict[str, Any]:
    found = result.separation
    return {
        "protocol": result.protocol,
        "score": result.score,
        "threshold": found.threshold,
        "n_candidates": len(found.candidates),
        "n_wild": len(found.scores.wild),
        "n_calibration": result.n_calibration,
        "n_id_train": result.n_id_train,
        **(asdict(result.errors) if result.errors else dict.fromkeys(("err_in", "err_out", "precision"))),
        **asdict(result.fit),
        "verdict": result.sentence,
        "evidence": asdict(found.verdict) if found.verdict else None,
        **({"notes": result.notes} if result.notes else {}),
    }
