"""Figures and the charts of the HTML report: one look, colors for color-blind people, the same bytes."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context, rcParamsDefault
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray

from salcli.conformal.evidence import longest_certified
from salcli.errors import printable
from salcli.report.paper import ERRORS, paper_sal_by_pi
from salcli.report.stage_tables import score_label, share_text
from salcli.store.files import Found, atomic_path, reading_json
from salcli.store.layout import SAL

if TYPE_CHECKING:  # slow to load
    import pandas as pd
    from torch import Tensor

    from salcli.params.schema import Params
    from salcli.pipeline.theory import TheoryCheck
    from salcli.pipeline.toy import ToyRun
    from salcli.report.page_data import Findings, MethodScores
    from salcli.report.results import Results
    from salcli.store.formats import Candidates

# Okabe and Ito's palette, used as in the paper's figures: inliers orange, outliers purple, filtered green.
ORANGE, PURPLE, GREEN, BLUE, GREY = "#E69F00", "#8B3A92", "#009E73", "#0072B2", "#555555"
VERMILION = "#D55E00"
FORMATS = ("png", "svg")
Sample = tuple[Any, str, str]  # values, name, color
N_BINS = 40

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.hashsalt": "salcli",  # or the ids inside an SVG would be random
    "svg.fonttype": "none",  # text stays text: small files that can be searched
}


def house_style() -> AbstractContextManager[None]:
    """Inside, figures look the same whatever the user's matplotlibrc says."""
    settings: dict[Any, Any] = {**rcParamsDefault, **STYLE}
    settings.pop("backend")  # rc_context cannot restore it
    return rc_context(settings)


def write_figure(figure: Figure, paths: Sequence[Path]) -> None:
    """One file for each path, in the format of its suffix."""
    for path in paths:
        kind = path.suffix.removeprefix(".")
        no_date = {"Date": None} if kind == "svg" else {}
        with atomic_path(path) as partial:
            figure.savefig(partial, format=kind, dpi=150, metadata=no_date)


# --- parts that several figures share


def linear_bins(low: float, high: float) -> NDArray[np.floating]:
    return np.linspace(low, high if high > low else low + 1, N_BINS + 1)


def score_bins(axes: Axes, candidates: Candidates) -> NDArray[np.floating]:
    """Bins of the filter's scores. Logarithmic for τ, which ranges over many powers of ten; others may be negative."""
    scores = np.concatenate([candidates.wild_score, candidates.calibration_score]).astype(float)
    scores = scores[np.isfinite(scores)]
    if candidates.score_name == SAL and scores.max(initial=0) > 0:
        axes.set_xscale("log")
        bins = log_bins(scores)
    else:
        bins = linear_bins(float(scores.min()), float(scores.max()))
    axes.set_xlim(bins[0], bins[-1])
    axes.set_xlabel(f"{score_label(candidates.score_name)} (higher: more of an outlier)")
    return bins


def log_bins(values: NDArray[np.floating]) -> NDArray[np.floating]:
    """Starts so that a few scores of nearly zero do not squeeze all others."""
    positive = values[values > 0]
    return np.geomspace(max(np.quantile(positive, 0.02), positive.max() * 1e-9), positive.max(), N_BINS + 1)


def densities(axes: Axes, samples: Sequence[Sample], bins: Any) -> None:
    """Histograms of (values, name, color), each with an area of 1; told apart by hatches too, not by color alone."""
    samples = [sample for sample in samples if len(sample[0])]
    for (values, name, color), hatch in zip(samples, ("", "///"), strict=False):
        inside = np.clip(values, bins[0], bins[-1])
        weights = np.full(len(inside), 1 / len(inside))
        axes.hist(
            inside, bins, weights=weights, histtype="stepfilled", label=name, hatch=hatch, linewidth=1.4,
            edgecolor=color, facecolor="none" if hatch else (*to_rgb(color), 0.25),  # SVG cannot do both at once
        )  # fmt: skip


def _wild_parts(scores: NDArray[np.floating], is_ood: NDArray[np.bool_]) -> list[Sample]:
    return [(scores[~is_ood], "wild ID", ORANGE), (scores[is_ood], "wild OOD", PURPLE)]


