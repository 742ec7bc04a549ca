"""Charts of the HTML report: drawn once, shown in light and dark, and written as PNG and SVG if asked for."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from salcli.report.figures import (
    BLUE,
    FORMATS,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    VERMILION,
    densities,
    draw_condition,
    draw_errors,
    draw_gradients,
    house_style,
    linear_bins,
    mark_threshold,
    score_bins,
    write_figure,
)
from salcli.report.findings import Evaluation, MethodScores
from salcli.report.stage_tables import score_label, share_text

if TYPE_CHECKING:
    import pandas as pd

    from salcli.store.formats import Candidates

INK, LINE = "#22262c", "#c8cdd4"
SMALL, WIDE, TALL, FLAT = (2.9, 2.2), (4.4, 2.8), (3.4, 3.0), (3.4, 2.2)  # inches; a phone shows them at their size
# what the style sheet of the page has a light and a dark color for
VARIABLES = {
    INK: "currentColor", LINE: "var(--line)", ORANGE: "var(--orange)", PURPLE: "var(--purple)", GREEN: "var(--green)",
    BLUE: "var(--blue)", GREY: "var(--grey)", VERMILION: "var(--vermilion)",
}  # fmt: skip
INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
SMALLER: dict[Any, Any] = {**dict.fromkeys(INKED, INK), "font.size": 9, "legend.fontsize": 8, "hatch.linewidth": 0.6}
TAIL = 0.005  # share of the scores at either end that may be in the outermost bin
ROC_COLORS = (BLUE, ORANGE, PURPLE, VERMILION)
ROC_DASHES = ("--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
# lone surrogates stand for bytes that are not UTF-8; XML and browsers allow no control characters
NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
LONGEST_NAME = 60


@dataclass(frozen=True)
class Chart:
    """A figure, and what it says in words."""

    name: str  # unique in the page
    title: str
    summary: str
    figure: Figure

    @property
    def slug(self) -> str:
        """A name for files and for the ids in its SVG."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    @cached_property
    def svg(self) -> Markup:
        """For the page: colors are variables of the style sheet, and its ids differ from those of other charts."""
        text = io.StringIO()
        with _drawing():
            self.figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        svg = text.getvalue()
        svg = svg[svg.index("<svg") :]
        for pattern in (r"<metadata>.*?</metadata>", r'<style type="text/css">.*?</style>', r"<!--.*?-->"):
            svg = re.sub(pattern, "", svg, flags=re.DOTALL)
        svg = re.sub(r'(?<=\bid=")|(?<=href="#)|(?<=url\(#)', f"{self.slug}-", svg)
        svg = re.sub(r"""(font: [^'";]*)'DejaVu Sans'[^;"]*""", r"\1var(--sans)", svg)
        for color, variable in VARIABLES.items():
            svg = re.sub(color, variable, svg, flags=re.IGNORECASE)
        return Markup(svg.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1))

    def write(self, folder: Path) -> list[Path]:
        """As PNG and SVG."""
        paths = [folder / f"{self.slug}.{kind}" for kind in FORMATS]
        with _drawing():
            write_figure(self.figure, paths)
        return paths


def clean(text: str) -> str:
    """Text that HTML and SVG can hold: what is not text becomes �. It still has to be escaped."""
    return NOT_TEXT.sub("\N{REPLACEMENT CHARACTER}", text)


def compact(number: float) -> str:
    """Three digits, with a real minus."""
    return f"{number:.3g}".replace("-", "−")


# --- scores


