"""The table of `filter.score: auto`: every score, what speaks for it, and which one was chosen."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from salcli.reporting.score_names import score_label
from salcli.reporting.stage_tables import plain_table
from salcli.sal.excess import CONFIDENCE, N_RESAMPLES

if TYPE_CHECKING:
    from rich.table import Table

    from salcli.stages.auto_score import Comparison


def auto_table(comparison: Comparison, experiment: str) -> Table:
    """τ first, then the others by their excess."""
    table = plain_table(
        f"Every score as separator, {experiment}",
        "score", "T", "candidates", "excess", "± std", "beats τ", "ERR_in", "ERR_out", "AUROC",
    )  # fmt: skip
    first, *others = comparison.trials
    for trial in (first, *sorted(others, key=lambda other: -other.excess)):
        is_chosen, truth = trial.score == comparison.chosen, comparison.diagnosis.get(trial.score)
        table.add_row(
            score_label(trial.score) + (" ◀" if is_chosen else ""),
            f"{trial.threshold:.4g}",
            f"{trial.n_candidates:,}",
            f"{trial.excess:.1%}",
            f"{trial.excess_std:.1%}",
            "–" if trial is first else f"{trial.wins_over_tau:.1%}",
            shown_share(truth.errors.err_in if truth else None),
            shown_share(truth.errors.err_out if truth else None),
            shown_share(truth.auroc if truth else None),
            style="bold" if is_chosen else "",
        )
    table.caption = (
        "◀: chosen. excess: share of wild samples above T, less that of calibration samples.\n"
        f"± std, beats τ: over {N_RESAMPLES} resamples. τ stays unless another beats it in {CONFIDENCE:.0%} of them;\n"
        "of several such, the one with the largest excess is taken.\n"
        "ERR_in, ERR_out, AUROC: compared with the truth afterwards; they choose nothing."
    )
    table.caption_justify = "left"
    return table


def shown_share(value: float | None) -> str:
    """In percent; unknown where there is no truth."""
    return "unknown" if value is None else "–" if math.isnan(value) else f"{value:.1%}"