def mark_threshold(axes: Axes, threshold: float, name: str = "T") -> None:
    axes.axvline(threshold, color=GREY, linestyle="--", linewidth=1.5, zorder=5)
    axes.annotate(
        name, (threshold, 1), (4, 0), xycoords=("data", "axes fraction"), textcoords="offset points", va="top",
        weight="bold",
    )  # fmt: skip


def draw_errors(axes: Axes, theory: dict[str, Any]) -> dict[str, float]:
    """ERR_in and ERR_out against the threshold, true and estimated, from theory.json. Returns them at T, by name."""
    at_threshold, threshold = {}, float(theory["threshold"])
    for key, line, kind in (("errors", "-", ""), ("errors_estimated", "--", ", estimated")):
        if not theory[key]:
            continue
        thresholds = np.array(theory[key]["threshold"], dtype=float)
        for side, color in (("err_in", ORANGE), ("err_out", PURPLE)):
            values, name = np.array(theory[key][side], dtype=float), f"{side.replace('err', 'ERR')}{kind}"
            axes.plot(thresholds, values, line, color=color, linewidth=1.8, label=name)
            at_threshold[name] = float(values[min(int(np.searchsorted(thresholds, threshold)), len(values) - 1)])
        if thresholds.max() > 0 and thresholds.min() >= 0:
            axes.set_xscale("log")
            axes.set_xlim(left=max(np.quantile(thresholds[thresholds > 0], 0.1), thresholds.max() * 1e-6))
    mark_threshold(axes, threshold)
    axes.set(xlabel="threshold", ylabel="share", ylim=(-0.02, 1.02))
    return at_threshold


def draw_condition(axes: Axes, theory: dict[str, Any]) -> None:
    """ζ at π and at the estimate of π, beside what Theorem 2 asks for."""
    from salcli.sal.theory import required_discrepancy

    shares = np.linspace(0, 1, 200)
    axes.plot(shares, [required_discrepancy(one) for one in shares], color=GREY, label="1.011 √π (Theorem 2)")
    zeta, pi, estimate = float(theory["zeta"]), theory["pi"], theory["pi_estimate"]
    # the bar reaches from ζ as the samples show it down to ζ without the part that is noise
    bar = np.array([[zeta - float(theory["zeta_without_noise"])], [0.0]])
    if pi is not None:
        axes.errorbar(pi, zeta, bar, fmt="o", color=PURPLE, capsize=4, label=f"ζ at the true π = {pi:.3f}")
    name = f"ζ at π̂ = {estimate['value']:.3f}"
    axes.errorbar(estimate["value"], zeta, bar, fmt="D", color=BLUE, capsize=4, label=name)
    at, pairwise = estimate["value"] if pi is None else pi, theory["zeta_pairwise"]
    axes.plot(at, pairwise, "s", color=GREY, markerfacecolor="none", label="pairwise (authors' code)")
    axes.set(xlabel="π", ylabel="ζ", xlim=(-0.02, 1.02))
    axes.set_ylim(bottom=0)


def draw_gradients(axes: Axes, theory: dict[str, Any]) -> str:
    """Figure 1 of the paper, from theory.json: gradients around ∇̄, v, projections on it, the angle θ. Returns θ.

    Each gradient is drawn at its part along v and the length of the rest, so lengths and angles to v are right.
    """
    found = theory["gradients"]
    along, across, is_outlier = (np.array(found[name]) for name in ("along", "across", "is_outlier"))
    names = ("OOD", "ID") if found["by_truth"] else ("τ > T", "τ ≤ T")
    for own, name, color, marker in ((~is_outlier, names[1], ORANGE, "o"), (is_outlier, names[0], PURPLE, "x")):
        _dots(axes, np.stack([along[own], across[own]], axis=1), color, f"{name} gradients", marker)
        axes.plot(along[own], 0 * along[own], "|", color=color, markersize=8, alpha=0.5, rasterized=True)
    axes.axhline(0, color=GREY, linestyle="--", linewidth=1.2, label="v, with projections", zorder=1)
    axes.plot(0, 0, "+", color=GREY, markersize=10, markeredgewidth=2, label="∇̄ of ID data", zorder=5)
    means = found["means"]
    x, y, angle = (means[name][0] for name in ("along", "across", "angle"))
    theta = "–" if angle is None else f"{angle:.0f}°"
    if angle is not None:
        arrow = {"arrowstyle": "-|>", "color": VERMILION, "linewidth": 2, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (x, y), (0, 0), arrowprops=arrow, zorder=6)
        axes.plot([x, x], [0, y], ":", color=VERMILION, linewidth=1.5, zorder=6)
        axes.plot(x, 0, "X", color=VERMILION, markersize=6, label=f"{names[0]} mean, θ = {theta}", zorder=6)
    axes.set(xlabel="along v (squared: τ)", ylabel="across v")
    axes.set_aspect("equal", adjustable="datalim")
    return theta


