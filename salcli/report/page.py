"""The HTML report: one page about one experiment that needs nothing but a browser, and the table of all experiments."""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from salcli import __version__
from salcli.errors import MissingArtifactError
from salcli.params.reading import AVERAGE
from salcli.pipeline.review import as_cell, filter_mark
from salcli.progress import Progress
from salcli.report.bootstrap import has_scores, with_scores
from salcli.report.charts import (
    Chart,
    clean,
    compact,
    histogram_chart,
    roc_chart,
    roc_overview,
    tau_chart,
    theory_charts,
    training_chart,
)
from salcli.report.console import Cell
from salcli.report.findings import Evaluation, Findings, MethodScores, read_findings
from salcli.report.galleries import Galleries, read_galleries
from salcli.report.results import (
    METRICS,
    Results,
    asked_for,
    estimates_grid,
    groups_of,
    pi_text,
    results_notes,
)
from salcli.report.stage_tables import nothing_found, score_label, share_text
from salcli.store.files import read_header, write_text
from salcli.store.layout import RUNS, SAL, SCRATCH, UNKNOWN, Experiment, Workspace

if TYPE_CHECKING:
    from salcli.params.schema import Params

SECTIONS = {
    "summary": "Summary",
    "candidates": "Candidates",
    "methods": "Methods",
    "mistakes": "Mistakes",
    "training": "Training",
    "theory": "Theory",
    "provenance": "Provenance",
}
PACKAGES = ("torch", "torchvision", "numpy", "scipy", "scikit-learn", "h5py", "pytorch-ood", "matplotlib", "dvc")
PASSWORD = re.compile(r"(?<=://)[^/\s@]+@")


class Tile(NamedTuple):
    """One number in large type."""

    name: str
    value: str
    detail: str


class MethodRow(NamedTuple):
    name: str
    stands_out: bool
    cells: list[Cell]


class SetTable(NamedTuple):
    """All methods on one OOD test set at one π, or on the average."""

    name: str
    columns: list[str]
    rows: list[MethodRow]


class MethodCharts(NamedTuple):
    name: str
    metrics: str
    charts: list[Chart]


@dataclass(frozen=True)
class Report:
    """All that the page shows. What is None or empty is left out, with a hint how to make it."""

    title: str
    findings: Findings
    filter_mark: str
    tiles: list[Tile]
    tables: list[SetTable]
    notes: list[str]
    verdicts: list[str]  # what the tables show, in a sentence each
    warning: str
    verdict: str  # of `filter`: what was found beyond what ID data alone would give
    tau: Chart
    galleries: Galleries
    overview: Chart | None
    methods: list[MethodCharts]
    main_method: str
    training: list[Chart]
    theory: list[Chart]
    params: str
    facts: list[tuple[str, str]]
    files: list[tuple[str, str, str]]

    @property
    def charts(self) -> list[Chart]:
        overview = [self.overview] if self.overview else []
        of_methods = [chart for method in self.methods for chart in method.charts]
        return [self.tau, *overview, *of_methods, *self.training, *self.theory]


# --- collecting


def collect(
    workspace: Workspace,
    params: Params,
    params_file: Path,
    experiment: Experiment,
    progress: Progress,
    *,
    unseen: str = "",
    top: int,
) -> Report:
    """Everything about one experiment, and the table of all of them."""
    findings = read_findings(workspace, params, experiment, unseen)
    evaluation = findings.evaluation
    scores = evaluation.methods if evaluation else []
    methods, training = [], []
    with progress.task(f"report, {experiment}", 1 + len(scores) + len(findings.curves), "parts") as task:
        for one in scores:
            methods.append(_method_charts(one))
            task.advance(1)
        for network, curve in findings.curves.items():
            name = "ID classifier" if network == "classifier" else findings.label(network)
            training += _drawn([training_chart(network, name, curve)])
            task.advance(1)
        galleries = read_galleries(workspace, params, findings, top)
        task.advance(1)
    results = _results(workspace, params, progress)
    tables, notes = _tables(results, experiment) if results else ([], [])
    mixed = "" if experiment.pi == UNKNOWN else f"with {pi_text(experiment.pi)} of "
    variant = "" if experiment.variant == SAL else f", {findings.label(experiment.variant)}"
    return Report(
        title=f"{params.data.id}, wild data {mixed}{experiment.ood}{variant}",
        findings=findings,
        filter_mark=filter_mark(workspace.find(experiment.candidates), experiment),
        tiles=tiles(findings),
        tables=tables,
        notes=notes,
        verdicts=_verdicts(results) if results else [],
        warning=fit_warning(findings),
        verdict=str(findings.filter.get("verdict", "")),
        tau=tau_chart(findings.candidates),
        galleries=galleries,
        overview=roc_overview(evaluation) if evaluation and evaluation.has_ood else None,
        methods=methods,
        main_method=evaluation.main.label if evaluation else "",
        training=training,
        theory=theory_charts(findings.theory) if findings.theory else [],
        params=params_file.read_text(encoding="utf-8"),
        facts=provenance(workspace, experiment),
        files=_files(workspace, experiment, evaluation),
    )


