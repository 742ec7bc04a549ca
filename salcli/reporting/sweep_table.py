"""What `sweep-pi` shows: one row for each π, one section for each OOD set."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.table import Table

from salcli.metrics_convention import FPR95_CONVENTION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from salcli.stages.pi_sweep import SweepPoint

METRICS = {"err_in": "ERR_in", "err_out": "ERR_out", "fpr95": "FPR95 ↓", "auroc": "AUROC ↑"}


def sweep_table(points: Sequence[SweepPoint]) -> Table:
    """Mean ± std over seeds, in percent."""
    table = Table(title="SAL by the share π of OOD in the wild data, in %", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.title_justify, table.title_style = "left", "bold"
    for place, column in enumerate(("wild OOD", "π", "wild", "candidates", *METRICS.values(), "ζ")):
        table.add_column(column, justify="right" if place else "left")
    for ood, of_set in groupby(in_order(points), key=lambda point: point.ood):
        if table.row_count:
            table.add_section()
        name = ood
        for pi, of_pi in groupby(of_set, key=lambda point: point.pi):
            table.add_row(name, f"{pi:g}", *_cells(list(of_pi)))
            name = ""
    table.caption = "\n".join(_notes(points))
    table.caption_justify = "left"
    return table


def over_seeds(points: Sequence[SweepPoint], metric: str) -> tuple[float, float]:
    """Mean and std of a metric, NaN where it is not defined; a single seed has no std."""
    values = [value for point in points if (value := getattr(point, metric)) is not None]
    mean = float(np.mean(values)) if values else np.nan
    return mean, float(np.std(values, ddof=1)) if len(values) > 1 else np.nan


def in_order(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """OOD sets as they come, each with rising π."""
    sets = list(dict.fromkeys(point.ood for point in points))
    return sorted(points, key=lambda point: (sets.index(point.ood), point.pi, point.seed))


def _cells(points: list[SweepPoint]) -> list[str]:
    counts = [_range([getattr(point, name) for point in points]) for name in ("n_wild", "n_candidates")]
    zeta, _ = over_seeds(points, "zeta")
    return [*counts, *(_percent(*over_seeds(points, metric)) for metric in METRICS), f"{zeta:.2f}"]


def _percent(mean: float, std: float) -> str:
    if np.isnan(mean):
        return "–"
    return f"{100 * mean:.1f}" if np.isnan(std) else f"{100 * mean:.1f} ± {100 * std:.1f}"


def _range(values: list[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _notes(points: Sequence[SweepPoint]) -> list[str]:
    n_seeds = len({point.seed for point in points})
    notes = [FPR95_CONVENTION]
    if n_seeds > 1:
        notes.append(f"Mean ± std over {n_seeds} seeds.")
    notes.append("Wild: the largest set with a share π of OOD, so its size changes with π.")
    if any(point.err_in is None for point in points):
        notes.append("–: at π = 1 there is no wild ID data that could be taken for outliers.")
    return notes