def _legend_below(axes: Axes, markerscale: float = 1) -> None:
    """Where it hides no data; small dots are drawn larger."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=2, markerscale=markerscale)


# --- theory


def write_theory_figure(result: TheoryCheck, paths: Sequence[Path]) -> None:
    """Gradients (Figure 1), scores, errors against the threshold, and the condition on ζ."""
    with reading_json(Found(result.written[0])) as content:
        theory = content
    candidates, wild = result.candidates, result.candidates.wild_score
    samples = [(candidates.calibration_score, "calibration", BLUE), (wild, "wild", GREY)]
    if result.truth:
        samples = _wild_parts(wild, result.truth.is_ood.numpy())
    with house_style():
        figure = Figure(figsize=(17, 4.4), layout="constrained")
        gradients, scores, errors, condition = figure.subplots(1, 4)
        if theory["gradients"]:
            draw_gradients(gradients, theory)
        densities(scores, samples, score_bins(scores, candidates))
        mark_threshold(scores, candidates.threshold)
        scores.set_ylabel("share of samples")
        draw_errors(errors, theory)
        draw_condition(condition, theory)
        titles = "Gradients of wild data", "Filtering score", "Errors against the threshold"
        for axes, letter, title in zip(figure.axes, "abcd", (*titles, "Condition on the discrepancy"), strict=True):
            axes.set_title(f"({letter}) {title}")
            if axes.get_legend_handles_labels()[0]:
                _legend_below(axes)
        figure.suptitle(str(result.experiment), x=0.01, ha="left", weight="bold")
        write_figure(figure, paths)


# --- toy

CLASSES = {"left": ("#E69F00", "o"), "right": ("#B35900", "s"), "top": ("#F5C75B", "^")}  # shades of inliers' orange


def write_toy_figure(runs: Sequence[ToyRun], calibration: str, paths: Sequence[Path]) -> None:
    """In the layout of the paper's figure: setup, candidates, densities and gradients, one row for each run."""
    with house_style():
        figure = Figure(figsize=(16, 4.4 * len(runs)), layout="constrained")
        for (setup, candidates, scores, gradients), run in zip(
            figure.subplots(len(runs), 4, squeeze=False), runs, strict=True
        ):
            inliers = run.wild[~run.is_ood]
            for k, (name, (color, marker)) in enumerate(CLASSES.items()):
                _dots(setup, inliers[run.inlier_class == k], color, f"ID, {name}", marker)
            _dots(setup, run.wild[run.is_ood], PURPLE, "OOD", "x")
            setup.set_title(f"(a) Wild data, {run.scenario}")

            chosen, errors = run.tau > run.thresholds[calibration], run.errors(calibration)
            _dots(candidates, run.wild[~chosen], "#BBBBBB", "τ ≤ T")
            _dots(candidates, run.wild[chosen], GREEN, "τ > T", "x")
            contamination = 1 - errors.precision
            candidates.set_title(
                f"(b) ERR_in {errors.err_in:.1%}, ERR_out {errors.err_out:.1%}, contamination {contamination:.1%}"
            )
            for axes in (setup, candidates):
                axes.set(xlabel="x₁", ylabel="x₂")
                axes.set_aspect("equal", adjustable="datalim")
                _legend_below(axes, markerscale=2.5)

            tau = run.tau.numpy()
            densities(scores, _wild_parts(tau, run.is_ood.numpy()), log_bins(tau))
            mark_threshold(scores, run.thresholds[calibration])
            scores.set(title="(c) Filtering score", xscale="log", xlabel="τ", ylabel="share of points")
            _legend_below(scores)

            # the gradients as v sees them: the position along the dashed line is the projection, its square is τ
            projection, is_ood = run.plane.projection, run.plane.is_ood
            gradients.axhline(0, color=GREY, linestyle="--", linewidth=1.2, label="direction of v")
            for own, color, name in ((~is_ood, ORANGE, "ID"), (is_ood, PURPLE, "OOD")):
                _dots(gradients, projection[own], color, f"{name} gradients", "o" if name == "ID" else "x")
                typical, look = float(projection[own][:, 0].square().mean().sqrt()), {"markeredgecolor": "black"}
                gradients.plot(typical, 0, "X", color=color, markersize=10, label=f"{name}, √ mean τ", **look)
            gradients.plot(0, 0, "+", color="black", markersize=12, markeredgewidth=2, label="mean ID gradient")
            predicted = [*CLASSES][run.plane.predicted]
            gradients.set(title=f"(d) Gradients, predicted class {predicted}", xlabel="along v")
            gradients.set_ylabel("along the second vector")
            _legend_below(gradients)
        write_figure(figure, paths)