def _method_charts(one: MethodScores) -> MethodCharts:
    charts = [histogram_chart(one), *([roc_chart(one)] if one.roc else [])]
    words = f"FPR95 {share_text(one.metrics.get('fpr95'))}, AUROC {share_text(one.metrics.get('auroc'))}"
    return MethodCharts(one.label, words if len(one.ood) else "", _drawn(charts))


def _drawn(charts: list[Chart]) -> list[Chart]:
    """Draw them while a progress bar is shown: it takes a while."""
    for chart in charts:
        _ = chart.svg
    return charts


def _results(workspace: Workspace, params: Params, progress: Progress) -> Results | None:
    """As `salcli table` shows them."""
    raw = params.model_dump()
    root, only = (workspace.root / SCRATCH, None) if workspace.scratch else (workspace.root, asked_for(raw))
    try:
        found = Results.from_folder(root / RUNS, only, groups_of(raw))
    except MissingArtifactError:
        return None
    return with_scores(found, progress) if has_scores(found) else found


# --- the first screen


def tiles(findings: Findings) -> list[Tile]:
    candidates = findings.candidates
    n_candidates, n_wild = len(candidates.index), len(candidates.wild_score)
    share = f"of {n_wild:,} wild samples: {share_text(n_candidates / n_wild)}"
    errors = [findings.filter.get(key) for key in ("err_in", "err_out")]
    precision = findings.filter.get("precision")
    estimated = findings.filter.get("estimated", {}).get("precision")
    known = UNKNOWN if errors == [None, None] else "; ".join(map(share_text, errors))
    of_errors = "ID taken for outliers; outliers missed (ERR_in; ERR_out)"
    if precision is not None:
        share += f"; {share_text(precision)} of them OOD"
        of_errors += f"; {share_text(1 - precision)} of the candidates are ID (contamination)"
    elif estimated is not None:
        share += f"; {share_text(estimated)} of them OOD (estimated)"
    shown = [
        Tile("candidate outliers", f"{n_candidates:,}", share),
        Tile(
            "threshold T", f"{candidates.threshold:.3g}", f"{score_label(candidates.score_name)} above T: a candidate"
        ),
        Tile("errors of the filter", known, of_errors),
    ]
    return shown + _test_tiles(findings.evaluation, findings.estimates) if findings.evaluation else shown


def _test_tiles(evaluation: Evaluation, estimates: dict[str, Any] | None) -> list[Tile]:
    name, metrics = evaluation.main.label, evaluation.main.metrics
    accuracy = Tile("ID accuracy", share_text(metrics.get("id_accuracy")), f"on ID test data, by the network of {name}")
    estimate = (estimates or {}).get("methods", {}).get(evaluation.main.method, {}).get("fpr95")
    if not evaluation.has_ood and estimate:
        low, high = share_text(estimate["low"]), share_text(estimate["high"])
        how = f"of OOD data pass as ID (FPR95), 90% interval {low} to {high}; estimated without labels"
        return [Tile(f"{name} lets through, estimated", share_text(estimate["value"]), how), accuracy]
    if not evaluation.has_ood:
        return [Tile(f"{name} lets through", UNKNOWN, "there are no OOD test images (data.test_ood)"), accuracy]
    passed = f"of OOD test data pass as ID (FPR95), {evaluation.test_set}"
    return [
        Tile(f"{name} lets through", share_text(metrics.get("fpr95")), passed),
        Tile(f"{name} separates", share_text(metrics.get("auroc")), "AUROC: 50% is chance, 100% is perfect"),
        accuracy,
    ]


def fit_warning(findings: Findings) -> str:
    """The warning of `filter`: τ found nothing."""
    train, calibration = (findings.filter.get(f"{part}_accuracy") for part in ("train", "calibration"))
    found = findings.filter.get("estimated")
    if findings.candidates.score_name != SAL or train is None or not found or found["beyond"] > found["margin"]:
        return ""
    return nothing_found(train, calibration)


