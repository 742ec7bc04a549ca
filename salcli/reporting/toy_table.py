"""What `toy` shows: the errors of the filter over seeds, beside the paper's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from salcli.paper.figures import figures
from salcli.reporting.stage_tables import plain_table
from salcli.stages.toy import CALIBRATIONS, OUTLIERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from salcli.stages.toy import ToyRun

WHOSE = {"train": "the paper's text", "holdout": "our default", "id-svd": "the authors' code"}


def toy_table(done: Sequence[ToyRun]) -> Table:
    """One row for each scenario and each way to calibrate the threshold."""
    n_seeds = len({result.seed for result in done})
    table = plain_table(
        f"The paper's example in the plane, {n_seeds} seed{'s' if n_seeds > 1 else ''}",
        "outliers", "T calibrated on", "ERR_in", "from", "to", "paper", "ERR_out",
    )  # fmt: skip
    paper = paper_err_in()
    for scenario in OUTLIERS:
        for calibration in CALIBRATIONS:
            errors = [result.errors(calibration) for result in done if result.scenario == scenario]
            err_in, err_out = ([getattr(one, name) for one in errors] for name in ("err_in", "err_out"))
            table.add_row(
                scenario,
                f"{calibration} ({WHOSE[calibration]})",
                _mean_and_std(err_in),
                f"{min(err_in):.1%}",
                f"{max(err_in):.1%}",
                f"{paper[scenario]:.1%}" if calibration == "train" else "",
                _mean_and_std(err_out),
            )
    table.caption = (
        "ERR_in: wild ID taken for outliers; ERR_out: wild OOD missed. Mean ± std over seeds;\n"
        "from, to: smallest and largest. The paper shows one run, whose seed is not known."
    )
    table.caption_justify = "left"
    return table


def paper_err_in() -> dict[str, float]:
    """ERR_in of both scenarios in the paper."""
    return {one.test: one.value for one in figures() if one.setting.table == "toy" and one.metric == "err_in"}


def _mean_and_std(values: Sequence[float]) -> str:
    spread = f" ± {np.std(values, ddof=1):.1%}" if len(values) > 1 else ""
    return f"{np.mean(values):.1%}{spread}"
