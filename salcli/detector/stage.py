"""The stage that makes a detector: any method with its network, calibrated on held-out ID data, in one file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from salcli import __version__
from salcli.data.vectors import Columns
from salcli.detector.detector import BATCH_SIZE, Detector, network_class, round_to_float16, score_samples
from salcli.detector.images import ImageFormat
from salcli.detector.vectors import VectorFormat
from salcli.engine.batches import Rows
from salcli.engine.device import Compute, computing, resolve_device
from salcli.engine.inference import outputs_of
from salcli.errors import BadArtifactError, MetricsError, MissingArtifactError, ParamsError, UnknownNameError
from salcli.methods.base import Head, IdTrained, Known, Method, PostHoc, Trained, built_in
from salcli.methods.sal import variant_label
from salcli.models.backbones import AUTO
from salcli.models.network import Classifier
from salcli.models.pretrained import Embedder
from salcli.params.schema import Params
from salcli.pipeline.embed import embedder_for
from salcli.pipeline.loading import id_representation, id_samples, wild_representation
from salcli.progress import Progress, Silent, Task
from salcli.store.files import Found, fingerprint, read_header, reading_json
from salcli.store.formats import read_network
from salcli.store.layout import Experiment, Workspace, prepared_set


@dataclass(frozen=True)
class MadeDetector:
    """A detector that was written, for the table of the command."""

    experiment: Experiment
    method: str  # its label
    reason: str  # why auto chose it
    n_classes: int
    n_calibration: int
    threshold: float  # that keeps ID_QUANTILE of the calibration data
    written: list[Path]


def run(
    workspace: Workspace,
    params: Params,
    experiment: Experiment,
    progress: Progress | None = None,
    *,
    out: Path | None = None,
) -> MadeDetector:
    """Make the detector of one wild set, of the method that `detector.method` names; `out`: elsewhere.

    Its network must not have seen its calibration data, or its p-values would mean nothing. So a network that was
    trained with another split or classifier is refused (by Workspace.find).
    """
    names, reason = [params.detector.method], ""
    if names == [AUTO]:
        names, reason = _by_estimates(workspace, experiment)
    what = f"detector, {experiment}"
    with (
        computing(params.device, params.numerics) as compute,
        (progress or Silent()).task(what, 0, "samples") as task,
    ):
        for name in names:
            try:
                fitted = _fitted(name, workspace, params, experiment, compute, task)
                break
            except (ParamsError, MissingArtifactError, UnknownNameError) as error:
                if name == names[-1]:
                    raise
                reason += f" {_label(name, params)} cannot be the detector here ({error}), so the next best is."
    detector = _calibrated(fitted, workspace, params, experiment, reason, progress or Silent())
    path = out or workspace.target(experiment.detector)
    detector.save(path)
    n_classes, n_calibration = len(detector.class_names), len(detector.calibration)
    return MadeDetector(
        experiment, detector.label, detector.reason, n_classes, n_calibration, detector.threshold, [path]
    )


def _label(name: str, params: Params) -> str:
    """What tables call a method; a custom one by its name."""
    found = built_in().get(name)
    return variant_label(name) if name in params.variants else found.label if found else name


def _by_estimates(workspace: Workspace, experiment: Experiment) -> tuple[list[str], str]:
    """The methods by what `evaluate` estimated of them without labels, the chosen one first, and why it is."""
    with reading_json(workspace.find(experiment.estimates)) as content:
        by_auroc = {name: float(one["auroc"]["value"]) for name, one in content["methods"].items()}
        ranked = sorted(by_auroc, key=lambda name: -by_auroc[name])
        chosen, reason = str(content["chosen"]), str(content["reason"])
    return list(dict.fromkeys([chosen, *ranked])), reason


@dataclass(frozen=True)
class _Fitted:
    """A method with what it was fitted to, and its network."""

    name: str
    method: Method
    network: Classifier
    source: Found  # of the network
    held_out: Tensor | None = None  # its scores of the calibration data, where it has learned from them


def _fitted(
    name: str, workspace: Workspace, params: Params, experiment: Experiment, compute: Compute, task: Task
) -> _Fitted:
    """As `evaluate` fits it. A SalError says why it cannot be a detector."""
    method = params.method(name)
    is_own = isinstance(method, Trained)
    if isinstance(method, IdTrained) and method.images == "all":
        raise ParamsError(f"{name} was trained on the calibration data, too, so it cannot be a detector")
    trained = experiment.encoder(name) if isinstance(method, IdTrained) else experiment.network(name)
    source = workspace.find(trained if is_own else experiment.classifier)
    network = read_network(source, network_class(type(method)))
    held_out = None
    if isinstance(method, PostHoc):
        method.fit(
            Known(
                Head.of(network.head),
                id_representation(workspace, "train", experiment),
                wild_representation(workspace, experiment) if method.needs_wild else None,
                experiment.seed,
                compute.device,
                task.note if name not in params.evaluate.methods else Silent().note,  # `evaluate` has noted it
                network.as_given,
                id_representation(workspace, "calibration", experiment) if method.needs_calibration else None,
            )
        )
        held_out = method.held_out_scores()
    elif isinstance(method, Trained):
        training = id_samples(workspace, params, "train", experiment).rows

        def over_training_data(outputs: Callable[[Tensor], Tensor]) -> Tensor:
            return outputs_of(network, outputs, training, BATCH_SIZE, compute, task)[0]

        method.fit(network, over_training_data)
    method.compact(experiment.seed)
    try:
        method.state()
    except TypeError as error:
        raise ParamsError(f"{name} cannot be a detector, because what it fits cannot be stored: {error}") from None
    return _Fitted(name, method, network, source, held_out)


def _calibrated(
    fitted: _Fitted, workspace: Workspace, params: Params, experiment: Experiment, reason: str, progress: Progress
) -> Detector:
    held_out = id_samples(workspace, params, "calibration", experiment)
    if len(held_out) == 0:
        reason += " No ID data are held out (data.id_shares.calibration is 0), so it scores samples and flags none."
    network, method = fitted.network.to(resolve_device(params.device)).eval(), fitted.method
    if params.detector.float16:
        round_to_float16(network.backbone)
    if fitted.held_out is not None:
        scores = fitted.held_out.float().numpy()
    else:
        with progress.task(f"detector, {experiment}", len(held_out), "samples") as task:
            scores = _scores(network, method, held_out.rows, task)
    if not np.isfinite(scores).all():
        raise MetricsError(
            f"not all calibration scores of {fitted.name} are finite, so no threshold is defined; "
            "train its network again with a smaller learning rate, or use another method"
        )
    classifier, embedder = workspace.find(experiment.classifier), embedder_for(params, workspace)
    prepared = workspace.find(prepared_set(params.data.id))
    return Detector(
        network,
        _format(held_out.rows, prepared, embedder, params.data.columns.named),
        held_out.class_names,
        np.sort(scores),
        provenance={
            "salcli": __version__,
            "id": params.data.id,
            **{key: value for key, value in asdict(experiment).items() if key != "variant"},
            "made_from": {
                "network": fingerprint(fitted.source.path),
                "classifier": fingerprint(classifier.path),
                "split": fingerprint(workspace.find(experiment.split).path),
            },
            "network": read_header(fitted.source).about,
            "classifier": read_header(classifier).about,
        },
        method=method,
        name=fitted.name,
        reason=reason,
        embedder=embedder,
        float16=params.detector.float16,
        device=params.device,
    )


def _scores(network: Classifier, method: Method, rows: Rows, task: Task) -> NDArray[np.float32]:
    parts = []
    for start in range(0, len(rows), BATCH_SIZE):
        parts.append(score_samples(network, method, rows.read(slice(start, start + BATCH_SIZE))).score)
        task.advance(len(parts[-1]))
    return np.concatenate([np.empty(0, np.float32), *parts])


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
        return ImageFormat(about["channels"], wanted.resize, about["fit"], wanted.interpolation, wanted.crop)
    if len(rows.sample_shape) == 1:
        return VectorFormat(rows.sample_shape[0], columns)
    channels, size, _ = rows.sample_shape
    return ImageFormat(channels, size, about["fit"])
