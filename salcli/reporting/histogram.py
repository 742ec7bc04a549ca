"""A histogram of two samples side by side, made of characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

if TYPE_CHECKING:
    from numpy.typing import NDArray

N_BINS = 14
BAR_WIDTH = 28
EIGHTHS = " ▏▎▍▌▋▊▉█"


def two_histograms(
    left: NDArray[np.floating], right: NDArray[np.floating], names: tuple[str, str], threshold: float
) -> Text:
    """Shares of two samples in common bins; what lies above the threshold T is yellow."""
    edges = _bin_edges(np.concatenate([left, right]))
    if edges[0] < threshold < edges[-1]:  # a bin lies above or below the threshold, never across it
        edges[1:-1][np.abs(edges[1:-1] - threshold).argmin()] = threshold
    shares = [np.histogram(np.clip(sample, edges[0], edges[-1]), edges)[0] / len(sample) for sample in (left, right)]
    largest = max(share.max() for share in shares)
    text = Text(f"{'':>12}  {names[0]:<{BAR_WIDTH + 7}}{names[1]}\n", style="bold")
    for i, edge in enumerate(edges[:-1]):
        bars = [f"{share[i]:>5.1%} {_bar(share[i] / largest):<{BAR_WIDTH}}" for share in shares]
        marker = "T" if edge == threshold else " "
        style = "yellow" if edge >= threshold else ""
        text.append(f"{marker} {edge:>10.2g}  {bars[0]} {bars[1].rstrip()}\n", style=style)
    return text


def _bin_edges(values: NDArray[np.floating]) -> NDArray[np.floating]:
    """Scores ≥ 0 range over many powers of ten, so their bins do too; else bins of one width."""
    low, high = float(values.min()), float(values.max())
    positive = values[values > 0]
    if low >= 0 and len(positive) and high > 100 * np.median(positive):
        floor = max(float(np.quantile(positive, 0.02)), high * 1e-12)
        return np.concatenate([[0.0], np.geomspace(floor, high, N_BINS)])
    return np.linspace(low, high if high > low else low + 1, N_BINS + 1)


def _bar(share: float) -> str:
    eighths = round(share * BAR_WIDTH * 8)
    if share > 0:
        eighths = max(eighths, 1)
    full, rest = divmod(eighths, 8)
    return "█" * full + EIGHTHS[rest].strip()
