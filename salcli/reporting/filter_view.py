"""What `filter` shows: the scores, the candidates, the errors, and how far to trust them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from salcli.reporting.auto_table import auto_table, shown_share
from salcli.reporting.histogram import two_histograms
from salcli.reporting.score_names import score_label
from salcli.reporting.stage_tables import plain_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from salcli.params import FilterParams
    from salcli.stages.filter import Filtered


def filter_view(done: Sequence[Filtered], params: FilterParams) -> Group:
    """Histograms first, then the figures, then warnings."""
    parts: list[RenderableType] = []
    for result in done:
        candidates = result.candidates
        if result.comparison:
            parts.append(auto_table(result.comparison, f"{result.ood}, seed {result.seed}"))
        parts.append(Text(f"{score_label(candidates.score_name)} with {result.ood}, seed {result.seed}", style="bold"))
        names = ("wild", f"calibration ({params.calibration})")
        parts.append(two_histograms(candidates.wild_score, candidates.calibration_score, names, candidates.threshold))
    parts.append(_figures(done, params))
    parts += [Text(f"warning: {warning}", style="bold yellow") for warning in _warnings(done)]
    return Group(*parts)


def _score_name(params: FilterParams) -> str:
    return "the chosen score" if params.score == "auto" else score_label(params.score)


def _figures(done: Sequence[Filtered], params: FilterParams) -> Table:
    table = plain_table(
        f"Candidate outliers: {_score_name(params)} above the {params.threshold_quantile:g} quantile",
        "wild OOD", "seed", "T", "candidates", "of wild", "ERR_in", "ERR_out", "ID risk", "ID acc.",
    )  # fmt: skip
    for result in done:
        errors = result.errors
        table.add_row(
            result.ood,
            str(result.seed),
            f"{result.candidates.threshold:.4g}",
            f"{len(result.candidates.index):,}",
            f"{len(result.candidates.wild_score):,}",
            shown_share(errors.err_in if errors else None),
            shown_share(errors.err_out if errors else None),
            f"{result.fit.train_risk:.4f}",
            f"{result.fit.calibration_accuracy:.1%}",
        )
    table.caption = (
        "ERR_in: wild ID taken for outliers; ERR_out: wild OOD missed (compared with the truth afterwards).\n"
        "ID risk: mean loss on ID training data; ID acc.: on calibration data."
    )
    table.caption_justify = "left"
    return table


def _warnings(done: Sequence[Filtered]) -> list[str]:
    warnings = []
    for result in done:
        run = f"{result.ood}, seed {result.seed}"
        if result.fit.is_poor and result.candidates.score_name == "sal":
            warnings.append(
                f"{run}: the classifier gets {result.fit.train_accuracy:.1%} of ID training and "
                f"{result.fit.calibration_accuracy:.1%} of calibration data right. τ separates well only where the "
                "ID risk is small; train the classifier longer, or trust the candidates little."
            )
        if result.n_unscored:
            warnings.append(
                f"{run}: {result.n_unscored} calibration samples are predicted as classes that no wild sample is, "
                "and were left out."
            )
    return warnings
