"""evaluate: score test and held-out wild data with every method; the metrics, and their estimates without labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salcli.conformal.evidence import Share, share_of_outliers
from salcli.conformal.resampling import Estimates, estimated
from salcli.engine.batches import LabeledRows, Rows
from salcli.engine.device import Compute, computing, processes
from salcli.engine.inference import Outputs, outputs_of
from salcli.errors import BadArtifactError
from salcli.methods.base import ALL_ID, IdTrained, InputScore, Known, PostHoc, Trained, of_all_id
from salcli.methods.sal import COMMITTEE, protocol, variant_label
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
from salcli.sal.gradients import Representation
from salcli.sal.metrics import OodMetrics, ood_metrics, roc_points
from salcli.sal.seeding import generator
from salcli.store.files import read_header, write_arrays, write_csv, write_json
from salcli.store.formats import RepresentationFile, read_network
from salcli.store.layout import TEST_SCORES, Experiment, Workspace

N_BINS = 60
ON_ALL = " (all ID data)"
NO_METRICS = dict.fromkeys(one.name for one in fields(OodMetrics))


@dataclass(frozen=True)
class TestScores:
    """One method's outlier scores and the accuracy of the network they come from."""

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
    id_test = id_samples(workspace, params, "test", experiment)
    ood_test = ood_test_samples(workspace, params, experiment, unseen)
    held_out: list[Rows] = []  # calibration and wild samples
    if not unseen and len(wild := wild_holdout_samples(workspace, params, experiment)):
        held_out = [id_samples(workspace, params, "calibration", experiment).rows, wild]
    methods = {name: params.method(name) for name in params.evaluate.methods}
    what = f"evaluate, {experiment}" + (f", tested on {unseen}" if unseen else "")
    n_passes = sum(not isinstance(own, PostHoc) for own in methods.values()) + any(map(of_all_id, methods))
    total = n_passes * sum(len(rows) for rows in (id_test.rows, ood_test, *held_out))
    with (
        computing(params.device, params.numerics) as compute,
        (progress or Silent()).task(what, total, "samples") as task,
    ):
        bench = _Bench(workspace, params, experiment, unseen, id_test, [ood_test, *held_out], compute, task)
        scores = {name: bench.score(name, own) for name, own in methods.items()}
        share = None if unseen else bench.share_of_outliers()
    has_ood = len(ood_test) > 0
    files = ["scores.h5", "metrics.json", "roc.csv", "histogram.csv", *(["estimates.json"] if not unseen else [])]
    result = Evaluated(
        experiment=experiment,
        test_set=unseen or experiment.ood,
        scores=scores,
        metrics={name: ood_metrics(own.id, own.ood) if has_ood else None for name, own in scores.items()},
        estimates=None if unseen else _estimates(params, experiment, scores, share),
        written=[workspace.target(experiment.evaluation(file, unseen)) for file in files],
    )
    if processes().is_main:
        _write(
            result, {"ood": experiment.ood, "test_set": result.test_set, "seed": experiment.seed, "pi": experiment.pi}
        )
    processes().wait()  # every process reads metrics.json next
    return result


def _estimates(params: Params, experiment: Experiment, scores: dict[str, TestScores], share: Share | None) -> Estimates:
    """Without the truth, of all methods that have not been trained on the calibration data."""
    methods = {name: params.method(name) for name in scores if not of_all_id(name)}
    kept = [name for name, own in methods.items() if getattr(own, "images", "train") == "train"]
    pairs = {name: (scores[name].calibration, scores[name].wild) for name in kept}
    incumbent = params.incumbent
    labels = {incumbent: incumbent, **{name: scores[name].label for name in kept}}
    return estimated(pairs, share, incumbent, labels, generator(experiment.seed, f"estimates/{experiment.ood}"))


