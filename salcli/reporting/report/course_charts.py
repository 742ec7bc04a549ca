"""Charts of how training went, and of what the theory says."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from salcli.reporting.figure_file import BLUE, GREEN, GREY, ORANGE, PURPLE
from salcli.reporting.report.charts import Chart, axes, figure_of
from salcli.reporting.report.score_charts import percent
from salcli.reporting.results_table import label
from salcli.sal.theory import required_discrepancy

if TYPE_CHECKING:
    import pandas as pd

TALL, FLAT = (3.4, 3.0), (3.4, 2.2)


def training_chart(network: str, curve: pd.DataFrame) -> Chart:
    """Loss and accuracy by epoch."""
    name = "ID classifier" if network == "classifier" else label(network)
    has_accuracy = "accuracy" in curve and curve["accuracy"].notna().any()
    with axes(TALL if has_accuracy else FLAT, rows=2 if has_accuracy else 1) as plots:
        plots[0].plot(curve["epoch"], curve["loss"], color=BLUE, linewidth=1.8, marker="." if len(curve) < 4 else "")
        plots[0].set_ylabel("loss")
        if (curve["loss"] > 0).all() and curve["loss"].max() > 20 * curve["loss"].min():
            plots[0].set_yscale("log")
        if has_accuracy:
            plots[1].plot(curve["epoch"], 100 * curve["accuracy"], color=GREEN, linewidth=1.8)
            plots[1].set_ylabel("ID accuracy, %")
        plots[-1].set_xlabel("epoch")
        plots[-1].locator_params(axis="x", integer=True)
    last = curve.iloc[-1]
    summary = f"{len(curve)} epochs; loss {curve['loss'].iloc[0]:.3g} at first, {last['loss']:.3g} at last"
    if has_accuracy:
        summary += f", accuracy on ID training data {percent(float(last['accuracy']))}"
    return Chart(f"training-{network}", name, f"{summary}.", figure_of(plots[0]))


def error_chart(theory: dict[str, Any]) -> Chart | None:
    """ERR_in and ERR_out against the threshold, true where they are known, and estimated."""
    kinds = (("errors", "-", ""), ("errors_estimated", "--", ", estimated"))
    there = [(theory[key], line, kind) for key, line, kind in kinds if theory.get(key)]
    if not there:
        return None
    threshold, words = float(theory["threshold"]), []
    with axes(TALL) as (plot,):
        for curve, line, kind in there:
            at = np.array(curve["threshold"], dtype=float)
            for side, colour in (("err_in", ORANGE), ("err_out", PURPLE)):
                values, name = np.array(curve[side], dtype=float), f"{side.replace('err', 'ERR')}{kind}"
                plot.plot(at, values, line, color=colour, linewidth=1.8, label=name)
                nearest = min(int(np.searchsorted(at, threshold)), len(at) - 1)
                words.append(f"{name} {percent(float(values[nearest]))}")
        if at.max() > 0 and at.min() >= 0:
            plot.set_xscale("log")
            plot.set_xlim(left=max(np.quantile(at[at > 0], 0.1), at.max() * 1e-6))
        plot.axvline(threshold, color=GREY, linestyle="--", linewidth=1.4)
        plot.annotate(
            "T", (threshold, 1), (4, 0), xycoords=("data", "axes fraction"), textcoords="offset points", va="top",
            weight="bold",
        )  # fmt: skip
        plot.set(xlabel="threshold", ylabel="share", ylim=(-0.02, 1.02))
        figure_of(plot).legend(loc="outside lower center", ncol=2)
    summary = f"At T = {threshold:.3g}: {', '.join(words)}."
    return Chart("theory-errors", "Errors of the filter against its threshold", summary, figure_of(plot))


def condition_chart(theory: dict[str, Any]) -> Chart:
    """ζ beside what Theorem 2 asks for."""
    pi, estimate = theory.get("pi"), theory.get("pi_estimate") or {}
    at = pi if pi is not None else estimate.get("pi", math.nan)
    zeta, debiased, required = (float(theory[key]) for key in ("zeta", "zeta_without_noise", "required"))
    with axes(TALL) as (plot,):
        shares = np.linspace(0, 1, 100)
        plot.plot(shares, [required_discrepancy(one) for one in shares], color=GREY, label="1.011 √π (Theorem 2)")
        bar = np.array([[zeta - debiased], [0.0]])
        name = "the true π" if pi is not None else "the estimated π"
        plot.errorbar(at, zeta, bar, fmt="o", color=PURPLE, capsize=4, label=f"ζ at {name}, down to debiased")
        plot.set(xlabel="π", ylabel="ζ", xlim=(-0.02, 1.02))
        plot.set_ylim(bottom=0)
        figure_of(plot).legend(loc="outside lower center")
    holds = "holds" if theory.get("condition_holds") else "does not hold"
    summary = f"ζ = {zeta:.3g}, debiased {debiased:.3g}; Theorem 2 asks for {required:.3g}: its condition {holds}."
    return Chart("theory-condition", "Condition on the discrepancy ζ", summary, figure_of(plot))
