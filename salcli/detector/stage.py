"""The stage that makes a detector: any method with its network, calibrated on held-out ID data, in one file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from salcli import __version__
from salcli.data.vectors import Columns
from salcli.detector.detector import BATCH_SIZE, Detector, network_class, round_to_float16, score_samples
from salcli.detector.images import ImageFormat
from salcli.detector.vectors import VectorFormat
from salcli.engine.batches import Rows
from salcli.engine.device import Compute, computing, resolve_device
from salcli.engine.inference import outputs_of
from salcli.errors import BadArtifactError, MissingArtifactError, ParamsError, SalError, UnknownNameError
from salcli.methods.base import IdTrained, Known, Method, PostHoc, Trained, built_in
from salcli.methods.sal import COMMITTEE, SAL_PLUS, variant_label
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
    names, reason, what = [params.detector.method], "", f"detector, {experiment}"
    if names == [AUTO]:
        names, reason = _by_estimates(workspace, params, experiment)
    with (
        computing(params.device, params.numerics) as compute,
        (progress or Silent()).task(what, 0, "samples") as task,
    ):
        for name in names:
            try:
                method, network, source, left_out = _fitted(name, workspace, params, experiment, compute, task)
                break
            except (ParamsError, MissingArtifactError, UnknownNameError) as error:
                if name == names[-1]:
                    raise
                label = _label(name, params)
                reason += f" {label} cannot be the detector here ({error}), so the next best is."
    held_out = id_samples(workspace, params, "calibration", experiment)
    network = network.to(resolve_device(params.device)).eval()
    if params.detector.float16:
        round_to_float16(network.backbone)
    scores = [np.empty(0, np.float32)] if left_out is None else [left_out.float().numpy()]
    n_left = len(held_out) if left_out is None else 0
    with (progress or Silent()).task(what, n_left, "samples") as task:
        for start in range(0, n_left, BATCH_SIZE):
            rows = held_out.rows.read(slice(start, start + BATCH_SIZE))
            scores.append(score_samples(network, method, rows).score)
            task.advance(len(rows))
    calibration = np.sort(np.concatenate(scores))
    if not np.isfinite(calibration).all():
        raise SalError(
            f"not all calibration scores of {name} are finite, so no threshold is defined; "
            "train its network again with a smaller learning rate, or use another method"
        )
    classifier, embedder = workspace.find(experiment.classifier), embedder_for(params, workspace)
    detector = Detector(
        network,
        _format(held_out.rows, workspace.find(prepared_set(params.data.id)), embedder, params.data.columns.named),
        held_out.class_names,
        calibration,
        provenance={
            "salcli": __version__,
            "id": params.data.id,
            **{key: value for key, value in asdict(experiment).items() if key != "variant"},
            "made_from": {
                "network": fingerprint(source.path),
                "classifier": fingerprint(classifier.path),
                "split": fingerprint(workspace.find(experiment.split).path),
            },
            "network": read_header(source).about,
            "classifier": read_header(classifier).about,
        },
        method=method,
        name=name,
        reason=reason,
        embedder=embedder,
        float16=params.detector.float16,
        device=params.device,
    )
    path = out or workspace.target(experiment.detector)
    detector.save(path)
    return MadeDetector(
        experiment,
        detector.label,
        " ".join(filter(None, (reason, detector.too_few))),
        len(detector.class_names),
        len(calibration),
        detector.threshold,
        [path],
    )


def _label(name: str, params: Params) -> str:
    """What tables call a method; a custom one by its name."""
    found = built_in().get(name)
    return variant_label(name) if name in params.variants else found.label if found else name


def _by_estimates(workspace: Workspace, params: Params, experiment: Experiment) -> tuple[list[str], str]:
    """The methods by what `evaluate` estimated of them without labels, the chosen one first, and why it is.

    Where no outliers are certified, candidates may all be ID data, so a network that was trained on them is not used.
    """
    with reading_json(workspace.find(experiment.estimates)) as content:
        by_auroc = {name: float(one["auroc"]["value"]) for name, one in content["methods"].items()}
        ranked = sorted(by_auroc, key=lambda name: -by_auroc[name])
        chosen, reason = str(content["chosen"]), str(content["reason"])
        has_outliers = content["pi"]["low"] != 0  # None without held-out ID data to tell
    first = [chosen]
    if chosen in params.variants and not has_outliers:
        first = [SAL_PLUS, COMMITTEE, chosen]
        label = _label(chosen, params)
        reason += (
            f". No outliers are certified in the wild data, so the candidates that {label} was trained on may be ID "
            f"data; {_label(SAL_PLUS, params)} needs none."
        )
    return list(dict.fromkeys([*first, *ranked])), reason


def _fitted(
    name: str, workspace: Workspace, params: Params, experiment: Experiment, compute: Compute, task: Task
) -> tuple[Method, Classifier, Found, Tensor | None]:
    """A method as `evaluate` fits it, its network and where that is, and scores of the calibration data by models that
    left them out, where it has learned from them. A SalError says why it cannot be a detector."""
    method = params.method(name)
    if isinstance(method, IdTrained) and method.images == "all":
        raise ParamsError(f"{name} was trained on the calibration data, too, so it cannot be a detector")
    trained = experiment.encoder(name) if isinstance(method, IdTrained) else experiment.network(name)
    source = workspace.find(trained if isinstance(method, Trained) else experiment.classifier)
    network, left_out = read_network(source, network_class(type(method))), None
    if isinstance(method, PostHoc):
        calibration = id_representation(workspace, "calibration", experiment) if method.needs_calibration else None
        method.fit(
            Known.of(
                network,
                id_representation(workspace, "train", experiment),
                wild=wild_representation(workspace, experiment) if method.needs_wild else None,
                calibration=calibration,
                seed=experiment.seed,
                device=compute.device,
                note=task.note if name not in params.evaluate.methods else Silent().note,  # `evaluate` has noted it
            )
        )
        if (pair := method.held_out_scores()) is not None:
            left_out = pair[0]
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
    return method, network, source, left_out


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
