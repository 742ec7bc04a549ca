"""Two sets of runs side by side: what a change did to the figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Table

from salcli.errors import MissingArtifactError
from salcli.reporting.results import LOWER_IS_BETTER, METRICS
from salcli.reporting.results_table import label

if TYPE_CHECKING:
    import pandas as pd

    from salcli.reporting.results import Results

RUN = ["ood", "test_set", "seed", "method"]
SHOWN = ("fpr95", "auroc", "id_accuracy")


def compare_table(before: Results, after: Results) -> Table:
    """Means over the seeds that both have; only methods whose figures changed."""
    both = before.runs.merge(after.runs, on=RUN, suffixes=("_before", "_after"))
    if both.empty:
        raise MissingArtifactError("runs/ and scratch/ have no evaluation in common; make both with: salcli evaluate")
    groups = both.groupby(["ood", "test_set", "method"], sort=False)
    table = Table(title="Before → after, in %", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.title_justify, table.title_style = "left", "bold"
    for place, name in enumerate(["OOD test set", "method", "seeds", *(METRICS[metric] for metric in SHOWN)]):
        table.add_column(name, justify="right" if place > 1 else "left")
    n_same = 0
    for (wild, test, method), runs in groups:
        means = runs[[f"{metric}_{side}" for metric in SHOWN for side in ("before", "after")]].astype(float).mean()
        cells = [_cell(means, metric) for metric in SHOWN]
        if all("→" not in cell for cell in cells):
            n_same += 1
            continue
        name = str(test) if test == wild else f"{test} (wild {wild})"
        table.add_row(escape(name), escape(label(str(method))), str(len(runs)), *cells)
    notes = ["Before: what `dvc repro` built; after: the runs in scratch/; means over the seeds that both have."]
    if n_same:
        notes.append(f"{n_same} rows with the same figures are left out.")
    table.caption, table.caption_justify = "\n".join(notes), "left"
    return table


def _cell(means: pd.Series[float], metric: str) -> str:
    before, after = (float(means[f"{metric}_{side}"]) for side in ("before", "after"))
    was, now = (f"{value:.1f}" if value == value else "unknown" for value in (before, after))  # NaN is no figure
    if was == now:
        return was
    better = (after < before) == (metric in LOWER_IS_BETTER)
    return f"{was} → [{'green' if better else 'red'}]{now}[/]"
