"""Charts of the report: drawn once, shown in the page in light and dark, and written as PNG and SVG."""

from __future__ import annotations

import io
import re
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure

from salcli.reporting.figure_file import (
    BLUE,
    FORMATS,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    VERMILION,
    house_style,
    write_figure,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from matplotlib.axes import Axes

INK, LINE = "#22262c", "#c8cdd4"
SMALL, WIDE = (2.9, 2.2), (4.4, 2.8)  # inches; a phone shows either at about its own size
# what the page's style sheet has a light and a dark colour for
VARIABLES = {
    INK: "currentColor", LINE: "var(--line)", ORANGE: "var(--orange)", PURPLE: "var(--purple)", GREEN: "var(--green)",
    BLUE: "var(--blue)", GREY: "var(--grey)", VERMILION: "var(--vermilion)",
}  # fmt: skip
INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
SMALLER: dict[Any, Any] = {
    **dict.fromkeys(INKED, INK),
    "font.size": 9,
    "legend.fontsize": 8,
    "hatch.linewidth": 0.6,
}


@dataclass(frozen=True)
class Chart:
    """A figure, and what it says in words."""

    name: str  # unlike that of any other
    title: str
    summary: str
    figure: Figure

    @property
    def slug(self) -> str:
        """A name for files and for the parts of its SVG."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    @cached_property
    def svg(self) -> Markup:
        """For the page: colours are variables of the style sheet, and no name in it is that of another chart."""
        text = io.StringIO()
        with _drawing():
            self.figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        svg = text.getvalue()
        svg = svg[svg.index("<svg") :]
        for pattern in (r"<metadata>.*?</metadata>", r'<style type="text/css">.*?</style>', r"<!--.*?-->"):
            svg = re.sub(pattern, "", svg, flags=re.DOTALL)
        svg = re.sub(r'(?<=\bid=")|(?<=href="#)|(?<=url\(#)', f"{self.slug}-", svg)
        svg = re.sub(r"""(font: [^'";]*)'DejaVu Sans'[^;"]*""", r"\1var(--sans)", svg)
        for colour, variable in VARIABLES.items():
            svg = re.sub(colour, variable, svg, flags=re.IGNORECASE)
        return Markup(svg.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1))

    def write(self, folder: Path) -> list[Path]:
        """As PNG and SVG."""
        paths = [folder / f"{self.slug}.{kind}" for kind in FORMATS]
        with _drawing():
            write_figure(self.figure, paths)
        return paths


@contextmanager
def axes(size: tuple[float, float] = SMALL, rows: int = 1) -> Iterator[list[Axes]]:
    """Empty axes in the house style, one above the other."""
    with _drawing():
        figure = Figure(figsize=size, layout="constrained")
        made = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
        yield list(made)


def figure_of(plot: Axes) -> Figure:
    """The figure that axes are in."""
    figure = plot.figure
    assert isinstance(figure, Figure)
    return figure


@contextmanager
def _drawing() -> Iterator[None]:
    """The house style, a little smaller; a sign that a font lacks is drawn as a box, without a warning."""
    with house_style(), rc_context(SMALLER), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield
