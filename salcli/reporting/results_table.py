"""The results table in every format."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import pandas as pd
from rich import box
from rich.table import Table

from salcli.metrics_convention import FPR95_CONVENTION
from salcli.reporting.results import AVERAGE, METRICS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from salcli.reporting.results import Results, Row

LABELS = {
    "sal": "SAL",
    "oe": "OE",
    "energy-oe": "Energy-OE",
    "woods": "WOODS",
    "scone": "SCONE",
    "step": "STEP",
    "knn-plus": "KNN+",
    "csi": "CSI",
    "sal-posthoc": "SAL (post-hoc)",
    "msp": "MSP",
    "odin": "ODIN",
    "mahalanobis": "Mahalanobis",
    "energy": "Energy",
    "knn": "KNN",
    "react": "ReAct",
    "dice": "DICE",
    "ash": "ASH",
    "gradnorm": "GradNorm",
    "vim": "ViM",
}
SHORT_SCHEDULE = " (short schedule)"
FULL_WIDTH = 96  # columns of a terminal that mean ± std needs
WIDER = 2  # what «(short schedule)», in a line of its own, needs beyond that
UNKNOWN = "unknown"
HEADER = ["OOD test set", "method", *METRICS.values()]


def label(method: str, *, has_short_schedule: bool = False) -> str:
    """What a table calls a method."""
    return LABELS.get(method, method) + (SHORT_SCHEDULE if has_short_schedule else "")


def rich_table(results: Results, width: int = FULL_WIDTH) -> Table:
    """For the terminal. In a narrow one the means alone are shown, rather than figures cut in two."""
    rows = results.rows()
    spread = width >= FULL_WIDTH + (WIDER if any(row.has_short_schedule for row in rows) else 0)
    table = Table(title="OOD detection, in %", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.title_justify, table.title_style = "left", "bold"
    for place, name in enumerate(HEADER):
        table.add_column(name, justify="right" if place > 1 else "left")
    for row, is_new_set in _with_breaks(rows):
        if is_new_set and table.row_count:
            table.add_section()
        name, *figures = _cells(row, "[bold]{}[/bold]", spread=spread)
        table.add_row(
            row.ood if is_new_set else "", name.replace(SHORT_SCHEDULE, f"\n{SHORT_SCHEDULE.strip()}"), *figures
        )
    table.caption = "\n".join(_notes(results, spread=spread))
    table.caption_justify = "left"
    return table


def markdown(results: Results) -> str:
    """For a README."""
    lines = [" | ".join(HEADER), " | ".join(["---", "---", *["---:"] * len(METRICS)])]
    lines += [" | ".join([row.ood, *_cells(row, "**{}**")]) for row in results.rows()]
    return "\n".join([*(f"| {line} |" for line in lines), "", *_notes(results)])


def latex(results: Results) -> str:
    """For a paper (booktabs)."""
    lines = [" & ".join(HEADER), r"\midrule"]
    for row, is_new_set in _with_breaks(results.rows()):
        if is_new_set and len(lines) > 2:
            lines.append(r"\midrule")
        lines.append(" & ".join([row.ood if is_new_set else "", *_cells(row, r"\textbf{{{}}}")]))
    body = "\n".join(line if line == r"\midrule" else line + r" \\" for line in lines)
    for symbol, command in {"↓": r"$\downarrow$", "↑": r"$\uparrow$", "±": r"$\pm$", "_": r"\_"}.items():
        body = body.replace(symbol, command)
    columns = "ll" + "r" * len(METRICS)
    notes = "\n".join(f"% {note}" for note in _notes(results))
    return f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n{body}\n\\bottomrule\n\\end{{tabular}}\n{notes}"


def flat(results: Results) -> pd.DataFrame:
    """For programs: one line for each OOD set and method."""
    return pd.DataFrame(
        {
            "ood": row.ood,
            "method": row.method,
            "n_seeds": row.n_seeds,
            "short_schedule": row.has_short_schedule,
            **{f"{metric}_mean": row.mean[metric] for metric in METRICS},
            **{f"{metric}_std": row.std[metric] for metric in METRICS},
        }
        for row in results.rows()
    )


def _with_breaks(rows: list[Row]) -> Iterator[tuple[Row, bool]]:
    """Each row, and whether it is the first of its OOD set."""
    yield rows[0], True
    for previous, row in pairwise(rows):
        yield row, row.ood != previous.ood


def _cells(row: Row, bold: str, *, spread: bool = True) -> list[str]:
    """The method and its figures."""
    figures = []
    for metric in METRICS:
        mean, std = row.mean[metric], row.std[metric]
        text = f"{mean:.1f}" if math.isnan(std) or not spread else f"{mean:.1f} ± {std:.1f}"
        text = UNKNOWN if math.isnan(mean) else text
        figures.append(bold.format(text) if metric in row.best else text)
    return [label(row.method, has_short_schedule=row.has_short_schedule), *figures]


def _notes(results: Results, *, spread: bool = True) -> list[str]:
    notes = [FPR95_CONVENTION] if results.unknown_sets != results.ood_sets else []
    if results.unknown_sets:
        names = ", ".join(results.unknown_sets)
        notes.append(
            f"{names}: wild data as they come, nobody knows what of them is OOD, so FPR95, AUROC and AUPR are unknown; "
            "they need OOD images to test on (data.test_ood)."
        )
    if results.n_seeds > 1:
        over_sets = f" ({AVERAGE}: over the OOD sets)" if len(results.ood_sets) > 1 else ""
        figures = "Mean ± std" if spread else f"Mean (± std from {FULL_WIDTH} columns on)"
        notes.append(f"{figures} over {results.n_seeds} seeds{over_sets}; best in bold; sorted by average FPR95.")
    if results.wild_sets != results.ood_sets and len(results.wild_sets) == 1:
        what = "Wild data" if results.wild_sets == results.unknown_sets else "OOD in the wild data"
        notes.append(f"{what}: {results.wild_sets[0]}.")
    if results.n_left_out:
        notes.append(
            f"Left out: {results.n_left_out} evaluations that params.yaml does not ask for (--all shows them)."
        )
    notes.append("Samples: " + ", ".join(f"{name} {text}" for name, text in results.samples.items()) + ".")
    return notes