@dataclass(frozen=True)
class _Bench:
    """The data that methods are compared on: the ID test set, OOD test data, held-out ID and held-out wild data."""

    workspace: Workspace
    params: Params
    experiment: Experiment
    unseen: str
    id_test: LabeledRows
    others: list[Rows]
    compute: Compute
    task: Task
    notes: list[str] = field(default_factory=list)

    def score(self, name: str, method: PostHoc | InputScore | Trained) -> TestScores:
        """By one method, with the notes that were made meanwhile."""
        self.notes.clear()
        found = self._by_network(name, method) if isinstance(method, Trained) else self._post_hoc(name, method)
        return replace(found, notes=tuple(self.notes))

    def _post_hoc(self, name: str, method: PostHoc | InputScore) -> TestScores:
        """From features and logits of the ID classifier, or of the network that was trained on all ID data."""
        network, known, tested = self._on_all_id if of_all_id(name) else self._on_classifier
        label = method.label + (ON_ALL if of_all_id(name) else "")
        if isinstance(method, InputScore):
            return self._split(label, method.score(self._over(network, method.outputs(network))[0]), tested.logits)
        found = self._split(label, known.scores(method, tested)[0], tested.logits)
        # what it has learned from would look more ID-like than new ID data
        left_out = known.fitted(method).held_out_scores() if len(found.wild) else None
        return found if left_out is None else replace(found, calibration=left_out[0].numpy())

    def _by_network(self, name: str, method: Trained) -> TestScores:
        """From a pass of the method's own network."""
        is_encoder = isinstance(method, IdTrained)
        found = self.workspace.find(self.experiment.encoder(name) if is_encoder else self.experiment.network(name))
        network = read_network(found, method.network)
        seen: IdPart = method.images if isinstance(method, IdTrained) else "train"
        method.fit(network, lambda outputs: self._over_training(network, outputs, seen)[0])
        outputs = self._over(network, method.outputs(network))
        score = method.score(network.cpu(), outputs)
        try:
            trained_with = method.Params.model_validate(read_header(found).about["params"])
        except ValueError:  # a key that this version has and that one had not
            raise BadArtifactError(f"{found.path} was trained by another version of salcli; {found.fix}") from None
        is_sal = name in self.params.variants
        scores = self._split(
            variant_label(name) if is_sal else method.label + (ON_ALL if seen == "all" else ""),
            score,
            method.class_logits(outputs),
        )
        return replace(
            scores,
            has_short_schedule=type(method)(trained_with).is_short(),
            protocol=protocol(self.params.for_variant(name).filter) if is_sal else "",
        )

    @cached_property
    def _on_classifier(self) -> tuple[Classifier, Known, Representation]:
        """One for all post-hoc methods: each is fitted once, and so is what others are made of."""
        own, find = self.experiment, self.workspace.find
        network = classifier(self.workspace, own)
        artifacts = [own.id_representation("test"), own.test_representation(self.unseen)]
        if len(self.others) > 1:
            artifacts += [own.id_representation("calibration"), own.wild_holdout_representation]
        parts = [vars(RepresentationFile.open(find(one)).whole()).values() for one in artifacts]
        tested = Representation(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
        known = Known.of(
            network,
            id_representation(self.workspace, "train", own),
            wild=wild_representation(self.workspace, own),
            calibration=id_representation(self.workspace, "calibration", own),
            **self._how,
        )
        return network, known, tested

    @cached_property
    def _on_all_id(self) -> tuple[Classifier, Known, Representation]:
        """Of the network that was trained on all ID data but the test's. Nothing is held out of it."""
        network = read_network(self.workspace.find(self.experiment.encoder(ALL_ID)), Classifier)
        feature, logits = self._over_training(network, network.features_and_logits, "all")
        labels = id_samples(self.workspace, self.params, "all", self.experiment).labels
        known = Known.of(network, Representation(feature, logits, labels), **self._how)
        feature, logits = self._over(network, network.features_and_logits)
        return network, known, Representation(feature, logits, logits.argmax(1))

    @property
    def _how(self) -> dict[str, Any]:
        return {"seed": self.experiment.seed, "device": self.compute.device, "note": self.notes.append}

    def share_of_outliers(self) -> Share | None:
        """π̂ by the committee, on the calibration data and the wild data that the filter sees."""
        _, known, _ = self._on_classifier
        assert known.calibration is not None
        assert known.wild is not None
        if not len(known.calibration):
            return None
        calibration, wild = known.scores(self.params.method(COMMITTEE), known.calibration, known.wild)
        return share_of_outliers(calibration.numpy(), wild.numpy())

    def _over(self, network: Classifier, outputs: Callable[[Tensor], Outputs]) -> list[Tensor]:
        """Outputs of a network on all data, in order."""
        rows = [rows for rows in (self.id_test.rows, *self.others) if len(rows)]
        size = self.params.evaluate.batch_size
        passes = [outputs_of(network, outputs, some, size, self.compute, self.task) for some in rows]
        return [torch.cat(parts) for parts in zip(*passes, strict=True)]

    def _over_training(self, network: Classifier, outputs: Callable[[Tensor], Outputs], part: IdPart) -> list[Tensor]:
        rows = id_samples(self.workspace, self.params, part, self.experiment).rows
        return outputs_of(network, outputs, rows, self.params.evaluate.batch_size, self.compute)

    def _split(self, label: str, score: Tensor, logits: Tensor) -> TestScores:
        n_id = len(self.id_test)
        accuracy = (logits[:n_id].argmax(1) == self.id_test.labels).double().mean()
        sizes = [n_id, *map(len, self.others), 0, 0][:4]
        id_test, ood, calibration, wild, _ = np.split(score.numpy(), np.cumsum(sizes))
        return TestScores(label, id_test, ood, calibration, wild, float(accuracy))


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
    bars = [row for name, own in result.scores.items() for row in _histogram_rows(name, own)]
    write_csv(histogram, bars, fieldnames=("method", "data", "score", "share"))


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
