"""What `review` shows: how many samples each list holds."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from salcli.reporting.stage_tables import plain_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from salcli.artifacts.review import ReviewRow


def review_table(rows: Sequence[ReviewRow]) -> Table:
    """One row for each experiment."""
    table = plain_table("For review", "wild OOD", "seed", "candidates", "just below T", "highest score", "lowest")
    for (ood, seed), group in groupby(rows, key=lambda row: (row.ood, row.seed)):
        own = list(group)
        n_candidates, scores = sum(bool(row.decision) for row in own), [row.score for row in own]
        table.add_row(
            ood, str(seed), f"{n_candidates:,}", f"{len(own) - n_candidates:,}", f"{scores[0]:.4g}", f"{scores[-1]:.4g}"
        )
    return table
