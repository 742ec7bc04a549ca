"""Figures: one look, colors that color-blind people can tell apart, and the same bytes each time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rc_context, rcParamsDefault
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray

from salcli.report.paper import PaperCurve
from salcli.report.results import SweepPoint, over_seeds
from salcli.report.stage_tables import score_label
from salcli.store.files import Found, atomic_path, reading_json
from salcli.store.layout import SAL

if TYPE_CHECKING:  # load torch
    from torch import Tensor

    from salcli.pipeline.theory import TheoryCheck
    from salcli.pipeline.toy import ToyRun
    from salcli.store.formats import Candidates

# Okabe and Ito's palette, used as in the paper's figures: inliers orange, outliers purple, filtered green.
ORANGE, PURPLE, GREEN, BLUE, GREY = "#E69F00", "#8B3A92", "#009E73", "#0072B2", "#555555"
VERMILION = "#D55E00"
FORMATS = ("png", "svg")
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


def densities(axes: Axes, samples: Sequence[tuple[Any, str, str]], bins: Any) -> None:
    """Histograms of (values, name, color), each with an area of 1; told apart by hatches too, not by color alone."""
    for (values, name, color), hatch in zip(samples, ("", "///", "..."), strict=False):
        inside = np.clip(values, bins[0], bins[-1])
        weights = np.full(len(inside), 1 / max(1, len(inside)))
        axes.hist(
            inside, bins, weights=weights, histtype="stepfilled", label=name, hatch=hatch, linewidth=1.4,
            edgecolor=color, facecolor="none" if hatch else (*to_rgb(color), 0.25),  # SVG cannot do both at once
        )  # fmt: skip


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
        if not theory.get(key):
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
    zeta, estimate = float(theory["zeta"]), theory.get("pi_estimate") or {}
    # the bar reaches from ζ as the samples show it down to ζ without the part that is noise
    bar = np.array([[zeta - float(theory["zeta_without_noise"])], [0.0]])
    if theory.get("pi") is not None:
        name = f"ζ at the true π = {theory['pi']:.3f}"
        axes.errorbar(theory["pi"], zeta, bar, fmt="o", color=PURPLE, capsize=4, label=name)
    if estimate:
        name = f"ζ at π̂ = {estimate['pi']:.3f} (by {estimate['score']})"
        axes.errorbar(estimate["pi"], zeta, bar, fmt="D", color=BLUE, capsize=4, label=name)
    if (pairwise := theory.get("zeta_pairwise")) is not None:
        pi = theory["pi"] if theory.get("pi") is not None else (estimate or {}).get("pi", 0)
        axes.plot(pi, pairwise, "s", color=GREY, markerfacecolor="none", label="pairwise (authors' code)")
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
    with house_style():
        figure = Figure(figsize=(17, 4.4), layout="constrained")
        gradients, scores, errors, condition = figure.subplots(1, 4)
        if theory["gradients"]:
            draw_gradients(gradients, theory)
        _draw_scores(scores, result)
        draw_errors(errors, theory)
        draw_condition(condition, theory)
        gradients.set_title("(a) Gradients of wild data")
        errors.set_title("(c) Errors against the threshold")
        condition.set_title("(d) Condition on the discrepancy")
        for axes in (gradients, scores, errors, condition):
            if axes.get_legend_handles_labels()[0]:
                _legend_below(axes)
        figure.suptitle(str(result.experiment), x=0.01, ha="left", weight="bold")
        write_figure(figure, paths)


def _draw_scores(axes: Axes, result: TheoryCheck) -> None:
    candidates = result.candidates
    samples: list[tuple[Any, str, str]] = [
        (candidates.calibration_score, "calibration", BLUE),
        (candidates.wild_score, "wild", GREY),
    ]
    if result.truth:
        is_ood = result.truth.is_ood.numpy()
        samples = [
            (candidates.wild_score[~is_ood], "wild ID", ORANGE),
            (candidates.wild_score[is_ood], "wild OOD", PURPLE),
        ]
    densities(axes, [sample for sample in samples if len(sample[0])], score_bins(axes, candidates))
    mark_threshold(axes, candidates.threshold)
    axes.set(title="(b) Filtering score", ylabel="share of samples")


# --- toy

CLASSES = ("left", "right", "top")
CLASS_LOOKS = (("#E69F00", "o"), ("#B35900", "s"), ("#F5C75B", "^"))  # shades of the inliers' orange


def write_toy_figure(runs: Sequence[ToyRun], calibration: str, paths: Sequence[Path]) -> None:
    """In the layout of the paper's figure: setup, candidates, densities and gradients, one row for each run."""
    with house_style():
        figure = Figure(figsize=(16, 4.4 * len(runs)), layout="constrained")
        for row, run in zip(figure.subplots(len(runs), 4, squeeze=False), runs, strict=True):
            _toy_setup(row[0], run)
            _toy_candidates(row[1], run, calibration)
            _toy_densities(row[2], run, calibration)
            _toy_gradients(row[3], run)
        write_figure(figure, paths)


