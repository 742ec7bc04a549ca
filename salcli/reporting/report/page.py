"""The page itself: everything that is shown, put into one HTML file that needs no other."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from salcli.artifacts.atomic import write_text
from salcli.artifacts.review import as_cell
from salcli.metrics_convention import FPR95_CONVENTION
from salcli.reporting.report.safe_text import clean, without_secrets
from salcli.reporting.report.score_charts import compact

if TYPE_CHECKING:
    from pathlib import Path

    from salcli.reporting.report.charts import Chart
    from salcli.reporting.report.experiment import Experiment
    from salcli.reporting.report.galleries import Gallery
    from salcli.reporting.report.summary import SetTable, Tile

SECTIONS = {
    "summary": "Summary",
    "candidates": "Candidates",
    "methods": "Methods",
    "mistakes": "Mistakes",
    "training": "Training",
    "theory": "Theory",
    "provenance": "Provenance",
}


@dataclass(frozen=True)
class MethodCharts:
    """One method: its name, its figures in words, and its charts."""

    name: str
    figures: str
    charts: list[Chart]


@dataclass(frozen=True)
class Report:
    """All that is shown. What is None or empty is left out, with a word on how to make it."""

    title: str
    experiment: Experiment
    filter_mark: str
    tiles: list[Tile]
    tables: list[SetTable]
    notes: list[str]
    warning: str
    tau: Chart
    candidates: Gallery | None
    below: Gallery | None
    overview: Chart | None
    methods: list[MethodCharts]
    misses: Gallery | None
    false_alarms: Gallery | None
    main_method: str
    training: list[Chart]
    theory: list[Chart]
    params: str
    facts: list[tuple[str, str]]
    files: list[tuple[str, str, str]]

    @property
    def charts(self) -> list[Chart]:
        """Every chart of the page."""
        overview = [self.overview] if self.overview else []
        of_methods = [chart for method in self.methods for chart in method.charts]
        return [self.tau, *overview, *of_methods, *self.training, *self.theory]


def write_page(path: Path, report: Report) -> None:
    """Write it whole, or not at all."""
    write_text(path, render(report))


def render(report: Report) -> str:
    """The page as text. Everything but our own style, script and drawings is escaped."""
    environment = Environment(
        loader=PackageLoader("salcli", "templates/report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "compact": compact,
        "cell": as_cell,
        "enumerated": _with_places,
    }
    assert environment.loader
    style, script = (environment.loader.get_source(environment, name)[0] for name in ("report.css", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("report.html").render(
        report=report,
        sections=SECTIONS,
        convention=FPR95_CONVENTION,
        style=Markup(style),
        script=Markup(script),
        script_digest=digest,
    )


def _with_places(names: list[str]) -> list[tuple[str, int]]:
    return [(name, place) for place, name in enumerate(names)]


def _printable(value: Any) -> Any:
    """Names from the data need not be text; pages must be, and tell nothing about the machine."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return without_secrets(clean(value))
    return value
