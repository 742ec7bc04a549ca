"""What `theory` shows: the condition on ζ, and the scores and errors that the theorems bound."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Group

from salcli.reporting.auto_table import shown_share
from salcli.reporting.stage_tables import plain_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from salcli.stages.theory import TheoryCheck


def theory_view(done: Sequence[TheoryCheck]) -> Group:
    """Two tables of one row for each experiment."""
    return Group(_discrepancies(done), _scores(done))


def _discrepancies(done: Sequence[TheoryCheck]) -> Table:
    table = plain_table(
        "Discrepancy ζ of ID and wild gradients (Definition 2)",
        "wild OOD", "seed", "π", "π̂", "by", "ζ", "debiased", "ζ train", "1.011 √π", "holds",
    )  # fmt: skip
    for result in done:
        zeta = result.held_out
        table.add_row(
            result.ood,
            str(result.seed),
            _figure(result.truth.pi if result.truth else None),
            _figure(result.mixture.pi),
            result.mixture.score,
            _figure(zeta.zeta),
            _figure(zeta.without_noise),
            _figure(result.on_training_data.zeta),
            _figure(result.required),
            "yes" if result.condition_holds else "no",
        )
    table.caption = (
        "ζ: P_in is calibration data, with predicted labels; ζ train: training data.\n"
        "debiased: less what two samples of one distribution show; has to reach 1.011 √π (Theorem 2).\n"
        "π̂: estimated without the truth, by the score that separates best."
    )
    table.caption_justify = "left"
    return table


def _scores(done: Sequence[TheoryCheck]) -> Table:
    table = plain_table(
        "Mean τ (Theorem 4) and errors of the filter (Theorem 1)",
        "wild OOD", "seed", "τ wild ID", "τ wild OOD", "bound", "ERR_in", "est.", "ERR_out", "est.",
    )  # fmt: skip
    for result in done:
        truth = result.truth
        true_errors = result.errors_at_threshold(truth.errors if truth else None)
        estimated = result.errors_at_threshold(result.estimated)
        table.add_row(
            result.ood,
            str(result.seed),
            _figure(truth.mean_tau_id if truth else None),
            _figure(truth.mean_tau_ood if truth else None),
            _figure(result.bound),
            *(shown_share(errors[side] if errors else None) for side in (0, 1) for errors in (true_errors, estimated)),
        )
    table.caption = (
        "τ: of Eq. 4–7, one ∇̄ and one v for all classes; bound: 0.98 ζ²/π, for OOD (Theorem 4).\n"
        "ERR_in, ERR_out: of the filter's own scores and T; est.: without the truth."
    )
    table.caption_justify = "left"
    return table


def _figure(value: float | None) -> str:
    return "unknown" if value is None else "–" if math.isnan(value) else f"{value:.3g}"
