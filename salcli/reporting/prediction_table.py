"""Predictions as a table for people: the least ID-like first."""

from __future__ import annotations

from heapq import nsmallest
from typing import TYPE_CHECKING, Any

from rich.text import Text

from salcli.reporting.prediction_rows import one_line, rows

if TYPE_CHECKING:
    from rich.table import Table

    from salcli.detector.detector import Scanned

SHOWN = 40
CLASS_WIDTH = 16
OTHER_COLUMNS = 60  # what all but the path take
SHORTEST_PATH = 16


class TableOfLowest:
    """Keeps what it will show, and no more."""

    def __init__(self, shown: int = SHOWN) -> None:
        self._shown, self._lowest, self._n = shown, list[tuple[Any, ...]](), 0

    def write(self, part: Scanned) -> None:
        """Some more files."""
        good = [row for row in rows(part) if row[-1] is None]
        self._n += len(good)
        self._lowest = nsmallest(self._shown, [*self._lowest, *good], key=_score)

    def table(self, width: int) -> Table:
        """No wider than `width`: of long paths the end is shown."""
        from salcli.reporting.stage_tables import plain_table  # brings pandas, which rows do without

        more = f"The {len(self._lowest)} least ID-like of {self._n:,} images" if self._n > len(self._lowest) else ""
        table = plain_table(more, "path", "class", "probability", "score", "OOD", "p-value")
        for path, name, probability, score, is_ood, p_value, _ in self._lowest:
            table.add_row(
                Text(_end(one_line(path), max(SHORTEST_PATH, width - OTHER_COLUMNS))),
                Text(_end(one_line(name), CLASS_WIDTH)),
                _number(probability, ".3f"),
                _number(score, ".3f"),
                Text("OOD", style="bold red") if is_ood else Text("–", style="dim"),
                _number(p_value, ".4f"),
            )
        return table


def _score(row: tuple[Any, ...]) -> float:
    score = row[3]
    return float("-inf") if score is None else float(score)


def _number(value: float | None, style: str) -> str:
    return "none" if value is None else format(value, style)


def _end(text: str, width: int) -> str:
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]