def _dots(axes: Axes, points: Tensor | NDArray[np.floating], color: str, name: str, marker: str = "o") -> None:
    width = 0.8 if marker == "x" else 0
    # as vectors, ten thousand dots would make a huge SVG
    axes.scatter(
        points[:, 0], points[:, 1], s=7, color=color, marker=marker, linewidths=width, label=name, rasterized=True
    )


# --- charts of the HTML report: drawn once, shown in light and dark, and written as PNG and SVG if asked for

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


def compact(number: float) -> str:
    """Three digits, with a real minus."""
    return f"{number:.3g}".replace("-", "−")


def certificate_chart(candidates: Candidates) -> Chart | None:
    """How many of the first k wild samples by falling score are outliers, at least; None without a certificate."""
    certified, n_candidates = candidates.certified, len(candidates.index)
    if not certified.any():
        return None
    length = min(len(certified), max(2 * n_candidates, 50))
    at = np.arange(1, length + 1)
    with _axes(WIDE) as (figure, plot):
        plot.plot(at, at, color=GREY, linestyle=":", label="all of them")
        plot.plot(at, 0.8 * at, color=GREY, linestyle="--", label="80% of them")
        plot.step(at, certified[:length], where="mid", color=PURPLE, label="at least so many are outliers (95%)")
        if n_candidates:
            mark_threshold(plot, n_candidates, f"{n_candidates:,} candidates")
        plot.set(
            xlabel="wild samples, highest score first", ylabel="certified outliers", xlim=(0, length), ylim=(0, None)
        )
        plot.legend(loc="upper left", frameon=True, framealpha=1, edgecolor="none")
    sure = longest_certified(certified, 0.8)
    summary = f"At least {certified[n_candidates - 1] if n_candidates else 0:,} of the candidates are outliers. "
    summary += f"Down to the first {sure:,} samples at least 80% are." if sure else "No list is certified to 80%."
    return Chart("certificate", "How far down the list can one go?", summary, figure)


def tau_chart(candidates: Candidates) -> Chart:
    """The filter's score of wild and of calibration data, with T."""
    wild, calibration, threshold = candidates.wild_score, candidates.calibration_score, candidates.threshold
    with _axes(WIDE) as (figure, plot):
        samples = [(calibration, f"calibration ({len(calibration):,})", BLUE), (wild, f"wild ({len(wild):,})", ORANGE)]
        densities(plot, samples, score_bins(plot, candidates))
        mark_threshold(plot, threshold, f"T = {compact(threshold)}")
        plot.set_ylabel("share of samples")
    n_above, n_held_out = len(candidates.index), int((calibration > threshold).sum())
    summary = (
        f"{n_above:,} of {len(wild):,} wild samples ({share_text(n_above / max(1, len(wild)))}) are above T = "
        f"{compact(threshold)}, and {n_held_out:,} of {len(calibration):,} calibration samples "
        f"({share_text(n_held_out / max(1, len(calibration)))})."
    )
    title = f"{score_label(candidates.score_name)} of wild and calibration data"
    return Chart("filter-scores", title, summary, figure)


