"""evaluate: score the ID and OOD test sets once with every method, and compute the metrics."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from salcli.artifacts import layout
from salcli.artifacts.atomic import write_text
from salcli.artifacts.curve import write_curve
from salcli.artifacts.hdf5 import write_arrays
from salcli.compute.numerics import computing
from salcli.compute.processes import processes
from salcli.metrics import OodMetrics, ood_metrics, roc_points
from salcli.progress import Silent
from salcli.stages.inputs import id_images, ood_test_images, unseen_ood_images
from salcli.stages.scoring import Scoring, TestScores, n_passes

if TYPE_CHECKING:
    from pathlib import Path

    from salcli.artifacts.layout import Workspace
    from salcli.params import Params
    from salcli.progress import Progress

SCORES_KIND = "test-scores"
N_BINS = 60
SHORT_SCHEDULE = "short_schedule"
UNKNOWN = dict.fromkeys(field.name for field in fields(OodMetrics))


@dataclass(frozen=True)
class Evaluated:
    """The metrics of every method on one OOD test set. `ood` is the one in the wild data."""

    ood: str
    test_set: str
    seed: int
    metrics: dict[str, OodMetrics | None]  # None where there is no OOD test data, for nobody knows what is OOD
    id_accuracy: dict[str, float]
    short_schedules: frozenset[str]  # methods whose network was trained for fewer epochs than by its authors
    n_id_test: int
    n_ood_test: int
    written: list[Path]


def run(
    workspace: Workspace,
    params: Params,
    ood: str,
    seed: int,
    progress: Progress | None = None,
    *,
    unseen: str | None = None,
) -> Evaluated:
    """Evaluate all methods of params.yaml on the OOD set of the wild data, or on an `unseen` one."""
    methods: tuple[str, ...] = params.evaluate.methods
    id_test = id_images(workspace, params.data.id, "test", seed)
    if unseen:
        ood_test = unseen_ood_images(workspace, params.data, unseen, seed, ood, progress)
    else:
        ood_test = ood_test_images(workspace, ood, seed)
    n_images = n_passes(methods) * (len(id_test) + len(ood_test))
    if "knn-plus" in methods:  # has features of its own to look for neighbours among
        n_images += len(id_images(workspace, params.data.id, "train", seed))
    what = f"{ood}, tested on {unseen}" if unseen else ood
    with (
        computing(params) as compute,
        (progress or Silent()).task(f"evaluate, {what}, seed {seed}", n_images, "images") as task,
    ):
        scoring = Scoring(workspace, params, ood, seed, id_test, ood_test, compute, task)
        scores = scoring.scores()
    written = [
        workspace.target(place(ood, seed, unseen))
        for place in (layout.evaluation_scores, layout.metrics, layout.roc, layout.score_histogram)
    ]
    result = Evaluated(
        ood=ood,
        test_set=unseen or ood,
        seed=seed,
        metrics={method: ood_metrics(own.id, own.ood) if len(own.ood) else None for method, own in scores.items()},
        id_accuracy={method: own.id_accuracy for method, own in scores.items()},
        short_schedules=frozenset(method for method, own in scores.items() if own.has_short_schedule),
        n_id_test=len(id_test),
        n_ood_test=len(ood_test),
        written=written,
    )
    if processes().is_main:
        made_with: dict[str, Any] = {"evaluate": params.evaluate.model_dump(), "numerics": params.numerics.model_dump()}
        if "sal-posthoc" in scores:
            made_with["filter"] = scoring.filter_params.model_dump()
        _write(result, scores, made_with)
    return result


def _write(result: Evaluated, scores: dict[str, TestScores], made_with: dict[str, Any]) -> None:
    arrays = {f"{method}/{side}": getattr(own, side) for method, own in scores.items() for side in ("id", "ood")}
    about = {"ood": result.ood, "test_set": result.test_set, "seed": result.seed}
    write_arrays(result.written[0], SCORES_KIND, arrays, {**about, **made_with})
    write_text(result.written[1], json.dumps(_summary(result), indent=2) + "\n")
    roc = [row for method, own in scores.items() if len(own.ood) for row in _roc_rows(method, own)]
    write_curve(result.written[2], roc, fieldnames=("method", "fpr", "tpr"))
    write_curve(result.written[3], [row for method, own in scores.items() for row in _histogram_rows(method, own)])


def _summary(result: Evaluated) -> dict[str, Any]:
    figures: dict[str, dict[str, Any]] = {
        method: {**(asdict(own) if own else UNKNOWN), "id_accuracy": result.id_accuracy[method]}
        for method, own in result.metrics.items()
    }
    for method in result.short_schedules:
        figures[method][SHORT_SCHEDULE] = True
    return {**figures, "samples": {"id_test": result.n_id_test, "ood_test": result.n_ood_test}}


def _roc_rows(method: str, scores: TestScores) -> list[dict[str, Any]]:
    fpr, tpr = roc_points(scores.id, scores.ood)
    return [{"method": method, "fpr": float(x), "tpr": float(y)} for x, y in zip(fpr, tpr, strict=True)]


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
