"""From the files of a workspace to all that a report shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from salcli.artifacts import layout
from salcli.artifacts.layout import RUNS, SCRATCH
from salcli.artifacts.review import filter_mark
from salcli.errors import MissingArtifactError
from salcli.reporting.report import galleries
from salcli.reporting.report.course_charts import condition_chart, error_chart, training_chart
from salcli.reporting.report.experiment import Experiment, read_experiment
from salcli.reporting.report.page import MethodCharts, Report
from salcli.reporting.report.provenance import files, provenance
from salcli.reporting.report.score_charts import histogram_chart, percent, roc_chart, roc_overview, tau_chart
from salcli.reporting.report.summary import fit_warning, notes, tables, tiles
from salcli.reporting.results import Results, asked_for
from salcli.reporting.results_table import label
from salcli.stages.inputs import wild_images

if TYPE_CHECKING:
    from pathlib import Path

    from salcli.artifacts.layout import Workspace
    from salcli.params import Params
    from salcli.progress import Progress
    from salcli.reporting.report.charts import Chart
    from salcli.reporting.report.experiment import MethodScores

N_BELOW, N_MISTAKES = 48, 36  # images


def collect(
    workspace: Workspace,
    params: Params,
    params_file: Path,
    ood: str,
    seed: int,
    progress: Progress,
    *,
    unseen: str | None = None,
    top: int,
) -> Report:
    """Everything about one experiment, and the table of all of them."""
    experiment = read_experiment(workspace, params, ood, seed, unseen)
    evaluation = experiment.evaluation
    shown_methods = evaluation.methods if evaluation else []
    n_parts = 4 + len(shown_methods) + len(experiment.curves)
    with progress.task(f"report, {ood}, seed {seed}", n_parts, "parts") as task:
        methods, training = [], []
        for one in shown_methods:
            methods.append(_method(one))
            task.advance(1)
        for name, curve in experiment.curves.items():
            training += _drawn([training_chart(name, curve)])
            task.advance(1)
        shows = galleries.has_pictures(wild_images(workspace, params.data.id, ood, seed))
        chosen: list[galleries.Gallery | None] = []
        for gallery, n in (
            (galleries.candidate_gallery, top),
            (galleries.below_gallery, min(top, N_BELOW)),
            (galleries.misses, min(top, N_MISTAKES)),
            (galleries.false_alarms, min(top, N_MISTAKES)),
        ):
            chosen.append(gallery(workspace, params, experiment, n) if shows else None)
            task.advance(1)
    results = _results(workspace, params)
    return Report(
        title=f"{params.data.id}, wild data {'' if params.data.pi == 'unknown' else 'with '}{ood}",
        experiment=experiment,
        filter_mark=filter_mark(workspace.find(layout.candidates(ood, seed))),
        tiles=tiles(experiment),
        tables=tables(results) if results else [],
        notes=notes(results) if results else [],
        warning=fit_warning(experiment),
        tau=tau_chart(experiment.candidates),
        candidates=chosen[0],
        below=chosen[1],
        overview=roc_overview(evaluation) if evaluation and evaluation.has_ood else None,
        methods=methods,
        misses=chosen[2],
        false_alarms=chosen[3],
        main_method=label(evaluation.main.method) if evaluation else "",
        training=training,
        theory=_theory(experiment),
        params=params_file.read_text(encoding="utf-8"),
        facts=provenance(workspace, ood, seed),
        files=files(workspace, ood, seed),
    )


def _method(one: MethodScores) -> MethodCharts:
    charts = [histogram_chart(one), *([roc_chart(one)] if one.roc else [])]
    of = one.figures
    figures = f"FPR95 {percent(of.get('fpr95'))}, AUROC {percent(of.get('auroc'))}" if len(one.ood) else ""
    return MethodCharts(label(one.method), figures, _drawn(charts))


def _drawn(charts: list[Chart]) -> list[Chart]:
    """Draw them now, which takes a while, where there is a progress bar."""
    for chart in charts:
        _ = chart.svg
    return charts


def _theory(experiment: Experiment) -> list[Chart]:
    if experiment.theory is None:
        return []
    charts = [error_chart(experiment.theory), condition_chart(experiment.theory)]
    return [chart for chart in charts if chart]


def _results(workspace: Workspace, params: Params) -> Results | None:
    """As `salcli table` shows them."""
    try:
        if workspace.read_from_scratch:
            return Results.from_folder(workspace.root / SCRATCH / RUNS)
        return Results.from_folder(workspace.root / RUNS, asked_for(params))
    except MissingArtifactError:
        return None
