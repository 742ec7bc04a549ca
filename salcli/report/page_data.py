"""All that a report says about one experiment, read from its files. What does not exist is None, or left out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from salcli.errors import BadArtifactError
from salcli.sal.metrics import ID_QUANTILE, roc_points, threshold_that_keeps
from salcli.store.files import read_arrays, reading_json
from salcli.store.formats import Candidates, read_candidates, read_samples
from salcli.store.layout import TEST_SCORES, Artifact, Experiment, Workspace, prepared_set

if TYPE_CHECKING:
    from salcli.params.schema import Params


@dataclass(frozen=True)
class MethodScores:
    """One method's scores of the test data, higher = more ID-like. `ood` is empty where there is no OOD test data."""

    method: str
    label: str
    id: np.ndarray
    ood: np.ndarray
    metrics: dict[str, Any]  # its row of metrics.json, between 0 and 1

    @property
    def threshold(self) -> float:
        """The highest score that keeps at least 95% of the ID test data."""
        return threshold_that_keeps(self.id, ID_QUANTILE)

    @property
    def roc(self) -> tuple[np.ndarray, np.ndarray] | None:
        """FPR and TPR."""
        return roc_points(self.id, self.ood) if len(self.ood) else None


@dataclass(frozen=True)
class Evaluation:
    """Every method on one test set, the best first. `unseen` is empty for the OOD set of the wild data."""

    test_set: str
    unseen: str
    methods: list[MethodScores]
    main: MethodScores  # the variant of SAL that the report is about, or the best method if it was not evaluated

    @property
    def has_ood(self) -> bool:
        return any(len(method.ood) for method in self.methods)


@dataclass(frozen=True)
class Findings:
    experiment: Experiment
    class_names: tuple[str, ...]
    candidates: Candidates
    filter: dict[str, Any]  # of filter.json
    evaluation: Evaluation | None
    curves: dict[str, pd.DataFrame]  # training, by network
    theory: dict[str, Any] | None  # of theory.json
    estimates: dict[str, Any] | None = None  # of estimates.json: what held-out wild data tell without labels

    def label(self, network: str) -> str:
        """What tables call the network of a method."""
        labels = {one.method: one.label for one in self.evaluation.methods} if self.evaluation else {}
        return {"classifier": "ID classifier", **labels}.get(network, network)


def read_findings(workspace: Workspace, params: Params, experiment: Experiment, unseen: str = "") -> Findings:
    """The candidates have to exist, all else may be missing."""
    return Findings(
        experiment=experiment,
        candidates=read_candidates(workspace.find(experiment.candidates)),
        class_names=read_samples(workspace.find(prepared_set(params.data.id))).class_names,
        filter=_json(workspace, experiment.filter_metrics) or {},
        evaluation=_evaluation(workspace, params, experiment, unseen),
        curves=_curves(workspace, params, experiment),
        theory=_json(workspace, experiment.theory("json")),
        estimates=_json(workspace, experiment.estimates),
    )


def _json(workspace: Workspace, artifact: Artifact) -> dict[str, Any] | None:
    if not workspace.has(artifact):
        return None
    with reading_json(workspace.find(artifact)) as content:
        return dict(content.items())


def _evaluation(workspace: Workspace, params: Params, experiment: Experiment, unseen: str) -> Evaluation | None:
    """On the asked-for test set; otherwise on the first that has OOD samples, or on the first that exists."""
    names = [unseen] if unseen else ["", *params.data.test_ood]
    there = [name for name in names if unseen or workspace.has(experiment.evaluation("scores.h5", name))]
    found = [_read_evaluation(workspace, experiment, name) for name in there]
    return next((one for one in found if one.has_ood), found[0] if found else None)


def _read_evaluation(workspace: Workspace, experiment: Experiment, unseen: str) -> Evaluation:
    found = workspace.find(experiment.evaluation("scores.h5", unseen))
    metrics = _json(workspace, experiment.evaluation("metrics.json", unseen)) or {}
    arrays = read_arrays(found, TEST_SCORES)
    methods = []
    for path, scores in arrays.items():
        name, _, side = path.rpartition("/")
        if side == "id":
            own = metrics.get(name, {})
            ood = arrays.get(f"{name}/ood", np.empty(0))
            methods.append(MethodScores(name, str(own.get("label", name)), scores, ood, own))
    if not methods:
        raise BadArtifactError(f"{found.path} holds no scores; {found.fix}")

    def rank(one: MethodScores) -> tuple[float, bool, str]:
        fpr95 = one.metrics.get("fpr95")
        return math.inf if fpr95 is None else fpr95, one.method != experiment.variant, one.method

    methods.sort(key=rank)
    main = next((one for one in methods if one.method == experiment.variant), methods[0])
    return Evaluation(unseen or experiment.ood, unseen, methods, main)


def _curves(workspace: Workspace, params: Params, experiment: Experiment) -> dict[str, pd.DataFrame]:
    """Training curves in the order of the pipeline."""
    artifacts = {"classifier": experiment.train_id("csv")}
    artifacts |= {name: experiment.curve(name) for name in (experiment.variant, *params.rivals)}
    artifacts |= {name: experiment.encoder_curve(name) for name in params.encoders}
    found = {name: workspace.find(artifact) for name, artifact in artifacts.items() if workspace.has(artifact)}
    curves = {}
    for name, one in found.items():
        try:
            curve = pd.read_csv(one.path) if one.path.stat().st_size else pd.DataFrame()
        except (ValueError, OSError) as error:
            raise one.damaged(error) from None
        if {"epoch", "loss"} <= {*curve.columns} and len(curve):
            curves[name] = curve
    return curves
