"""Small tables as CSV, for `dvc plots` and spreadsheets."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any

from salcli.artifacts.atomic import write_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def write_curve(path: Path, rows: Sequence[Mapping[str, Any]], fieldnames: Sequence[str] = ()) -> None:
    """Rows with the same keys; numbers are rounded to what a plot can show."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(fieldnames or rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})
    write_text(path, text.getvalue())
