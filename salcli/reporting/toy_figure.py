"""The figure of `salcli toy`, in the layout of the paper's: one row for each scenario."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from salcli.reporting.figure_file import (
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    densities,
    house_style,
    legend_below,
    log_floor,
    write_figure,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from torch import Tensor

    from salcli.stages.toy import ToyRun

N_BINS = 40
CLASSES = ("left", "right", "top")
CLASS_LOOKS = (("#E69F00", "o"), ("#B35900", "s"), ("#F5C75B", "^"))  # shades of the inliers' orange


def write_toy_figure(runs: Sequence[ToyRun], calibration: str, paths: Sequence[Path]) -> None:
    """Setup, candidates, densities and gradients of every run, as PNG and SVG."""
    with house_style():
        figure = Figure(figsize=(16, 4.4 * len(runs)), layout="constrained")
        for row, run in zip(figure.subplots(len(runs), 4, squeeze=False), runs, strict=True):
            _setup(row[0], run)
            _candidates(row[1], run, calibration)
            _densities(row[2], run, calibration)
            _gradients(row[3], run)
        write_figure(figure, paths)


def _setup(axes: Axes, run: ToyRun) -> None:
    inliers, outliers = run.wild[~run.is_ood], run.wild[run.is_ood]
    for k, (colour, marker) in enumerate(CLASS_LOOKS):
        _dots(axes, inliers[run.inlier_class == k], colour, f"ID, {CLASSES[k]}", marker)
    _dots(axes, outliers, PURPLE, "OOD", "x")
    axes.set(title=f"(a) Wild data, {run.scenario}", xlabel="x₁", ylabel="x₂")
    axes.set_aspect("equal", adjustable="datalim")
    legend_below(axes, markerscale=2.5)


def _candidates(axes: Axes, run: ToyRun, calibration: str) -> None:
    taken, errors = run.tau > run.thresholds[calibration], run.errors(calibration)
    _dots(axes, run.wild[~taken], "#BBBBBB", "τ ≤ T")
    _dots(axes, run.wild[taken], GREEN, "τ > T", "x")
    title = f"(b) Candidates: ERR_in {errors.err_in:.1%}, ERR_out {errors.err_out:.1%}"
    axes.set(title=title, xlabel="x₁", ylabel="x₂")
    axes.set_aspect("equal", adjustable="datalim")
    legend_below(axes, markerscale=2.5)


def _densities(axes: Axes, run: ToyRun, calibration: str) -> None:
    tau, is_ood = run.tau.numpy(), run.is_ood.numpy()
    bins = np.geomspace(log_floor([tau]), tau.max(), N_BINS + 1)
    densities(axes, [(tau[~is_ood], "wild ID", ORANGE), (tau[is_ood], "wild OOD", PURPLE)], bins)
    axes.axvline(run.thresholds[calibration], color=GREY, linestyle=":", linewidth=1.5, label="T")
    axes.set(title="(c) Filtering score", xscale="log", xlabel="τ", ylabel="share of points")
    legend_below(axes)


def _gradients(axes: Axes, run: ToyRun) -> None:
    """The gradients as v sees them: the place along the dashed line is the projection, its square is τ."""
    projection, is_ood = run.plane.projection, run.plane.is_ood
    axes.axhline(0, color=GREY, linestyle="--", linewidth=1.2, label="direction of v")
    for own, colour, name in ((~is_ood, ORANGE, "ID"), (is_ood, PURPLE, "OOD")):
        dots = projection[own]
        _dots(axes, dots, colour, f"{name} gradients", "o" if name == "ID" else "x")
        typical = float(dots[:, 0].square().mean().sqrt())
        axes.plot(typical, 0, "X", color=colour, markersize=10, markeredgecolor="black", label=f"{name}, √ mean τ")
    axes.plot(0, 0, "+", color="black", markersize=12, markeredgewidth=2, label="mean ID gradient")
    title = f"(d) Gradients, predicted «{CLASSES[run.plane.predicted]}»"
    axes.set(title=title, xlabel="along v", ylabel="along the second vector")
    legend_below(axes)


def _dots(axes: Axes, places: Tensor, colour: str, name: str, marker: str = "o") -> None:
    width = 0.8 if marker == "x" else 0
    # ten thousand dots as paths would make a huge SVG
    axes.scatter(
        places[:, 0], places[:, 1], s=7, color=colour, marker=marker, linewidths=width, label=name, rasterized=True
    )