def _toy_setup(axes: Axes, run: ToyRun) -> None:
    inliers, outliers = run.wild[~run.is_ood], run.wild[run.is_ood]
    for k, (color, marker) in enumerate(CLASS_LOOKS):
        _dots(axes, inliers[run.inlier_class == k], color, f"ID, {CLASSES[k]}", marker)
    _dots(axes, outliers, PURPLE, "OOD", "x")
    _plane(axes, f"(a) Wild data, {run.scenario}")


def _toy_candidates(axes: Axes, run: ToyRun, calibration: str) -> None:
    chosen, errors = run.tau > run.thresholds[calibration], run.errors(calibration)
    _dots(axes, run.wild[~chosen], "#BBBBBB", "τ ≤ T")
    _dots(axes, run.wild[chosen], GREEN, "τ > T", "x")
    found = f"ERR_in {errors.err_in:.1%}, ERR_out {errors.err_out:.1%}, contamination {1 - errors.precision:.1%}"
    _plane(axes, f"(b) {found}")


def _plane(axes: Axes, title: str) -> None:
    axes.set(title=title, xlabel="x₁", ylabel="x₂")
    axes.set_aspect("equal", adjustable="datalim")
    _legend_below(axes, markerscale=2.5)


def _toy_densities(axes: Axes, run: ToyRun, calibration: str) -> None:
    tau, is_ood = run.tau.numpy(), run.is_ood.numpy()
    densities(axes, [(tau[~is_ood], "wild ID", ORANGE), (tau[is_ood], "wild OOD", PURPLE)], log_bins(tau))
    mark_threshold(axes, run.thresholds[calibration])
    axes.set(title="(c) Filtering score", xscale="log", xlabel="τ", ylabel="share of points")
    _legend_below(axes)


def _toy_gradients(axes: Axes, run: ToyRun) -> None:
    """The gradients as v sees them: the position along the dashed line is the projection, its square is τ."""
    projection, is_ood = run.plane.projection, run.plane.is_ood
    axes.axhline(0, color=GREY, linestyle="--", linewidth=1.2, label="direction of v")
    for own, color, name in ((~is_ood, ORANGE, "ID"), (is_ood, PURPLE, "OOD")):
        dots = projection[own]
        _dots(axes, dots, color, f"{name} gradients", "o" if name == "ID" else "x")
        typical = float(dots[:, 0].square().mean().sqrt())
        axes.plot(typical, 0, "X", color=color, markersize=10, markeredgecolor="black", label=f"{name}, √ mean τ")
    axes.plot(0, 0, "+", color="black", markersize=12, markeredgewidth=2, label="mean ID gradient")
    title = f"(d) Gradients, predicted class {CLASSES[run.plane.predicted]}"
    axes.set(title=title, xlabel="along v", ylabel="along the second vector")
    _legend_below(axes)


