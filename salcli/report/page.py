"""The HTML report: one page about one experiment that needs nothing but a browser, and the table of all experiments."""

from __future__ import annotations

import base64
import hashlib
import platform
import re
import subprocess
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from salcli import __version__
from salcli.errors import MissingArtifactError
from salcli.params.reading import AVERAGE
from salcli.progress import Progress
from salcli.report.console import Cell
from salcli.report.figures import (
    certificate_chart,
    compact,
    histogram_chart,
    pi_chart,
    roc_chart,
    roc_overview,
    tau_chart,
    theory_charts,
    training_chart,
)
from salcli.report.intervals import has_scores, with_scores
from salcli.report.page_data import Findings, read_findings, read_galleries
from salcli.report.results import (
    METRICS,
    Results,
    asked_for,
    estimates_grid,
    groups_of,
    pi_text,
    results_notes,
    section_cells,
)
from salcli.report.stage_tables import nothing_found, score_label, share_text
from salcli.store.files import read_header
from salcli.store.layout import RUNS, SAL, SCRATCH, UNKNOWN, Experiment, Workspace
from salcli.store.review import as_cell, filter_mark

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
PACKAGES = ("torch", "torchvision", "numpy", "scipy", "scikit-learn", "h5py", "matplotlib", "dvc")
PASSWORD = re.compile(r"(?<=://)[^/\s@]+@")


# lone surrogates stand for bytes that are not UTF-8; XML and browsers allow no control characters
NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")

SetTable = tuple[str, list[str], list[tuple[str, bool, list[Cell]]]]  # name, columns; name of a row, stands out, cells


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
) -> dict[str, Any]:
    """What the page shows: everything about one experiment, and the table of all of them.

    What is None or empty is left out, with a hint how to make it. `charts` are those of all sections.
    """
    findings = read_findings(workspace, params, experiment, unseen)
    results = _results(workspace, params, progress)
    tables, verdicts, notes = _tables(results, experiment) if results else ([], [], [])
    mixed = "" if experiment.pi == UNKNOWN else f"with {pi_text(experiment.pi)} of "
    variant = "" if experiment.variant == SAL else f", {findings.label(experiment.variant)}"
    methods = []
    for one in findings.methods:
        words = f"FPR95 {share_text(one.metrics.get('fpr95'))}, AUROC {share_text(one.metrics.get('auroc'))}"
        pair = [histogram_chart(one), roc_chart(one)] if one.roc else [histogram_chart(one)]
        methods.append((one.label, words if one.roc else "", pair))
    page: dict[str, Any] = {
        "title": f"ID data “{params.data.id}”, wild data {mixed}“{experiment.ood}”{variant}",
        "findings": findings,
        "filter_mark": filter_mark(workspace.find(experiment.candidates), experiment),
        "tiles": tiles(findings),
        "tables": tables,
        "notes": notes,
        "verdicts": verdicts,
        "warning": fit_warning(findings),
        "galleries": read_galleries(workspace, params, findings, top),
        "tau": tau_chart(findings.candidates),
        "certificate": certificate_chart(findings.candidates),
        "overview": roc_overview(findings) if findings.has_ood else None,
        "methods": methods,
        "training": [training_chart(name, findings.label(name), curve) for name, curve in findings.curves.items()],
        "theory": theory_charts(findings.theory) if findings.theory else [],
        "by_pi": pi_chart(results, params, experiment.variant) if results else None,
        "params": params_file.read_text(encoding="utf-8"),
        "facts": provenance(workspace, experiment),
    }
    of_methods = [chart for _, _, pair in methods for chart in pair]
    every = [
        page["tau"],
        page["certificate"],
        page["overview"],
        *of_methods,
        *page["training"],
        *page["theory"],
        page["by_pi"],
    ]
    page["charts"] = charts = [chart for chart in every if chart]
    with progress.task(f"report, {experiment}", len(charts), "charts") as task:
        for chart in charts:
            _ = chart.svg  # drawing takes a while
            task.advance(1)
    return page


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


def tiles(findings: Findings) -> list[tuple[str, str, str]]:
    """Name, a number in large type, detail."""
    candidates, errors = findings.candidates, [findings.filter.get(key) for key in ("err_in", "err_out")]
    n_candidates, n_wild = len(candidates.index), len(candidates.wild_score)
    share = f"of {n_wild:,} wild samples: {share_text(n_candidates / n_wild)}"
    known = UNKNOWN if errors == [None, None] else "; ".join(map(share_text, errors))
    of_errors = "ID taken for outliers; outliers missed (ERR_in; ERR_out)"
    if (precision := findings.filter.get("precision")) is not None:
        share += f"; {share_text(precision)} of them OOD"
        of_errors += f"; {share_text(1 - precision)} of the candidates are ID (contamination)"
    elif evidence := findings.filter.get("evidence"):
        share += f"; at least {evidence['certified']:,} are outliers (95%)"
    found = [
        ("candidate outliers", f"{n_candidates:,}", share),
        ("threshold T", f"{candidates.threshold:.3g}", f"{score_label(candidates.score_name)} above T: a candidate"),
        ("errors of the filter", known, of_errors),
    ]
    if not findings.main:
        return found
    name, metrics = findings.main.label, findings.main.metrics
    estimate = ((findings.estimates or {}).get("methods", {}).get(findings.main.method) or {}).get("fpr95")
    if findings.has_ood:
        passed = f"of OOD test data pass as ID (FPR95), {findings.test_set}"
        found += [
            (f"{name} lets through", share_text(metrics.get("fpr95")), passed),
            (f"{name} separates", share_text(metrics.get("auroc")), "AUROC: 50% is chance, 100% is perfect"),
        ]
    elif estimate:
        low, high = share_text(estimate["low"]), share_text(estimate["high"])
        how = f"of OOD data pass as ID (FPR95), 90% interval {low} to {high}; estimated without labels"
        found.append((f"{name} lets through, estimated", share_text(estimate["value"]), how))
    else:
        found.append((f"{name} lets through", UNKNOWN, "there are no OOD test data (data.test_ood)"))
    accuracy = share_text(metrics.get("id_accuracy"))
    return [*found, ("ID accuracy", accuracy, f"on ID test data, by the network of {name}")]


