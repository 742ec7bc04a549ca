"""Figures as files: one look, colours that colour-blind people can tell apart, the same bytes each time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rc_context, rcParamsDefault
from matplotlib.colors import to_rgb

from salcli.artifacts.atomic import atomic_path

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette; the names are those of the paper's figures: inliers orange, outliers purple, filtered green.
ORANGE, PURPLE, GREEN, BLUE, GREY = "#E69F00", "#8B3A92", "#009E73", "#0072B2", "#555555"
VERMILION = "#D55E00"
FORMATS = ("png", "svg")

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.hashsalt": "salcli",  # or the names inside an SVG would be random
    "svg.fonttype": "none",  # text stays text: small files that can be searched
}


def house_style() -> AbstractContextManager[None]:
    """Inside, figures look alike whatever the user's own matplotlibrc says."""
    settings: dict[Any, Any] = {**rcParamsDefault, **STYLE}
    settings.pop("backend")  # rc_context cannot put it back
    return rc_context(settings)


def write_figure(figure: Figure, paths: Sequence[Path]) -> None:
    """One file for each path, in the format of its suffix."""
    for path in paths:
        kind = path.suffix.removeprefix(".")
        no_date = {"Date": None} if kind == "svg" else {}
        with atomic_path(path) as partial:
            figure.savefig(partial, format=kind, dpi=150, metadata=no_date)


def log_floor(values: Sequence[Any]) -> float:
    """Where a logarithmic axis begins, so that a few scores of nearly zero do not squeeze all others."""
    everything = np.concatenate([np.asarray(one, dtype=float) for one in values])
    positive = everything[everything > 0]
    return float(max(np.quantile(positive, 0.02), positive.max() * 1e-9)) if len(positive) else 1.0


def densities(axes: Axes, samples: Sequence[tuple[Any, str, str]], bins: Any) -> None:
    """Outlined histograms of (values, name, colour), each with an area of its own: hatched, not by colour alone."""
    for (values, name, colour), hatch in zip(samples, ("", "///", "..."), strict=False):
        inside = np.clip(values, bins[0], bins[-1])
        weights = np.full(len(inside), 1 / max(1, len(inside)))
        axes.hist(
            inside, bins, weights=weights, histtype="stepfilled", label=name, hatch=hatch, linewidth=1.4,
            edgecolor=colour, facecolor="none" if hatch else (*to_rgb(colour), 0.25),  # SVG cannot do both at once
        )  # fmt: skip


def legend_below(axes: Axes, markerscale: float = 1) -> None:
    """Where it hides no data; small dots are drawn larger."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=2, markerscale=markerscale)