def tau_chart(candidates: Candidates) -> Chart:
    """The filter's score of wild and of calibration data, with T."""
    wild, calibration, threshold = candidates.wild_score, candidates.calibration_score, candidates.threshold
    with _axes(WIDE) as (figure, plot):
        samples = [(calibration, f"calibration ({len(calibration):,})", BLUE), (wild, f"wild ({len(wild):,})", ORANGE)]
        densities(plot, [sample for sample in samples if len(sample[0])], score_bins(plot, candidates))
        mark_threshold(plot, threshold, f"T = {compact(threshold)}")
        plot.set_ylabel("share of samples")
        _legend(figure)
    n_above, n_held_out = len(candidates.index), int((calibration > threshold).sum())
    summary = (
        f"{n_above:,} of {len(wild):,} wild samples ({share_text(n_above / max(1, len(wild)))}) are above T = "
        f"{compact(threshold)}, and {n_held_out:,} of {len(calibration):,} calibration samples "
        f"({share_text(n_held_out / max(1, len(calibration)))})."
    )
    title = f"{score_label(candidates.score_name)} of wild and calibration data"
    return Chart("filter-scores", title, summary, figure)


def roc_overview(evaluation: Evaluation) -> Chart:
    """All methods in one chart: SAL and the best others stand out."""
    ranked, main = [one for one in evaluation.methods if one.roc], evaluation.main
    shown = [one for one in ranked if one is not main][: len(ROC_COLORS)]
    with _axes(WIDE) as (figure, plot):
        for one in ranked:
            fpr, tpr = one.roc or (np.empty(0), np.empty(0))
            name = _name_in_figure(one.label)
            if one is main:
                plot.plot(fpr, tpr, color=GREEN, linewidth=2.4, label=name, zorder=4)
            elif one in shown:
                at = shown.index(one)
                color, dashes = ROC_COLORS[at], ROC_DASHES[at]
                plot.plot(fpr, tpr, color=color, linestyle=dashes, linewidth=1.4, label=name, zorder=3)
            else:
                plot.plot(fpr, tpr, color=LINE, linewidth=1, zorder=2)
        if len(ranked) > len(shown) + 1:
            plot.plot([], [], color=LINE, label=f"{len(ranked) - len(shown) - 1} others")
        _roc_axes(plot)
        plot.legend(loc="lower right")
    best = "; ".join(_sentence(one) for one in [main, *shown])
    return Chart("roc-all", f"ROC of all methods on {evaluation.test_set}", f"{best}.", figure)


def roc_chart(one: MethodScores) -> Chart:
    """One method's ROC, with the point of FPR95."""
    assert one.roc
    with _axes() as (figure, plot):
        plot.plot(*one.roc, color=GREEN, linewidth=2)
        fpr95 = float(np.mean(one.ood >= one.threshold))
        kept = float(np.mean(one.id >= one.threshold))
        plot.plot([fpr95], [kept], "o", color=VERMILION, markersize=6, zorder=5, clip_on=False)
        plot.text(0.97, 0.06, f"FPR95 {share_text(fpr95)}", ha="right", transform=plot.transAxes)
        _roc_axes(plot)
    return Chart(f"roc-{one.method}", f"ROC of {one.label}", f"{_sentence(one)}.", figure)


def histogram_chart(one: MethodScores) -> Chart:
    """One method's scores of ID and OOD test data, with the threshold that keeps 95% of ID."""
    threshold = one.threshold
    with _axes() as (figure, plot):
        samples = [(one.id, "ID test", ORANGE), (one.ood, "OOD test", PURPLE)]
        samples = [sample for sample in samples if len(sample[0])]
        # both sides count alike, however many samples they have
        ends = [[_quantile(values, share) for values, _, _ in samples] for share in (TAIL, 1 - TAIL)]
        bins = linear_bins(min(ends[0]), max(ends[1]))
        densities(plot, samples, bins)
        mark_threshold(plot, float(np.clip(threshold, bins[0], bins[-1])), "")
        plot.set(xlabel="score (higher: more ID-like)", ylabel="share", xlim=(bins[0], bins[-1]))
        for axis in ("x", "y"):
            plot.locator_params(axis=axis, nbins=4)
        _legend(figure)
    summary = (
        f"The threshold {compact(threshold)} keeps {share_text(float(np.mean(one.id >= threshold)))} of ID test data"
    )
    if len(one.ood):
        summary += f", and {share_text(float(np.mean(one.ood >= threshold)))} of OOD test data pass it"
    return Chart(f"scores-{one.method}", f"Scores of {one.label}", f"{summary}.", figure)


# --- training and theory