def fit_warning(findings: Findings) -> str:
    """The warning of `filter`: τ found nothing."""
    train, calibration = (findings.filter.get(f"{part}_accuracy") for part in ("train", "calibration"))
    found = findings.filter.get("evidence") or {}
    if findings.candidates.score_name != SAL or train is None or found.get("kind") != "nothing found":
        return ""
    return nothing_found(train, calibration)


def _tables(results: Results, experiment: Experiment) -> tuple[list[SetTable], list[str], list[str]]:
    """With verdicts and notes. Those of the experiment's π first; the average first, then groups, then every OOD set.

    The variant of the page stands out. Estimates stand apart; there the method that was chosen by them stands out.
    """
    several, measured, estimated, notes = len(results.shares) > 1, [], [], results_notes(results)
    means = {name: i for i, name in enumerate([AVERAGE, *results.groups])}
    found = {(str(pi), str(ood)): rows for (pi, ood), rows in results.rows().groupby(["pi", "ood"], sort=False)}
    for pi, ood in sorted(found, key=lambda pair: (pair[0] != pi_text(experiment.pi), means.get(pair[1], len(means)))):
        rows = found[pi, ood]
        lines = [
            (name.text.replace("\n", " "), method == experiment.variant, cells)
            for method, (name, *cells) in zip(rows["method"], section_cells(rows), strict=True)
        ]
        measured.append((f"{ood}, π {pi}" if several else ood, list(METRICS.values()), lines))
    for part in results.by_pi():
        grid = estimates_grid(part, several, everything=True)
        if grid is None:
            continue
        notes += [*grid.notes, "◀: chosen by the estimates."]
        for section in grid.sections:
            name = section[0][0].text + (f", π {part.shares[0]}" if several else "")
            lines = [(one.text + " ◀" * one.is_bold, one.is_bold, cells) for _, one, *cells in section]
            estimated.append((f"{name}, estimated without labels", grid.header[2:], lines))
    tables = [*measured, *estimated] if results.is_measured else [*estimated, *measured]
    verdicts = [f"π {pi}: {text}" if several else text for pi, text in results.verdicts.items() if text]
    return tables, verdicts, list(dict.fromkeys(notes))


# --- provenance: no names of people, hosts or home folders


def provenance(workspace: Workspace, experiment: Experiment) -> list[tuple[str, str]]:
    facts = [
        ("report made", datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")),
        ("salcli", __version__),
        ("commit of the workspace", _commit(workspace.root)),
        ("Python", platform.python_version()),
        ("packages", ", ".join(f"{name} {version(name)}" for name in PACKAGES)),
    ]
    network = experiment.network(experiment.variant)
    if workspace.has(network):
        about = read_header(workspace.find(network)).about
        review = about.get("review")
        corrected = f", after a review: {review['dropped']} dropped, {review['added']} added" if review else ""
        facts.append(("SAL was trained with", f"{about.get('n_outliers', UNKNOWN)} candidate outliers{corrected}"))
    return facts


def _commit(root: Path) -> str:
    try:
        commit, changes = (
            subprocess.run(
                ["git", *arguments], cwd=root, timeout=10, check=True, capture_output=True, text=True, errors="replace"
            ).stdout.strip()
            for arguments in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.SubprocessError):
        return "not under git"
    return f"{commit}, with changes that are not committed" if changes else commit


# --- the page


def render(report: dict[str, Any]) -> str:
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
        findings=report["findings"],
        experiment=report["findings"].experiment,
        sections=SECTIONS,
        style=Markup(style),
        script=Markup(script),
        script_digest=digest,
    )


def _safe(value: Any) -> Any:
    """Text that may stand in a page that is passed on; Jinja escapes it.

    What is not text becomes �, the path of the home folder ~, the user and password of an address ….
    """
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    text, home = NOT_TEXT.sub("\N{REPLACEMENT CHARACTER}", value), str(Path.home())
    if len(home) > 1:
        text = re.sub(rf"(?<![\w/]){re.escape(home)}(?![\w-])", "~", text)
    return PASSWORD.sub("…@", text)
