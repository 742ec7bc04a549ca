"""Charts of scores: of the filter on wild data, and of every method on test data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from salcli.reporting.figure_file import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION, densities, log_floor
from salcli.reporting.report.charts import LINE, WIDE, Chart, axes, figure_of
from salcli.reporting.report.safe_text import name_in_figure
from salcli.reporting.results_table import label
from salcli.reporting.score_names import score_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from salcli.artifacts.candidates import Candidates
    from salcli.reporting.report.experiment import Evaluation, MethodScores

N_BINS = 40
TAIL = 0.005  # share of the scores at either end that may lie in the outermost bin
COLOURS = (BLUE, ORANGE, PURPLE, VERMILION)
DASHES = ("--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))


def percent(share: float | None) -> str:
    """A share as people read it."""
    return "unknown" if share is None or share != share else f"{share:.1%}"


def compact(number: float) -> str:
    """Three digits, with a real minus."""
    return f"{number:.3g}".replace("-", "−")


def tau_chart(candidates: Candidates) -> Chart:
    """The filter's score of wild and of calibration data, with T."""
    wild, calibration, threshold = candidates.wild_score, candidates.calibration_score, candidates.threshold
    name = score_label(candidates.score_name)
    with axes(WIDE) as (plot,):
        samples = [(calibration, f"calibration ({len(calibration):,})", BLUE), (wild, f"wild ({len(wild):,})", ORANGE)]
        finite = [values[np.isfinite(values)] for values in (wild, calibration)]
        if candidates.score_name == "sal" and max(part.max(initial=0) for part in finite) > 0:
            plot.set_xscale("log")
            bins = np.geomspace(log_floor(finite), max(part.max() for part in finite if len(part)), N_BINS + 1)
        else:
            bins = _bins(np.concatenate(finite))
        densities(plot, [sample for sample in samples if len(sample[0])], bins)
        _mark(plot, threshold, f"T = {compact(threshold)}")
        plot.set(xlabel=f"{name} (higher: more of an outlier)", ylabel="share of samples", xlim=(bins[0], bins[-1]))
        _legend(plot)
    n_above, n_held_out = len(candidates.index), int((calibration > threshold).sum())
    summary = (
        f"{n_above:,} of {len(wild):,} wild samples ({percent(n_above / max(1, len(wild)))}) lie above T = "
        f"{compact(threshold)}, and {n_held_out:,} of {len(calibration):,} calibration samples "
        f"({percent(n_held_out / max(1, len(calibration)))})."
    )
    return Chart("filter-scores", f"{name} of wild and calibration data", summary, figure_of(plot))


def roc_overview(evaluation: Evaluation) -> Chart:
    """All methods in one chart: SAL and the best others stand out."""
    ranked = [one for one in evaluation.methods if one.roc]
    main = evaluation.main
    shown = [one for one in ranked if one is not main][: len(COLOURS)]
    with axes(WIDE) as (plot,):
        for one in ranked:
            fpr, tpr = one.roc or (np.empty(0), np.empty(0))
            if one is main:
                plot.plot(fpr, tpr, color=GREEN, linewidth=2.4, label=_short(one), zorder=4)
            elif one in shown:
                at = shown.index(one)
                plot.plot(fpr, tpr, color=COLOURS[at], linestyle=DASHES[at], linewidth=1.4, label=_short(one), zorder=3)
            else:
                plot.plot(fpr, tpr, color=LINE, linewidth=1, zorder=2)
        if len(ranked) > len(shown) + 1:
            plot.plot([], [], color=LINE, label=f"{len(ranked) - len(shown) - 1} others")
        _roc_axes(plot)
        plot.legend(loc="lower right")
    best = "; ".join(_sentence(one) for one in [main, *shown])
    return Chart("roc-all", f"ROC of all methods on {evaluation.test_set}", f"{best}.", figure_of(plot))


def roc_chart(one: MethodScores) -> Chart:
    """One method's ROC, with the point that FPR95 is about."""
    assert one.roc
    with axes() as (plot,):
        plot.plot(*one.roc, color=GREEN, linewidth=2)
        fpr95 = float(np.mean(one.ood >= one.threshold))
        kept = float(np.mean(one.id >= one.threshold))
        plot.plot([fpr95], [kept], "o", color=VERMILION, markersize=6, zorder=5, clip_on=False)
        plot.text(0.97, 0.06, f"FPR95 {percent(fpr95)}", ha="right", transform=plot.transAxes)
        _roc_axes(plot)
    return Chart(f"roc-{one.method}", f"ROC of {label(one.method)}", f"{_sentence(one)}.", figure_of(plot))


def histogram_chart(one: MethodScores) -> Chart:
    """One method's scores of ID and OOD test data, with the threshold that keeps 95% of ID."""
    threshold = one.threshold
    with axes() as (plot,):
        samples = [(one.id, "ID test", ORANGE)]
        if len(one.ood):
            samples.append((one.ood, "OOD test", PURPLE))
        # both sides count alike, however many samples they have
        low, high = (
            pick(_quantile(values, share) for values, _, _ in samples) for pick, share in ((min, TAIL), (max, 1 - TAIL))
        )
        bins = np.linspace(low, high if high > low else low + 1, N_BINS + 1)
        densities(plot, samples, bins)
        _mark(plot, float(np.clip(threshold, bins[0], bins[-1])), "")
        plot.set(xlabel="score (higher: more ID-like)", ylabel="share", xlim=(bins[0], bins[-1]))
        plot.locator_params(axis="x", nbins=4)
        plot.locator_params(axis="y", nbins=4)
        _legend(plot)
    summary = f"The threshold {compact(threshold)} keeps {percent(float(np.mean(one.id >= threshold)))} of ID test data"
    if len(one.ood):
        summary += f", and {percent(float(np.mean(one.ood >= threshold)))} of OOD test data pass it"
    return Chart(f"scores-{one.method}", f"Scores of {label(one.method)}", f"{summary}.", figure_of(plot))


def _sentence(one: MethodScores) -> str:
    figures = one.figures
    return f"{label(one.method)}: AUROC {percent(figures.get('auroc'))}, FPR95 {percent(figures.get('fpr95'))}"


def _short(one: MethodScores) -> str:
    return name_in_figure(label(one.method))


def _bins(values: np.ndarray) -> np.ndarray:
    low, high = float(values.min()), float(values.max())
    return np.linspace(low, high if high > low else low + 1, N_BINS + 1)


def _quantile(values: np.ndarray, share: float) -> float:
    finite = values[np.isfinite(values)]
    return float(np.quantile(finite, share)) if len(finite) else 0.0


def _mark(plot: Axes, threshold: float, name: str) -> None:
    plot.axvline(threshold, color=GREY, linestyle="--", linewidth=1.6, zorder=5)
    plot.annotate(
        name, (threshold, 1), (4, 0), xycoords=("data", "axes fraction"), textcoords="offset points", va="top",
        weight="bold",
    )  # fmt: skip


def _roc_axes(plot: Axes) -> None:
    plot.axhline(0.95, color=GREY, linestyle="--", linewidth=1, zorder=1)
    plot.set(xlabel="OOD that pass (FPR)", ylabel="ID that pass (TPR)", xlim=(-0.01, 1), ylim=(0, 1.02))


def _legend(plot: Axes) -> None:
    figure_of(plot).legend(loc="outside lower center", ncol=2)