def _tables(results: Results, experiment: Experiment) -> tuple[list[SetTable], list[str]]:
    """With their notes. Those of the experiment's π first; the average first, then groups, then every OOD set.

    Estimates stand apart, and the method that was chosen by them stands out.
    """
    several, measured, estimated, notes = len(results.shares) > 1, [], [], results_notes(results)
    means = {name: i for i, name in enumerate([AVERAGE, *results.groups])}
    found = {pair: list(rows) for pair, rows in groupby(results.rows(), key=lambda row: (row.pi, row.ood))}
    for pi, ood in sorted(found, key=lambda pair: (pair[0] != pi_text(experiment.pi), means.get(pair[1], len(means)))):
        rows = [MethodRow(row.name.replace("\n", " "), row.method == SAL, list(row.cells())) for row in found[pi, ood]]
        measured.append(SetTable(f"{ood}, π {pi}" if several else ood, list(METRICS.values()), rows))
    for part in results.by_pi():
        grid = estimates_grid(part, several, everything=True)
        if grid is None:
            continue
        notes += [*grid.notes, "◀: chosen by the estimates."]
        for section in grid.sections:
            name = section[0][0].text + (f", π {part.shares[0]}" if several else "")
            rows = [MethodRow(one.text + " ◀" * one.is_bold, one.is_bold, cells) for _, one, *cells in section]
            estimated.append(SetTable(f"{name}, estimated without labels", grid.header[2:], rows))
    nothing_measured = results.unknown_sets == results.ood_sets
    return [*estimated, *measured] if nothing_measured else [*measured, *estimated], list(dict.fromkeys(notes))


def _verdicts(results: Results) -> list[str]:
    several = len(results.shares) > 1
    return [f"π {pi}: {text}" if several else text for pi, text in results.verdicts.items() if text]


# --- provenance: code, versions, machine, files; no names of people, hosts or home folders


def provenance(workspace: Workspace, experiment: Experiment) -> list[tuple[str, str]]:
    packages = ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name)))
    facts = [
        ("report made", _time(datetime.now().timestamp())),
        ("salcli", __version__),
        ("commit of the workspace", _commit(workspace.root)),
        ("Python", platform.python_version()),
        ("packages", packages),
        ("machine of the report", _machine()),
    ]
    network = experiment.network(experiment.variant)
    if workspace.has(network):
        about = read_header(workspace.find(network)).about
        review = about.get("review")
        corrected = f", after a review: {review['dropped']} dropped, {review['added']} added" if review else ""
        facts.append(("SAL was trained with", f"{about.get('n_outliers', UNKNOWN)} candidate outliers{corrected}"))
    return facts


def _files(workspace: Workspace, experiment: Experiment, evaluation: Evaluation | None) -> list[tuple[str, str, str]]:
    """What the report was read from: path, size, and when it was written here."""
    artifacts = [
        experiment.split,
        experiment.wild,
        experiment.classifier,
        experiment.wild_representation,
        experiment.candidates,
        experiment.network(experiment.variant),
        *(experiment.evaluation(name, evaluation.unseen) for name in ("scores.h5", "metrics.json") if evaluation),
        experiment.theory("json"),
        experiment.estimates,
    ]
    rows = []
    for path in (workspace.find(artifact).path for artifact in artifacts if workspace.has(artifact)):
        facts = path.stat()
        shown = path.relative_to(workspace.root).as_posix()
        rows.append((shown, f"{facts.st_size / 1000:,.1f} kB", _time(facts.st_mtime)))
    return rows


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M %Z")


def _commit(root: Path) -> str:
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return "not under git"
    return f"{commit}, with changes that are not committed" if _git(root, "status", "--porcelain") else commit


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, timeout=10, check=True, capture_output=True, text=True, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _machine() -> str:
    import torch

    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_name(i) for i in range(n_gpus)]
    return ", ".join([system, f"{_processor()} ({os.cpu_count()} threads)", *(gpus or ["no GPU"])])


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or "processor unknown"


# --- the page


def write_page(path: Path, report: Report) -> None:
    """Atomically."""
    write_text(path, render(report))


def render(report: Report) -> str:
    """The page as text. Everything but our own style, script and drawings is escaped."""
    environment = Environment(
        loader=PackageLoader("salcli.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_safe,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"compact": compact, "cell": as_cell}
    assert environment.loader
    style, script = (environment.loader.get_source(environment, name)[0] for name in ("report.css", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("report.html").render(
        report=report,
        findings=report.findings,
        experiment=report.findings.experiment,
        sections=SECTIONS,
        style=Markup(style),
        script=Markup(script),
        script_digest=digest,
    )


def without_secrets(text: str) -> str:
    """Pages are passed on: the path of the home folder becomes ~, the user and password of an address …"""
    home = str(Path.home())
    shown = re.sub(rf"(?<![\w/]){re.escape(home)}(?![\w-])", "~", text) if len(home) > 1 else text
    return PASSWORD.sub("…@", shown)


def _safe(value: Any) -> Any:
    """Names from the data need not be text, but a page must be. Jinja escapes what comes out of here."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return without_secrets(clean(value))
    return value
