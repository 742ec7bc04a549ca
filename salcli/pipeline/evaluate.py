"""evaluate: score test and held-out wild data with every method; the metrics, and their estimates without labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salcli.engine.batches import LabeledRows, Rows
from salcli.engine.device import Compute, computing, processes
from salcli.engine.inference import Outputs, outputs_of
from salcli.errors import BadArtifactError
from salcli.methods.base import ALL_ID, Head, IdTrained, InputScore, Known, Method, PostHoc, Trained, of_all_id
from salcli.methods.sal import LEARNED, protocol, variant_label
from salcli.models.backbones import AUTO
from salcli.models.network import Classifier
from salcli.params.schema import Params
from salcli.pipeline.loading import (
    IdPart,
    classifier,
    id_representation,
    id_samples,
    ood_test_samples,
    wild_holdout_samples,
    wild_representation,
)
from salcli.progress import Progress, Silent, Task
from salcli.sal.estimates import Estimates, estimated
from salcli.sal.gradients import Representation
from salcli.sal.metrics import OodMetrics, ood_metrics, roc_points
from salcli.sal.seeding import generator
from salcli.store.files import read_header, write_arrays, write_csv, write_json
from salcli.store.formats import RepresentationFile, read_network
from salcli.store.layout import SAL, TEST_SCORES, Experiment, Workspace

N_BINS = 60
ON_ALL = " (all ID data)"
NO_METRICS = dict.fromkeys(one.name for one in fields(OodMetrics))


@dataclass(frozen=True)
class TestScores:
    """One method's scores (higher = more ID-like) and the accuracy of the network they come from."""

    label: str
    id: np.ndarray
    ood: np.ndarray
    calibration: np.ndarray  # held-out ID and held-out wild data, for the estimates; both may be empty
    wild: np.ndarray
    id_accuracy: float
    has_short_schedule: bool = False  # trained for fewer epochs than its authors train
    protocol: str = ""  # of a variant of SAL: whose threshold it has
    notes: tuple[str, ...] = ()  # what its fit had to say


@dataclass(frozen=True)
class Evaluated:
    """Every method on one OOD test set. The test set may be another one than the OOD set in the wild data."""

    experiment: Experiment
    test_set: str
    scores: dict[str, TestScores]
    metrics: dict[str, OodMetrics | None]  # None without OOD test data
    estimates: Estimates | None  # None on an unseen set: the wild data do not speak about it
    written: list[Path]

    @property
    def n_id_test(self) -> int:
        return len(next(iter(self.scores.values())).id)

    @property
    def n_ood_test(self) -> int:
        return len(next(iter(self.scores.values())).ood)

    def content(self) -> dict[str, Any]:
        """The content of metrics.json."""
        rows: dict[str, dict[str, Any]] = {}
        for method, own in self.scores.items():
            metrics = self.metrics[method]
            remarks = {"protocol": own.protocol, "short_schedule": own.has_short_schedule, "notes": own.notes}
            rows[method] = {
                "label": own.label,
                **(asdict(metrics) if metrics else NO_METRICS),
                "id_accuracy": own.id_accuracy,
                **{key: value for key, value in remarks.items() if value},
            }
        return {**rows, "samples": {"id_test": self.n_id_test, "ood_test": self.n_ood_test}}


def run(
    workspace: Workspace,
    params: Params,
    experiment: Experiment,
    progress: Progress | None = None,
    *,
    unseen: str = "",
) -> Evaluated:
    """All methods of params.yaml on the OOD set of the wild data, or on an unseen set."""
    test_set = unseen or experiment.ood
    id_test = id_samples(workspace, params, "test", experiment)
    ood_test = ood_test_samples(workspace, params, experiment, unseen)
    held_out: list[Rows] = []  # calibration and wild samples
    if not unseen and len(wild := wild_holdout_samples(workspace, params, experiment)):
        held_out = [id_samples(workspace, params, "calibration", experiment).rows, wild]
    what = f"evaluate, {experiment}" + (f", tested on {unseen}" if unseen else "")
    methods = {name: params.method(name) for name in params.evaluate.methods}
    n_passes = sum(not isinstance(own, PostHoc) for own in methods.values()) + any(map(of_all_id, methods))
    total = n_passes * sum(len(rows) for rows in (id_test.rows, ood_test, *held_out))
    with (
        computing(params.device, params.numerics) as compute,
        (progress or Silent()).task(what, total, "samples") as task,
    ):
        given = workspace, params, experiment, methods, unseen, id_test, ood_test
        scorer, on_all = _Scorer(*given, held_out, compute, task), _OnAllId(*given, [], compute, task)
        scores = {name: (on_all if of_all_id(name) else scorer).noted(name, own) for name, own in methods.items()}
    has_ood = len(ood_test) > 0
    files = ["scores.h5", "metrics.json", "roc.csv", "histogram.csv", *(["estimates.json"] if not unseen else [])]
    result = Evaluated(
        experiment=experiment,
        test_set=test_set,
        scores=scores,
        metrics={name: ood_metrics(own.id, own.ood) if has_ood else None for name, own in scores.items()},
        estimates=None if unseen else _estimates(params, experiment, scores),
        written=[workspace.target(experiment.evaluation(file, unseen)) for file in files],
    )
    if processes().is_main:
        _write(result, {"ood": experiment.ood, "test_set": test_set, "seed": experiment.seed, "pi": experiment.pi})
    processes().wait()  # every process reads metrics.json next
    return result


