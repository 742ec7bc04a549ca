"""The figure of `sweep-pi`: ERR_in, ERR_out and FPR95 against π, with the paper's points."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from salcli.reporting.figure_file import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION, house_style, write_figure
from salcli.reporting.sweep_table import over_seeds

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from salcli.reporting.paper_by_pi import PaperCurve
    from salcli.stages.pi_sweep import SweepPoint

PANELS = {
    "err_in": "(a) ERR_in: wild ID data taken for outliers",
    "err_out": "(b) ERR_out: wild outliers that are missed",
    "fpr95": "(c) FPR95 of SAL on the test data",
}
COLOURS, MARKERS = (BLUE, ORANGE, GREEN, PURPLE, VERMILION), ("o", "s", "^", "v", "P", "X", "*")
PAPER_MARKERS = ("D", "h")


def write_sweep_figure(
    points: Sequence[SweepPoint], paper: Sequence[PaperCurve], setting: str, paths: Sequence[Path]
) -> None:
    """Three panels, as PNG and SVG. `setting` says which data and network are ours."""
    looks = dict(zip(dict.fromkeys(point.ood for point in points), zip(cycle(COLOURS), cycle(MARKERS)), strict=False))
    with house_style():
        figure = Figure(figsize=(13, 4.6), layout="constrained")
        panels = figure.subplots(1, 3)
        for axes, (metric, title) in zip(panels, PANELS.items(), strict=True):
            _paper(axes, [curve for curve in paper if curve.metric == metric], looks)
            for ood, look in looks.items():
                _ours(axes, [point for point in points if point.ood == ood], metric, look)
            undefined = any(getattr(point, metric) is None for point in points)
            label = "π (at 1 there is no wild ID data)" if undefined else "π"
            axes.set(title=title, xlabel=label, ylabel="%", xlim=(0, 1.03))
            axes.set_ylim(bottom=-0.02 * axes.get_ylim()[1])
        handles = {
            name: handle for axes in panels for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        names = [f"ours: {ood}" for ood in looks]
        names += dict.fromkeys(curve.name for curve in sorted(paper, key=lambda one: _place(one.ood, looks)))
        figure.legend([handles[name] for name in names], names, loc="outside lower center", ncol=min(len(names), 4))
        n_seeds = len({point.seed for point in points})
        spread = f"; mean and std over {n_seeds} seeds" if n_seeds > 1 else ""
        title = f"SAL by the share π of OOD in the wild data; ours: {setting}{spread}"
        figure.suptitle(title, x=0.01, ha="left", weight="bold")
        write_figure(figure, paths)


def _place(ood: str | None, looks: dict[str, tuple[str, str]]) -> int:
    """In the order of ours; other data last."""
    return list(looks).index(ood) if ood in looks else len(looks)


def _ours(axes: Axes, points: Sequence[SweepPoint], metric: str, look: tuple[str, str]) -> None:
    colour, marker = look
    shares = sorted({point.pi for point in points})
    by_pi = [over_seeds([point for point in points if point.pi == pi], metric) for pi in shares]
    mean, std = 100 * np.array(by_pi).T
    name = f"ours: {points[0].ood}"
    axes.plot(shares, mean, color=colour, marker=marker, linewidth=2, label=name)
    axes.fill_between(
        shares, np.clip(mean - std, 0, 100), np.clip(mean + std, 0, 100), color=colour, alpha=0.2, linewidth=0
    )


def _paper(axes: Axes, curves: Sequence[PaperCurve], looks: dict[str, tuple[str, str]]) -> None:
    """Hollow: of our own data in the colour of ours, of other data grey."""
    for curve, grey_marker in zip(curves, cycle(PAPER_MARKERS), strict=False):
        colour, marker = looks.get(curve.ood, (GREY, grey_marker)) if curve.ood else (GREY, grey_marker)
        axes.plot(
            list(curve.by_pi), [100 * value for value in curve.by_pi.values()], color=colour, marker=marker,
            markerfacecolor="white", linestyle=":", linewidth=1.2, label=curve.name, zorder=3,
        )  # fmt: skip
