"""Every figure relative to its goal, as one picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.speed.rows import Row

MET, MISSED = "#2a7f62", "#c0504d"


def draw(found: list[Row], path: Path) -> None:
    """Bars to the right of the line keep their goal, and by how many times."""
    margins = [row.goal.bound / row.value if row.goal.at_most else row.value / row.goal.bound for row in found]
    figure, axes = plt.subplots(figsize=(10, 0.42 * len(found) + 1.2), layout="constrained")
    places = range(len(found))
    colours = [MET if row.is_met else MISSED for row in found]
    axes.barh(places, [margin - 1 for margin in margins], left=1, color=colours, height=0.6)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(places, [row.what for row in found], fontsize=8)
    axes.invert_yaxis()
    for place, row, margin in zip(places, found, margins, strict=True):
        text = f" {row.value:.3g} {row.unit} (goal {row.goal}) "
        axes.annotate(text, (margin, place), va="center", ha="left" if margin >= 1 else "right", fontsize=8)
    axes.set_xlim(min(0.3, *margins) / 3, max(margins) * 8)
    axes.set_xlabel("times better than its goal")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
