"""The data sets that salcli knows: what they are, where they come from, and which ones are here."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from salcli.fetching.data_source import DataSource
    from salcli.fetching.fetch import Status

MARKS = {"here": "[green]✓[/]", "own": "[green]own[/]", "partial": "[yellow]partial[/]", "missing": "[dim]–[/]"}
ROLES = {"id": "ID", "ood": "OOD", "both": "both"}
COLUMNS = ("name", "role", "images", "size", "download", "licence", "where from", "here")
FIGURES = {"images", "download"}
NEEDS_WIDTH = {"where from": 100, "licence": 79}


def data_table(found: Mapping[DataSource, Status], width: int) -> Table:
    """One row for each set. Fits 100 columns; a narrower terminal does without where it is from, then its licence."""
    table = Table(
        title="Data sets",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    left_out = {column for column, needed in NEEDS_WIDTH.items() if width < needed}
    columns = [name for name in COLUMNS if name not in left_out]
    for column in columns:
        table.add_column(column, justify="right" if column in FIGURES else "left", no_wrap=True)
    for source, state in found.items():
        cells = _cells(source, state)
        table.add_row(*(cells[column] for column in columns))
    return table


def _cells(source: DataSource, state: Status) -> dict[str, str]:
    return {
        "name": source.name,
        "role": ROLES[source.role],
        "images": f"{source.n_images:,}",
        "size": source.size,
        "download": _download(source),
        "licence": source.licence,
        "where from": where_from(source),
        "here": MARKS[state],
    }


def data_json(found: Mapping[DataSource, Status], own: Mapping[str, Path] | None = None) -> str:
    """All that is known, for programs; of the user's `own` sets, where they lie."""
    sets = [
        asdict(source) | {"n_bytes": source.n_bytes, "embedded": source.is_embedded, "status": state}
        for source, state in found.items()
    ]
    sets += [
        {"name": name, "place": str(place), "status": "here" if place.exists() else "missing"}
        for name, place in (own or {}).items()
    ]
    return json.dumps(sets, indent=2, ensure_ascii=False)


def where_from(source: DataSource) -> str:
    """Whose server it is on, or what it comes with."""
    if source.is_embedded:
        return "inside scikit-learn" if source.home else "made by salcli"
    return _domain(source.files[0].url)


def _download(source: DataSource) -> str:
    if source.is_embedded:
        return "–"
    return f"{source.n_bytes / 1e6:,.0f} MB" if source.n_bytes else "?"


def _domain(address: str) -> str:
    """Whose server it is: ox.ac.uk, mit.edu."""
    labels = (urlsplit(address).hostname or address).split(".")
    return ".".join(labels[-3:] if labels[-2:-1] == ["ac"] else labels[-2:])
