"""Our figures beside the paper's, in every format."""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING

import pandas as pd
from rich import box
from rich.table import Table

from salcli.metrics_convention import FPR95_CONVENTION
from salcli.reporting.paper_comparison import Cell
from salcli.reporting.results import LOWER_IS_BETTER
from salcli.reporting.results_table import SHORT_SCHEDULE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from salcli.reporting.paper_comparison import ComparedRow, Comparison

PAPER = "Du et al., ICLR 2024"
METRICS = {"fpr95": "FPR95 ↓", "auroc": "AUROC ↑", "id_accuracy": "ID acc. ↑"}
NOTHING = "–"
HEADER = [
    "OOD test set",
    "method",
    *(f"{name} {whose}" for name in METRICS.values() for whose in ("ours", "paper", "Δ")),
]
LATEX = {"↓": r"$\downarrow$", "↑": r"$\uparrow$", "Δ": r"$\Delta$", "−": "$-$", "_": r"\_", NOTHING: "--"}
STRICTER = (
    "Our splits are stricter: the classifier has not seen the wild half of the ID data, no image is both wild and test."
)


def rich_table(comparison: Comparison) -> Table:
    """For the terminal: 100 columns at most."""
    table = Table(title=_title(comparison), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.title_justify = table.caption_justify = "left"
    table.title_style = "bold"
    table.add_column("OOD\ntest set")
    table.add_column("method")
    for name in METRICS.values():
        words, arrow = name.rsplit(" ", 1)
        first, _, second = words.partition(" ")
        for head in (f"{first}\nours", f"{second} {arrow}".strip() + "\npaper", "\nΔ"):
            table.add_column(head, justify="right", no_wrap=True)
    for test, rows in groupby(comparison.rows, key=lambda row: row.test):
        if table.row_count:
            table.add_section()
        for place, row in enumerate(rows):
            table.add_row("" if place else test, _method(row), *_texts(row, coloured=True))
    table.caption = "\n".join(_notes(comparison))
    return table


def markdown(comparisons: Sequence[Comparison]) -> str:
    """For a README."""
    parts = []
    for comparison in comparisons:
        lines = [HEADER, ["---", "---", *["---:"] * (len(HEADER) - 2)]]
        lines += [[row.test, _method(row), *_texts(row)] for row in comparison.rows]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        parts.append("\n".join([f"**{_title(comparison)}**", "", body, "", *_notes(comparison)]))
    return "\n\n".join(parts)


def latex(comparisons: Sequence[Comparison]) -> str:
    """For a paper (booktabs)."""
    parts = []
    for comparison in comparisons:
        groups = [list(rows) for _, rows in groupby(comparison.rows, key=lambda row: row.test)]
        blocks = [[HEADER]] + [
            [["" if place else row.test, _method(row), *_texts(row)] for place, row in enumerate(rows)]
            for rows in groups
        ]
        body = "\n\\midrule\n".join("\n".join(" & ".join(line) + r" \\" for line in block) for block in blocks)
        for symbol, command in LATEX.items():
            body = body.replace(symbol, command)
        columns = "ll" + "r" * (len(HEADER) - 2)
        notes = "\n".join(f"% {note}" for note in [_title(comparison), *_notes(comparison)])
        tabular = f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n{body}\n\\bottomrule\n\\end{{tabular}}"
        parts.append(f"{tabular}\n{notes}")
    return "\n\n".join(parts)


def flat(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """For programs: one line for each table, OOD set and method."""
    return pd.DataFrame(
        {
            "table": comparison.setting.table,
            "ood": row.test,
            "method": row.method,
            "n_seeds": row.n_seeds,
            "short_schedule": row.has_short_schedule,
            **{
                f"{metric}_{what}": value
                for metric in METRICS
                for what, value in _values(row.cells.get(metric, Cell())).items()
            },
        }
        for comparison in comparisons
        for row in comparison.rows
    )


def _values(cell: Cell) -> dict[str, float]:
    return {"ours": cell.ours, "ours_std": cell.ours_std, "paper": cell.paper, "difference": cell.difference}


def _title(comparison: Comparison) -> str:
    setting = comparison.setting
    pi = f", π {setting.pi:g}" if setting.pi is not None else ""
    return f"Ours and the paper's, in %: {setting.id}, {setting.backbone}{pi} ({setting.table})"


def _method(row: ComparedRow) -> str:
    return row.method + (SHORT_SCHEDULE if row.has_short_schedule else "")


def _texts(row: ComparedRow, *, coloured: bool = False) -> list[str]:
    """Ours, the paper's and the difference in each metric; nothing at all where a metric is of no single set."""
    texts = []
    for metric in METRICS:
        cell = row.cells.get(metric)
        if cell is None:
            texts += ["", "", ""]
        else:
            difference = _difference(cell.difference)
            colour = _colour(metric, difference) if coloured else ""
            texts += [_figure(cell.ours), _figure(cell.paper), f"[{colour}]{difference}[/]" if colour else difference]
    return texts


def _colour(metric: str, difference: str) -> str:
    """Green where ours is better; none for what looks equal."""
    if difference == NOTHING or not difference.strip("+−0."):
        return ""
    return "green" if difference.startswith("−") == (metric in LOWER_IS_BETTER) else "red"


def _figure(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:.2f}"


def _difference(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:+.2f}".replace("-", "−")


def _notes(comparison: Comparison) -> list[str]:
    ours = f"mean of {comparison.n_seeds} seeds" if comparison.n_seeds > 1 else "one seed"
    n_runs = comparison.setting.n_runs
    theirs = f"mean of {n_runs} runs" if n_runs else "it does not say of how many runs"
    notes = [
        f"Paper: {PAPER}, {comparison.place}. Δ: ours less the paper's.",
        f"Ours: {ours}. The paper's: {theirs}.",
        STRICTER,
        FPR95_CONVENTION,
    ]
    if comparison.shorter:
        notes.append(f"Short schedule: {', '.join(comparison.shorter)}, as the paper's preset has it.")
    if comparison.setting.pi is None:
        notes.append("The paper does not say which share π of OOD data this table has.")
    if any(row.n_seeds == 0 for row in comparison.rows):
        notes.append(f"{NOTHING}: not reported, or a method that was not run here.")
    if comparison.not_evaluated:
        notes.append(f"In the paper's table, but not evaluated here: {', '.join(comparison.not_evaluated)}.")
    if comparison.only_ours:
        notes.append(f"Evaluated here, but not in the paper's table: {', '.join(comparison.only_ours)}.")
    return notes