def _dots(axes: Axes, points: Tensor | NDArray[np.floating], color: str, name: str, marker: str = "o") -> None:
    width = 0.8 if marker == "x" else 0
    # as vectors, ten thousand dots would make a huge SVG
    axes.scatter(
        points[:, 0], points[:, 1], s=7, color=color, marker=marker, linewidths=width, label=name, rasterized=True
    )


# --- SAL over π

PANELS = {
    "err_in": "(a) ERR_in: wild ID data taken for outliers",
    "err_out": "(b) ERR_out: wild outliers that are missed",
    "fpr95": "(c) FPR95 of SAL on the test data",
}
COLORS, MARKERS = (BLUE, ORANGE, GREEN, PURPLE, VERMILION), ("o", "s", "^", "v", "P", "X", "*")
PAPER_MARKERS = ("D", "h")
Style = tuple[str, str]  # color, marker


def write_sweep_figure(
    points: Sequence[SweepPoint], paper: Sequence[PaperCurve], setting: str, paths: Sequence[Path]
) -> None:
    """ERR_in, ERR_out and FPR95 against π, with the paper's points. `setting` names our data and network."""
    looks = dict(zip(dict.fromkeys(point.ood for point in points), zip(cycle(COLORS), cycle(MARKERS)), strict=False))
    with house_style():
        figure = Figure(figsize=(13, 4.6), layout="constrained")
        panels = figure.subplots(1, 3)
        for axes, (metric, title) in zip(panels, PANELS.items(), strict=True):
            _paper_points(axes, [curve for curve in paper if curve.metric == metric], looks)
            for ood, look in looks.items():
                _our_points(axes, [point for point in points if point.ood == ood], metric, look)
            undefined = any(getattr(point, metric) is None for point in points)
            axes.set(title=title, xlabel="π (at 1 there is no wild ID data)" if undefined else "π", ylabel="%")
            axes.set_xlim(0, 1.03)
            axes.set_ylim(bottom=-0.02 * axes.get_ylim()[1])
        handles = {
            name: handle for axes in panels for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        order = {ood: i for i, ood in enumerate(looks)}
        curves = sorted(paper, key=lambda curve: order.get(curve.ood or "", math.inf))
        names = list(dict.fromkeys([*(f"ours: {ood}" for ood in looks), *(curve.name for curve in curves)]))
        figure.legend([handles[name] for name in names], names, loc="outside lower center", ncol=min(len(names), 4))
        n_seeds = len({point.seed for point in points})
        spread = f"; mean and std over {n_seeds} seeds" if n_seeds > 1 else ""
        title = f"SAL by the share π of OOD in the wild data; ours: {setting}{spread}"
        figure.suptitle(title, x=0.01, ha="left", weight="bold")
        write_figure(figure, paths)


def _our_points(axes: Axes, points: Sequence[SweepPoint], metric: str, look: Style) -> None:
    color, marker = look
    shares = sorted({point.pi for point in points})
    by_pi = [over_seeds([point for point in points if point.pi == pi], metric) for pi in shares]
    mean, std = 100 * np.array(by_pi).T
    axes.plot(shares, mean, color=color, marker=marker, linewidth=2, label=f"ours: {points[0].ood}")
    low, high = np.clip(mean - std, 0, 100), np.clip(mean + std, 0, 100)
    axes.fill_between(shares, low, high, color=color, alpha=0.2, linewidth=0)


def _paper_points(axes: Axes, curves: Sequence[PaperCurve], looks: dict[str, Style]) -> None:
    """Hollow; of our own data in the color of ours, of other data grey."""
    for curve, grey_marker in zip(curves, cycle(PAPER_MARKERS), strict=False):
        color, marker = looks.get(curve.ood or "", (GREY, grey_marker))
        axes.plot(
            list(curve.by_pi), [100 * value for value in curve.by_pi.values()], color=color, marker=marker,
            markerfacecolor="white", linestyle=":", linewidth=1.2, label=curve.name, zorder=3,
        )  # fmt: skip
