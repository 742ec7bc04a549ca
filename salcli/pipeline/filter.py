"""filter: separate candidate outliers from the wild data (Eq. 6, 7 and Remark 2), by τ or by another score."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from salcli.engine.batches import Rows
from salcli.engine.device import computing, processes, resolve_device
from salcli.engine.inference import outputs_of
from salcli.methods.base import InputScore, Known, finite
from salcli.methods.sal import protocol
from salcli.methods.separation import NONE, FilterScores, Separation, filter_scores, label_shift, sentence, separate
from salcli.models.network import Classifier
from salcli.params.schema import Params
from salcli.pipeline.loading import (
    class_names,
    classifier,
    id_representation,
    id_samples,
    known_truth,
    wild_holdout_samples,
    wild_representation,
    wild_samples,
)
from salcli.pipeline.wild_list import COLUMNS, wild_list
from salcli.progress import Progress, Silent, Task
from salcli.sal.gradients import of_each_sample
from salcli.sal.tau import SeparationErrors, separation_errors
from salcli.store.files import as_json, write_csv, write_json
from salcli.store.formats import Candidates, RepresentationFile, write_candidates
from salcli.store.layout import UNKNOWN, Experiment, Workspace


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
    label_shift: str  # how the classes of wild and labeled data differ; empty if they do not
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
    held_out = None  # it is on the list of your own wild data; of those that salcli mixed, nobody needs to see it here
    if experiment.pi == UNKNOWN:
        held_out = RepresentationFile.open(workspace.find(experiment.wild_holdout_representation))
    method, n_classes = params.filter_score(), id_train.n_classes
    with (progress or Silent()).task(f"filter, {experiment}, {own.score}", n_classes, "classes") as task:
        if isinstance(method, InputScore):
            scores = _by_input(method, network, workspace, params, experiment, task)
        else:
            about = {"seed": experiment.seed, "device": resolve_device(params.device), "note": notes.append}
            known = Known.of(network, id_train, wild=wild, calibration=calibration, task=task, **about)
            scores = filter_scores(method, known, own, held_out)
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
    shift, classes = "", (calibration.predicted, wild.predicted)
    if own.calibration == "holdout":
        shift = label_shift(found, classes, class_names(workspace, params.data))
    # the truth, where it is known: after everything is decided
    is_ood = known_truth(workspace, len(wild), experiment)
    written = [*map(workspace.target, (experiment.candidates, experiment.filter_metrics, experiment.wild_list))]
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
        label_shift=shift,
        written=written,
    )
    if processes().is_main:
        how = {"seed": experiment.seed, "filter": own.model_dump()}
        write_candidates(written[0], candidates, workspace.about(experiment.candidates, **how))
        write_json(written[1], as_json(_metrics(result)))
        rows: Iterable[dict[str, Any]] = ()
        if held_out is not None:
            predicted = wild.predicted.numpy(), held_out.predicted.numpy()
            rows = wild_list(workspace, params, experiment, found, predicted)
        write_csv(written[2], rows, COLUMNS)
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
        new = NONE
        if experiment.pi == UNKNOWN and len(others := wild_holdout_samples(workspace, params, experiment)):
            new = scored(others)
    exact, exact_new = (pair, (pair[0], new)) if held_out else (None, None)
    return FilterScores(*pair, exact, held_out=new, exact_held_out=exact_new)


def _metrics(result: Filtered) -> dict[str, Any]:
    found = result.separation
    return {
        "protocol": result.protocol,
        "score": result.score,
        "threshold": found.threshold,
        "n_candidates": len(found.candidates),
        "n_wild": len(found.scores.wild),
        "n_held_out": len(found.scores.held_out),
        "n_held_out_flagged": int((found.scores.held_out > found.threshold).sum()),
        "n_calibration": result.n_calibration,
        "n_id_train": result.n_id_train,
        **(asdict(result.errors) if result.errors else dict.fromkeys(("err_in", "err_out", "precision"))),
        **asdict(result.fit),
        "verdict": result.sentence,
        "label_shift": result.label_shift,
        "evidence": asdict(found.verdict) if found.verdict else None,
        **({"notes": result.notes} if result.notes else {}),
    }
