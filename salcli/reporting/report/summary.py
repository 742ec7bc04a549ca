"""The first screen of the report: figures of the experiment, and the table of all methods."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from salcli.reporting.report.score_charts import percent
from salcli.reporting.results import AVERAGE, METRICS
from salcli.reporting.results_table import label
from salcli.reporting.score_names import score_label
from salcli.stages.id_fit import ACCURACY_THE_THEORY_NEEDS

if TYPE_CHECKING:
    from salcli.reporting.report.experiment import Evaluation, Experiment
    from salcli.reporting.results import Results, Row


@dataclass(frozen=True)
class Tile:
    """One figure in large type."""

    name: str
    value: str
    detail: str


@dataclass(frozen=True)
class Cell:
    """One figure of the table."""

    mean: str
    std: str
    is_best: bool


@dataclass(frozen=True)
class MethodRow:
    """One method of the table."""

    name: str
    is_ours: bool
    cells: list[Cell]


@dataclass(frozen=True)
class SetTable:
    """All methods on one OOD test set, or on their average."""

    name: str
    columns: list[str]
    rows: list[MethodRow]


def tiles(experiment: Experiment) -> list[Tile]:
    """What people look for first."""
    candidates, figures = experiment.candidates, experiment.filter
    n_candidates, n_wild = len(candidates.index), len(candidates.wild_score)
    score = score_label(candidates.score_name)
    shown = [
        Tile(
            "candidate outliers", f"{n_candidates:,}", f"of {n_wild:,} wild samples: {percent(n_candidates / n_wild)}"
        ),
        Tile("threshold T", f"{candidates.threshold:.3g}", f"{score} above it makes a candidate"),
        Tile(
            "errors of the filter",
            _errors(figures.get("err_in"), figures.get("err_out")),
            "ID taken for outliers; outliers missed (ERR_in; ERR_out)",
        ),
    ]
    if experiment.evaluation:
        shown += _test_tiles(experiment.evaluation)
    return shown


def _test_tiles(evaluation: Evaluation) -> list[Tile]:
    name, of = label(evaluation.main.method), evaluation.main.figures
    accuracy = Tile("ID accuracy", percent(of.get("id_accuracy")), f"on ID test data, by the network of {name}")
    if not evaluation.has_ood:
        return [Tile(f"{name} lets through", "unknown", "there are no OOD test images (data.test_ood)"), accuracy]
    passed = f"of OOD test data pass as ID (FPR95), {evaluation.test_set}"
    return [
        Tile(f"{name} lets through", percent(of.get("fpr95")), passed),
        Tile(f"{name} separates", percent(of.get("auroc")), "AUROC: 50% is chance, 100% is perfect"),
        accuracy,
    ]


def fit_warning(experiment: Experiment) -> str:
    """What `filter` warns of: τ separates only where the classifier fits the ID data."""
    accuracies = [experiment.filter.get(key) for key in ("train_accuracy", "calibration_accuracy")]
    known = [value for value in accuracies if value is not None]
    if experiment.candidates.score_name != "sal" or not known or min(known) >= ACCURACY_THE_THEORY_NEEDS:
        return ""
    return (
        f"The classifier gets {percent(accuracies[0])} of ID training and {percent(accuracies[1])} of calibration data "
        "right. τ separates well only where the ID risk is small: train it longer, or trust the candidates little."
    )


def _errors(err_in: float | None, err_out: float | None) -> str:
    if err_in is None and err_out is None:
        return "unknown"
    return f"{percent(err_in)}; {percent(err_out)}"


def tables(results: Results) -> list[SetTable]:
    """The average first, if there is one, then every OOD set."""
    found = [
        SetTable(ood, list(METRICS.values()), [_method_row(row) for row in rows])
        for ood, rows in groupby(results.rows(), key=lambda row: row.ood)
    ]
    return sorted(found, key=lambda table: table.name != AVERAGE)


def notes(results: Results) -> list[str]:
    """What stands below the table."""
    seeds = f"Mean ± std over {results.n_seeds} seeds; " if results.n_seeds > 1 else "One seed; "
    samples = ", ".join(f"{name} {text}" for name, text in results.samples.items())
    return [f"{seeds}the best figures are bold; sorted by average FPR95.", f"Samples: {samples}."]


def _method_row(row: Row) -> MethodRow:
    name = label(row.method, has_short_schedule=row.has_short_schedule)
    cells = [
        Cell(
            _figure(row.mean[metric]), _figure(row.std[metric]), metric in row.best and not math.isnan(row.mean[metric])
        )
        for metric in METRICS
    ]
    return MethodRow(name, row.method == "sal", cells)


def _figure(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.1f}"
