"""What `salcli monitor` shows: a table and a figure of batches, and what they mean in words."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from salcli.detector.monitor import FOUND_SOME, MEANING, NORMAL, NOTHING, Monitoring
from salcli.errors import printable
from salcli.report.console import plain_table, shortened
from salcli.report.figures import BLUE, GREEN, GREY, VERMILION, house_style, write_figure

NAME_WIDTH = 24
MOST_TICKS, MOST_LINES = 12, 60
CALM = (NOTHING, NORMAL)


def monitor_table(found: Monitoring) -> Table:
    """One row for each batch."""
    columns = ("batch", "samples", "flagged", "outliers (π̂, 90%)", "p", "martingale", "verdict")
    table = plain_table("Batches", *columns)
    table.columns[-1].justify = "left"
    for batch in found.batches:
        outliers = "–" if batch.pi_high is None else f"at most {batch.pi_high:.2f}"
        if batch.pi is not None:
            outliers = f"{batch.pi:.2f} ({batch.pi_low:.2f} – {batch.pi_high:.2f})"
        table.add_row(
            Text(shortened(printable(batch.batch), NAME_WIDTH)),
            f"{batch.n:,}",
            f"{batch.flagged / batch.n:.1%}" if batch.n else "–",
            outliers,
            "–" if batch.p_value is None else f"{batch.p_value:.3f}" if batch.p_value >= 0.001 else "< 0.001",
            "–" if batch.verdict == NORMAL else power_of_ten(batch.log10_martingale),
            Text(batch.verdict, style="" if batch.verdict in CALM or not batch.n else "yellow"),
        )
    return table


def monitor_notes(found: Monitoring) -> list[str]:
    """What the words in the table mean, and whether there is an alarm."""
    level, kept = f"1/α = {1 / found.alpha:,.4g}", f"{1 - found.id_quantile:.4g}"
    has_baseline = any(batch.verdict == NORMAL for batch in found.batches)
    reference = f"the baseline of {found.n_reference:,} samples" if has_baseline else "the calibration sample"
    notes = [f"{word}: {MEANING[word]}" for word in MEANING if any(one.verdict == word for one in found.batches)]
    for batch in found.batches:
        if batch.verdict == FOUND_SOME and batch.pi_low:
            least = f"at least {round(batch.pi_low * batch.n):,} of {batch.n:,} samples are outliers (95%)"
            notes.append(f"{printable(batch.batch)}: {least}")
    if has_baseline:
        notes.append("π̂ is what is beyond the baseline")
    notes.append(
        f"flagged: {kept} of ID data are. p: of no outliers, against {reference}, adjusted for {len(found.batches)} "
        "batches"
    )
    if found.alarm:
        highest = power_of_ten(float(found.wealth.max()))
        notes.append(
            f"ALARM at sample {found.alarm.sample:,} of the stream, in {printable(found.alarm.batch)}: the martingale "
            f"reached {level} (highest {highest}), which a stream like {reference} does with a chance of at most "
            f"{'' if found.is_exact else 'about '}{found.alpha:g}, however long it is"
        )
    else:
        notes.append(f"no alarm: in {len(found.wealth):,} samples the martingale never reached {level}")
    return notes


def write_monitor_figure(found: Monitoring, path: Path) -> None:
    """Above: shares of each batch. Below: the martingale, with as much room for each batch as for the others."""
    batches = found.batches
    with house_style():
        figure = Figure(figsize=(7.5, 5), layout="constrained")
        shares, wealth = figure.subplots(2, 1, sharex=True)
        x = np.arange(len(batches))
        known = [i for i, batch in enumerate(batches) if batch.n]
        flagged = [batches[i].flagged / batches[i].n for i in known]
        bounded = [i for i in known if batches[i].pi_high is not None]
        high = np.array([batches[i].pi_high for i in bounded], float)
        low = np.array([batches[i].pi_low or 0.0 for i in bounded], float)
        estimated = [i for i in bounded if batches[i].pi is not None]
        shares.axhline(1 - found.id_quantile, color=GREY, linestyle="--", linewidth=1, label="flagged of ID data")
        shares.plot(known, flagged, "o", color=BLUE, label="flagged")
        shares.vlines(np.array(bounded) + 0.15, low, high, color=VERMILION, linewidth=1, label="outliers, 90% interval")
        shares.plot(
            np.array(estimated) + 0.15, [batches[i].pi for i in estimated], "s", color=VERMILION, markersize=4,
            label="π̂, where some are found",
        )  # fmt: skip
        shares.set(ylabel="share of samples", ylim=(-0.02, 1.1 * max(0.2, *high, *flagged)))
        start = 0
        for i, batch in enumerate(batches):
            if batch.verdict == NORMAL or not batch.n:
                continue
            own = found.wealth[start : start + batch.n]
            at = i - 0.5 + (np.arange(len(own)) + 1) / len(own)
            before = found.wealth[start - 1] if start else 0.0
            wealth.plot([i - 0.5, *at], [before, *own], color=GREEN, linewidth=1.4)
            start += batch.n
        wealth.axhline(-math.log10(found.alpha), color=VERMILION, linestyle="--", linewidth=1.2)
        wealth.annotate(
            f"alarm at 1/α = {1 / found.alpha:,.4g}", (0, -math.log10(found.alpha)), (4, 3),
            xycoords=("axes fraction", "data"), textcoords="offset points", color=VERMILION, fontsize=9,
        )  # fmt: skip
        wealth.axhline(0, color=GREY, linewidth=0.6)
        wealth.set_ylabel("martingale, log₁₀")
        wealth.set_ylim(min(-1.0, float(found.wealth.min(initial=0)) - 0.3), None)
        for plot in (shares, wealth) if len(batches) <= MOST_LINES else ():
            for edge in x[1:] - 0.5:
                plot.axvline(edge, color=GREY, linewidth=0.3, alpha=0.5)
        ticks = x[:: -(-len(batches) // MOST_TICKS)]
        names = [shortened(printable(batches[i].batch), NAME_WIDTH).replace("$", r"\$") for i in ticks]
        wealth.set_xticks(ticks, names, rotation=30, ha="right")
        wealth.set_xlim(-0.6, len(batches) - 0.4)
        figure.legend(*shares.get_legend_handles_labels(), loc="outside upper center", ncol=4)
        write_figure(figure, [path])


def power_of_ten(exponent: float) -> str:
    """A number that may be too large for a float."""
    return f"{10**exponent:,.3g}" if -2 <= exponent < 5 else f"1e{exponent:+.0f}"