def _estimates(params: Params, experiment: Experiment, scores: dict[str, TestScores]) -> Estimates:
    """Without the truth. The first variant stays the detector unless another method is surely better than SAL.

    What was fitted to tell calibration from wild data takes calibration samples for more ID-like than new ones (the
    separator by 0.11 and 0.24 in AUC, measured on embeddings), also a variant whose candidates it chose: its ID samples
    are the test's.
    """
    rng = generator(experiment.seed, f"estimates/{experiment.ood}")
    methods = {name: params.method(name) for name in scores if not of_all_id(name)}
    methods = {name: own for name, own in methods.items() if getattr(own, "images", "train") == "train"}
    fitted = {
        name for name, own in methods.items() if isinstance(own, PostHoc) and own.needs_wild and own.needs_calibration
    } | {name for name in params.variants if params.for_variant(name).filter.score in (AUTO, LEARNED)}
    pairs = {
        name: (scores[name].id if name in fitted else scores[name].calibration, scores[name].wild) for name in methods
    }
    labels, plain = {name: scores[name].label for name in pairs}, SAL if SAL in params.variants else None
    return estimated(pairs, rng, params.incumbent, labels=labels, baseline=plain)


@dataclass(frozen=True)
class _Scorer:
    """The test data, and everything that methods score them with."""

    workspace: Workspace
    params: Params
    experiment: Experiment
    methods: Mapping[str, Method]
    unseen: str
    id_test: LabeledRows
    ood_test: Rows
    held_out: list[Rows]
    compute: Compute
    task: Task
    notes: list[str] = field(default_factory=list)

    def noted(self, name: str, method: PostHoc | InputScore | Trained) -> TestScores:
        """Scores, with the notes that were made meanwhile."""
        self.notes.clear()
        return replace(self.score(name, method), notes=tuple(self.notes))

    def score(self, name: str, method: PostHoc | InputScore | Trained) -> TestScores:
        if isinstance(method, PostHoc):
            return self._post_hoc(method)
        if isinstance(method, InputScore):
            outputs = self._over_test(self.classifier, method.outputs(self.classifier))
            return self._split(method.label, method.score(outputs[0]), self.representation.logits)
        return self._trained(name, method)

    def _post_hoc(self, method: PostHoc) -> TestScores:
        """From stored features and logits. All data are scored together."""
        scores, fitted = self.known.scores(method, self.representation), self.known.fitted(method)
        found = self._split(method.label, scores, self.representation.logits)
        unseen = fitted.held_out_scores()  # what it has learned from would look more ID-like than new ID data
        return found if unseen is None or not self.held_out else replace(found, calibration=unseen.numpy())

    def _trained(self, name: str, method: Trained) -> TestScores:
        """From a pass of the method's own network."""
        is_encoder = isinstance(method, IdTrained)
        artifact = self.experiment.encoder(name) if is_encoder else self.experiment.network(name)
        found = self.workspace.find(artifact)
        network = read_network(found, method.network)
        seen: IdPart = method.images if isinstance(method, IdTrained) else "train"
        method.fit(network, lambda outputs: self._over_training(network, outputs, seen))
        outputs = self._over_test(network, method.outputs(network))
        score = method.score(network.cpu(), outputs)
        is_sal = name in self.params.variants
        label = variant_label(name) if is_sal else method.label + (ON_ALL if seen == "all" else "")
        try:
            trained_with = method.Params.model_validate(read_header(found).about["params"])
        except ValueError:  # a key that this version has and that one had not
            raise BadArtifactError(f"{found.path} was trained by another version of salcli; {found.fix}") from None
        is_short = type(method)(trained_with).is_short()
        scores = self._split(label, score, method.class_logits(outputs), is_short)
        return replace(scores, protocol=protocol(self.params.for_variant(name).filter)) if is_sal else scores

    @cached_property
    def classifier(self) -> Classifier:
        return classifier(self.workspace, self.experiment)

    @cached_property
    def known(self) -> Known:
        """One for all post-hoc methods: each is fitted once, and so is what others are made of."""
        workspace, experiment = self.workspace, self.experiment
        asked = [own for own in self.methods.values() if isinstance(own, PostHoc)]
        needs_wild = any(own.needs_wild for own in asked)
        needs_calibration = any(own.needs_calibration for own in asked)
        return Known(
            Head.of(self.classifier.head),
            id_representation(workspace, "train", experiment),
            wild_representation(workspace, experiment) if needs_wild else None,
            experiment.seed,
            self.compute.device,
            self.notes.append,
            self.classifier.as_given,
            id_representation(workspace, "calibration", experiment) if needs_calibration else None,
            self.representation,
        )

    @cached_property
    def representation(self) -> Representation:
        """Of the ID test set, then of the OOD test set, then of held-out calibration and wild data."""
        own = self.experiment
        artifacts = [own.id_representation("test"), own.test_representation(self.unseen)]
        if self.held_out:
            artifacts += [own.id_representation("calibration"), own.wild_holdout_representation]
        parts = [vars(RepresentationFile.open(self.workspace.find(one)).whole()).values() for one in artifacts]
        return Representation(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

    def _over_test(self, network: Classifier, outputs: Callable[[Tensor], Outputs]) -> list[Tensor]:
        """Outputs of a network on the ID test set, then on the OOD test set, then on held-out data."""
        rows = [rows for rows in (self.id_test.rows, self.ood_test, *self.held_out) if len(rows)]
        size = self.params.evaluate.batch_size
        passes = [outputs_of(network, outputs, some, size, self.compute, self.task) for some in rows]
        return [torch.cat(parts) for parts in zip(*passes, strict=True)]

    def _over_training(self, network: Classifier, outputs: Callable[[Tensor], Tensor], part: IdPart) -> Tensor:
        rows = id_samples(self.workspace, self.params, part, self.experiment).rows
        return outputs_of(network, outputs, rows, self.params.evaluate.batch_size, self.compute)[0]

    def _split(self, label: str, score: Tensor, logits: Tensor, is_short: bool = False) -> TestScores:
        n_id = len(self.id_test)
        accuracy = (logits[:n_id].argmax(1) == self.id_test.labels).double().mean()
        ends = np.cumsum([n_id, len(self.ood_test), *(map(len, self.held_out) if self.held_out else (0, 0))])
        id_test, ood, calibration, wild, _ = np.split(score.numpy(), ends)
        return TestScores(label, id_test, ood, calibration, wild, float(accuracy), is_short)


class _OnAllId(_Scorer):
    """Post-hoc scores of the network that was trained on all ID data but the test's. Nothing is held out of it."""

    def score(self, name: str, method: PostHoc | InputScore | Trained) -> TestScores:
        found = super().score(name, method)
        return found if isinstance(method, Trained) else replace(found, label=found.label + ON_ALL)

    @cached_property
    def classifier(self) -> Classifier:
        return read_network(self.workspace.find(self.experiment.encoder(ALL_ID)), Classifier)

    @cached_property
    def known(self) -> Known:
        network, samples = self.classifier, id_samples(self.workspace, self.params, "all", self.experiment)
        size, outputs = self.params.evaluate.batch_size, network.features_and_logits
        feature, logits = outputs_of(network, outputs, samples.rows, size, self.compute)
        id_train = Representation(feature, logits, samples.labels)
        seed, device, note = self.experiment.seed, self.compute.device, self.notes.append
        return Known(Head.of(network.head), id_train, None, seed, device, note, network.as_given)

    @cached_property
    def representation(self) -> Representation:
        feature, logits = self._over_test(self.classifier, self.classifier.features_and_logits)
        return Representation(feature, logits, logits.argmax(1))


def _write(result: Evaluated, about: dict[str, Any]) -> None:
    has_holdout = any(len(own.wild) for own in result.scores.values())
    sides = ("id", "ood", "calibration", "wild") if has_holdout else ("id", "ood")
    arrays = {f"{name}/{side}": getattr(own, side) for name, own in result.scores.items() for side in sides}
    scores, metrics, roc, histogram, *estimates = result.written
    write_arrays(scores, TEST_SCORES, arrays, about)
    write_json(metrics, result.content())
    if result.estimates is not None:
        write_json(estimates[0], asdict(result.estimates))
    curves = [
        {"method": name, "fpr": float(x), "tpr": float(y)}
        for name, own in result.scores.items()
        if len(own.ood)
        for x, y in zip(*roc_points(own.id, own.ood), strict=True)
    ]
    write_csv(roc, curves, fieldnames=("method", "fpr", "tpr"))
    write_csv(histogram, [row for name, own in result.scores.items() for row in _histogram_rows(name, own)])


def _histogram_rows(method: str, scores: TestScores) -> list[dict[str, Any]]:
    """Shares of each set in bins that cover all finite scores of both."""
    both = np.concatenate([scores.id, scores.ood])
    edges = np.histogram_bin_edges(both[np.isfinite(both)], bins=N_BINS)
    middles = (edges[:-1] + edges[1:]) / 2
    rows = []
    for side, values in (("ID test", scores.id), ("OOD test", scores.ood)):
        if len(values) == 0:
            continue
        shares = np.histogram(values, bins=edges)[0] / len(values)
        rows += [
            {"method": method, "data": side, "score": float(middle), "share": float(share)}
            for middle, share in zip(middles, shares, strict=True)
        ]
    return rows
