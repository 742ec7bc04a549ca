"""All that a report says about one experiment, read from its files. What is not there is None, or left out."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from salcli.artifacts import layout
from salcli.artifacts.candidates import Candidates, read_candidates
from salcli.artifacts.fingerprint import check_made_with
from salcli.artifacts.hdf5 import reading
from salcli.artifacts.images import read_image_set
from salcli.errors import BadArtifactError
from salcli.metrics import roc_points
from salcli.stages.evaluate import SCORES_KIND
from salcli.stages.inputs import mixture_of

if TYPE_CHECKING:
    from salcli.artifacts.layout import Artifact, Workspace
    from salcli.params import Params

KEPT = 0.95  # of ID data, by the threshold of FPR95


@dataclass(frozen=True)
class MethodScores:
    """One method's scores of the test data, higher = more ID-like. `ood` is empty where there is no OOD test set."""

    method: str
    id: np.ndarray
    ood: np.ndarray
    figures: dict[str, float | None]  # of metrics.json, between 0 and 1

    @property
    def threshold(self) -> float:
        """The highest score that keeps at least 95% of the ID test data."""
        n_kept = max(1, math.ceil(KEPT * len(self.id) - 1e-9))
        return float(np.sort(self.id)[len(self.id) - n_kept])

    @property
    def roc(self) -> tuple[np.ndarray, np.ndarray] | None:
        """FPR and TPR."""
        return roc_points(self.id, self.ood) if len(self.ood) else None


@dataclass(frozen=True)
class Evaluation:
    """Every method on one test set; `unseen` is None for what was kept out of the wild data."""

    test_set: str
    unseen: str | None
    methods: list[MethodScores]  # best first

    @property
    def has_ood(self) -> bool:
        """Whether there are OOD test images."""
        return any(len(method.ood) for method in self.methods)

    def of(self, method: str) -> MethodScores | None:
        """One method's scores."""
        return next((one for one in self.methods if one.method == method), None)

    @property
    def main(self) -> MethodScores:
        """SAL, or the best of the others where it was not evaluated."""
        return self.of("sal") or self.methods[0]


@dataclass(frozen=True)
class Experiment:
    """One OOD set (or wild set) and seed."""

    ood: str
    seed: int
    class_names: tuple[str, ...]
    candidates: Candidates
    filter: dict[str, Any]  # of filter.json
    evaluation: Evaluation | None
    curves: dict[str, pd.DataFrame]  # training, by network
    theory: dict[str, Any] | None


def read_experiment(workspace: Workspace, params: Params, ood: str, seed: int, unseen: str | None = None) -> Experiment:
    """The candidates have to be there, all else may be missing."""
    found = workspace.find(layout.candidates(ood, seed))
    candidates = read_candidates(found)
    gradients = workspace.how_to_make(layout.wild_gradients(ood, seed))
    check_made_with(found, candidates.wild, mixture_of(workspace, ood, seed), first=gradients)
    return Experiment(
        ood=ood,
        seed=seed,
        class_names=read_image_set(workspace.find(layout.prepared_set(params.data.id))).class_names,
        candidates=candidates,
        filter=_json(workspace, layout.filter_metrics(ood, seed)) or {},
        evaluation=_evaluation(workspace, params, ood, seed, unseen),
        curves=_curves(workspace, params, ood, seed),
        theory=_json(workspace, layout.theory_metrics(ood, seed)),
    )


def _json(workspace: Workspace, place: Artifact) -> dict[str, Any] | None:
    if not workspace.has(place):
        return None
    found = workspace.find(place)
    try:
        content: dict[str, Any] = json.loads(found.path.read_text(encoding="utf-8"))
        content.items()
        return content
    except (ValueError, AttributeError) as error:
        raise BadArtifactError(f"{found.path} is damaged or not ours ({error}); {found.cure}") from None


def _evaluation(workspace: Workspace, params: Params, ood: str, seed: int, unseen: str | None) -> Evaluation | None:
    """On the asked-for test set; else on the first that has OOD images, or on the first that there is."""
    wanted = [unseen] if unseen else [None, *params.data.test_ood]
    there = [test for test in wanted if unseen or workspace.has(layout.evaluation_scores(ood, seed, test))]
    found = [_read_evaluation(workspace, ood, seed, test) for test in there]
    return next((one for one in found if one.has_ood), found[0] if found else None)


def _read_evaluation(workspace: Workspace, ood: str, seed: int, unseen: str | None) -> Evaluation:
    found = workspace.find(layout.evaluation_scores(ood, seed, unseen))
    figures = _json(workspace, layout.metrics(ood, seed, unseen)) or {}
    with reading(found, SCORES_KIND) as file:
        methods = [
            MethodScores(
                method,
                np.asarray(file[method]["id"]),
                np.asarray(file[method]["ood"]) if "ood" in file[method] else np.empty(0),
                figures.get(method, {}),
            )
            for method in file
        ]
    if not methods:
        raise BadArtifactError(f"{found.path} holds no scores; {found.cure}")

    def rank(one: MethodScores) -> tuple[float, bool, str]:
        fpr95 = one.figures.get("fpr95")
        return math.inf if fpr95 is None else fpr95, one.method != "sal", one.method

    return Evaluation(unseen or ood, unseen, sorted(methods, key=rank))


def _curves(workspace: Workspace, params: Params, ood: str, seed: int) -> dict[str, pd.DataFrame]:
    """Training curves in the order of the pipeline."""
    places = {"classifier": layout.train_id_curve(seed)}
    places |= {name: layout.training_curve(name, ood, seed) for name in ("sal", *params.rivals)}
    places |= {name: layout.encoder_curve(name, seed) for name in params.encoders}
    found = {name: workspace.find(place) for name, place in places.items() if workspace.has(place)}
    try:
        curves = {name: pd.read_csv(one.path) for name, one in found.items() if one.path.stat().st_size}
    except (ValueError, OSError) as error:
        raise BadArtifactError(f"a training curve of {ood}, seed {seed} is damaged ({error}); train it again") from None
    return {name: curve for name, curve in curves.items() if {"epoch", "loss"} <= {*curve.columns} and len(curve)}