def training_chart(network: str, name: str, curve: pd.DataFrame) -> Chart:
    """Loss and accuracy by epoch."""
    has_accuracy = "accuracy" in curve and bool(curve["accuracy"].notna().any())
    with _axes(TALL if has_accuracy else FLAT, rows=2 if has_accuracy else 1) as (figure, *plots):
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
        summary += f", accuracy on ID training data {share_text(float(last['accuracy']))}"
    return Chart(f"training-{network}", name, f"{summary}.", figure)


def theory_charts(theory: dict[str, Any]) -> list[Chart]:
    """The gradients, the errors of the filter against its threshold, and ζ beside what Theorem 2 asks for."""
    charts = []
    if theory.get("gradients"):
        with _axes(TALL) as (figure, plot):
            theta = draw_gradients(plot, theory)
            _legend(figure)
        outliers = "OOD data" if theory["gradients"]["by_truth"] else "samples with τ > T"
        summary = (
            f"Gradients of wild data around the mean ID gradient ∇̄ and the singular vector v. The mean gradient of "
            f"{outliers} is at θ = {theta} to v."
        )
        charts.append(Chart("theory-gradients", "Gradients of wild data (Figure 1)", summary, figure))
    with _axes(TALL) as (figure, plot):
        errors = draw_errors(plot, theory)
        _legend(figure)
    if errors:
        shown = ", ".join(f"{name} {share_text(value)}" for name, value in errors.items())
        summary = f"At T = {float(theory['threshold']):.3g}: {shown}."
        if theory.get("contamination") is not None:
            summary += f" {share_text(theory['contamination'])} of the candidates are ID data (contamination)."
        charts.append(Chart("theory-errors", "Errors of the filter against its threshold", summary, figure))
    with _axes(TALL) as (figure, plot):
        draw_condition(plot, theory)
        _legend(figure, n_columns=1)
    zeta, debiased, required = (float(theory[key]) for key in ("zeta", "zeta_without_noise", "required"))
    holds = "holds" if theory.get("condition_holds") else "does not hold"
    summary = f"ζ = {zeta:.3g}, debiased {debiased:.3g}; Theorem 2 asks for {required:.3g}: its condition {holds}."
    if "zeta_pairwise" in theory:
        pairwise = float(theory["zeta_pairwise"])
        summary += f" The authors' code would print ζ = {pairwise:.3g}, the mean pairwise distance."
    charts.append(Chart("theory-condition", "Condition on the discrepancy ζ", summary, figure))
    return charts


# --- drawing


@contextmanager
def _drawing() -> Iterator[None]:
    """The house style, a little smaller; a character that the font lacks is drawn as a box, without a warning."""
    with house_style(), rc_context(SMALLER), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


@contextmanager
def _axes(size: tuple[float, float] = SMALL, rows: int = 1) -> Iterator[Any]:
    """A figure and its axes, one below the other."""
    with _drawing():
        figure = Figure(figsize=size, layout="constrained")
        yield figure, *figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]


def _legend(figure: Figure, n_columns: int = 2) -> None:
    if figure.axes[0].get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncol=n_columns)


def _roc_axes(plot: Axes) -> None:
    plot.axhline(0.95, color=GREY, linestyle="--", linewidth=1, zorder=1)
    plot.set(xlabel="OOD that pass (FPR)", ylabel="ID that pass (TPR)", xlim=(-0.01, 1), ylim=(0, 1.02))


def _sentence(one: MethodScores) -> str:
    return f"{one.label}: AUROC {share_text(one.metrics.get('auroc'))}, FPR95 {share_text(one.metrics.get('fpr95'))}"


def _name_in_figure(text: str) -> str:
    """One short line, in which no character is taken for mathematics."""
    line = " ".join(clean(text).split())
    short = line if len(line) <= LONGEST_NAME else f"{line[: LONGEST_NAME - 1]}…"
    return short.replace("$", r"\$")


def _quantile(values: np.ndarray, share: float) -> float:
    finite = values[np.isfinite(values)]
    return float(np.quantile(finite, share)) if len(finite) else 0.0