def roc_overview(findings: Findings) -> Chart:
    """All methods in one chart: SAL and the best others stand out."""
    ranked, main = [one for one in findings.methods if one.roc], findings.main
    assert main
    shown = [one for one in ranked if one is not main][: len(ROC_COLORS)]
    looks = {main.method: {"color": GREEN, "linewidth": 2.4, "zorder": 4}}
    for one, color, dashes in zip(shown, ROC_COLORS, ROC_DASHES, strict=False):
        looks[one.method] = {"color": color, "linestyle": dashes, "linewidth": 1.4, "zorder": 3}
    with _axes(WIDE) as (figure, plot):
        for one in ranked:
            assert one.roc
            if look := looks.get(one.method):
                plot.plot(*one.roc, label=_legend_name(one.label), **look)
            else:
                plot.plot(*one.roc, color=LINE, linewidth=1, zorder=2)
        if n_others := len(ranked) - len(looks):
            plot.plot([], [], color=LINE, label=f"{n_others} others")
        _roc_axes(plot)
        plot.legend(loc="lower right")
    best = "; ".join(_sentence(one) for one in [main, *shown])
    return Chart("roc-all", f"ROC of all methods on {findings.test_set}", f"{best}.", figure)


def roc_chart(one: MethodScores) -> Chart:
    """One method's ROC, with the point of FPR95."""
    assert one.roc
    with _axes() as (figure, plot):
        plot.plot(*one.roc, color=GREEN, linewidth=2)
        fpr95 = float(np.mean(one.ood <= one.threshold))
        kept = float(np.mean(one.id <= one.threshold))
        plot.plot([fpr95], [kept], "o", color=VERMILION, markersize=6, zorder=5, clip_on=False)
        plot.text(0.97, 0.06, f"FPR95 {share_text(fpr95)}", ha="right", transform=plot.transAxes)
        _roc_axes(plot)
    return Chart(f"roc-{one.method}", f"ROC of {one.label}", f"{_sentence(one)}.", figure)


def histogram_chart(one: MethodScores) -> Chart:
    """One method's scores of ID and OOD test data, with the threshold that keeps 95% of ID."""
    threshold = one.threshold
    with _axes() as (figure, plot):
        # both sides count alike, however many samples they have
        finite = [values[np.isfinite(values)] for values in (one.id, one.ood)]
        ends = [np.quantile(values, (TAIL, 1 - TAIL)) for values in finite if len(values)] or [(0.0, 0.0)]
        bins = linear_bins(min(low for low, _ in ends), max(high for _, high in ends))
        densities(plot, [(one.id, "ID test", ORANGE), (one.ood, "OOD test", PURPLE)], bins)
        mark_threshold(plot, float(np.clip(threshold, bins[0], bins[-1])), "")
        plot.set(xlabel="outlier score (higher: more OOD)", ylabel="share", xlim=(bins[0], bins[-1]))
        for axis in ("x", "y"):
            plot.locator_params(axis=axis, nbins=4)
    summary = (
        f"The threshold {compact(threshold)} keeps {share_text(float(np.mean(one.id <= threshold)))} of ID test data"
    )
    if len(one.ood):
        summary += f", and {share_text(float(np.mean(one.ood <= threshold)))} of OOD test data pass it"
    return Chart(f"scores-{one.method}", f"Scores of {one.label}", f"{summary}.", figure)


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


def pi_chart(results: Results, params: Params, variant: str) -> Chart | None:
    """ERR_in, ERR_out and FPR95 of a variant against π, with the paper's points; None unless there are several π."""
    runs = results.runs[(results.runs["method"] == variant) & (results.runs["ood"] == results.runs["test_set"])]
    runs = runs[runs["fpr95"].notna()]
    runs = runs.assign(pi=runs["pi"].astype(float))
    if runs["pi"].nunique() < 2:
        return None
    colors = (GREEN, ORANGE, BLUE, PURPLE, VERMILION, GREY)
    with _axes((4.4, 5.4), rows=3) as (figure, *plots):
        for plot, (metric, name) in zip(plots, reversed(ERRORS.items()), strict=True):
            for (ood, own), color in zip(runs.groupby("ood", sort=False), cycle(colors)):
                by_pi, theirs = (
                    own.groupby("pi")[metric].agg(["mean", "std"]),
                    paper_sal_by_pi(params, str(ood), metric),
                )
                look: dict[str, Any] = {"color": color, "markersize": 4}
                labels = [_legend_name(f"{ood}{of}") if plot is plots[0] else None for of in ("", ", the paper's")]
                plot.plot(by_pi["mean"], marker="o", label=labels[0], **look)
                low, high = ((by_pi["mean"] + sign * by_pi["std"]).clip(0, 100) for sign in (-1, 1))
                plot.fill_between(by_pi.index, low, high, color=color, alpha=0.2, linewidth=0)
                if len(theirs):
                    plot.plot(theirs, ":D", markerfacecolor="none", linewidth=1, label=labels[1], **look)
            plot.set_ylabel(f"{name.split()[0]}, %")
            plot.set_ylim(bottom=min(0, plot.get_ylim()[0]))
        plots[-1].set(xlabel="π", xlim=(0, 1.03))
        figure.align_ylabels()
    shares = [f"{pi:g}" for pi in sorted(runs["pi"].unique())]
    spread = "; mean ± std over seeds" if runs["seed"].nunique() > 1 else ""
    summary = f"Errors of the filter and FPR95 of {results.labels[variant]} at π = {', '.join(shares)}{spread}."
    if runs["err_in"].isna().any():
        summary += " At π = 1 there is no wild ID data, so there is no ERR_in."
    return Chart("sal-by-pi", f"{results.labels[variant]} by the share π of OOD in the wild data", summary, figure)


