"""Figures as files: one look, colours that colour-blind people can tell apart, the same bytes each time."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context

from salcli.artifacts.atomic import atomic_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette; the names are those of the paper's figures: inliers orange, outliers purple, filtered green.
ORANGE, PURPLE, GREEN, BLUE, GREY = "#E69F00", "#8B3A92", "#009E73", "#0072B2", "#555555"
FORMATS = ("png", "svg")

STYLE: dict[str, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.hashsalt": "salcli",  # or the names inside an SVG would be random
    "svg.fonttype": "none",  # text stays text: small files that can be searched
}


@contextmanager
def house_style() -> Iterator[None]:
    """Inside, figures look alike whatever the user's own matplotlibrc says."""
    with rc_context():
        from matplotlib import rcdefaults, rcParams

        rcdefaults()
        rcParams.update(STYLE)
        yield


def write_figure(figure: Figure, paths: Sequence[Path]) -> None:
    """One file for each path, in the format of its suffix."""
    for path in paths:
        kind = path.suffix.removeprefix(".")
        no_date = {"Date": None} if kind == "svg" else {}
        with atomic_path(path) as partial:
            figure.savefig(partial, format=kind, dpi=150, metadata=no_date)


def log_floor(values: Sequence[Any]) -> float:
    """Where a logarithmic axis begins, so that a few scores of nearly zero do not squeeze all others."""
    import numpy as np

    everything = np.concatenate([np.asarray(one, dtype=float) for one in values])
    positive = everything[everything > 0]
    return float(max(np.quantile(positive, 0.02), positive.max() * 1e-9)) if len(positive) else 1.0


def densities(axes: Axes, samples: Sequence[tuple[Any, str, str]], bins: Any) -> None:
    """Outlined histograms of (values, name, colour), each with an area of its own: hatched, not by colour alone."""
    import numpy as np

    for (values, name, colour), hatch in zip(samples, ("", "///", "..."), strict=False):
        inside = np.clip(values, bins[0], bins[-1])
        weights = np.full(len(inside), 1 / max(1, len(inside)))
        look = {"histtype": "stepfilled", "linewidth": 1.4, "hatch": hatch, "label": name}
        axes.hist(inside, bins, weights=weights, edgecolor=colour, facecolor=(*_rgb(colour), 0.25), **look)


def _rgb(colour: str) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    return to_rgb(colour)