def theory_charts(theory: dict[str, Any]) -> list[Chart]:
    """The gradients, the errors of the filter against its threshold, and ζ beside what Theorem 2 asks for."""
    charts = []
    if theory["gradients"]:
        with _axes(TALL) as (figure, plot):
            theta = draw_gradients(plot, theory)
        outliers = "OOD data" if theory["gradients"]["by_truth"] else "samples with τ > T"
        summary = (
            f"Gradients of wild data around the mean ID gradient ∇̄ and the singular vector v. The mean gradient of "
            f"{outliers} is at θ = {theta} to v."
        )
        charts.append(Chart("theory-gradients", "Gradients of wild data (Figure 1)", summary, figure))
    with _axes(TALL) as (figure, plot):
        errors = draw_errors(plot, theory)
    if errors:
        shown = ", ".join(f"{name} {share_text(value)}" for name, value in errors.items())
        summary = f"At T = {float(theory['threshold']):.3g}: {shown}."
        if theory["contamination"] is not None:
            summary += f" {share_text(theory['contamination'])} of the candidates are ID data (contamination)."
        charts.append(Chart("theory-errors", "Errors of the filter against its threshold", summary, figure))
    with _axes(TALL, n_columns=1) as (figure, plot):
        draw_condition(plot, theory)
    summary = (
        f"ζ = {theory['zeta']:.3g}, debiased {theory['zeta_without_noise']:.3g}; Theorem 2 asks for "
        f"{theory['required']:.3g}: its condition {'holds' if theory['condition_holds'] else 'does not hold'}. "
        f"The authors' code would print ζ = {theory['zeta_pairwise']:.3g}, the mean pairwise distance."
    )
    charts.append(Chart("theory-condition", "Condition on the discrepancy ζ", summary, figure))
    return charts


@contextmanager
def _drawing() -> Iterator[None]:
    """The house style, a little smaller; a character that the font lacks is drawn as a box, without a warning."""
    with house_style(), rc_context(SMALLER), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


@contextmanager
def _axes(size: tuple[float, float] = SMALL, rows: int = 1, n_columns: int = 2) -> Iterator[Any]:
    """A figure and its axes, one below the other; in the end it gets a legend below, unless the axes have one."""
    with _drawing():
        figure = Figure(figsize=size, layout="constrained")
        yield figure, *figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
        if figure.axes[0].get_legend_handles_labels()[0] and not figure.axes[0].get_legend():
            figure.legend(loc="outside lower center", ncol=n_columns)


def _legend_name(name: str) -> str:
    """A $ would start mathematics."""
    return printable(name)[:LONGEST_NAME].replace("$", r"\$")


def _roc_axes(plot: Axes) -> None:
    plot.axhline(0.95, color=GREY, linestyle="--", linewidth=1, zorder=1)
    plot.set(xlabel="OOD that pass (FPR)", ylabel="ID that pass (TPR)", xlim=(-0.01, 1), ylim=(0, 1.02))


def _sentence(one: MethodScores) -> str:
    return f"{one.label}: AUROC {share_text(one.metrics.get('auroc'))}, FPR95 {share_text(one.metrics.get('fpr95'))}"
