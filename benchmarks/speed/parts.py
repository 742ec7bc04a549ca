"""The parts of the benchmark, by name. Not in `__main__`, which a spawned process cannot import."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from benchmarks.speed import commands, extraction, filtering, scoring, training

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.speed.rows import Row, Sizes

PARTS: dict[str, Callable[[Sizes, Path], Iterator[Row]]] = {
    "extraction": extraction.rows,
    "filtering": filtering.rows,
    "training": training.rows,
    "scoring": scoring.rows,
    "commands": commands.rows,
}
console = Console()


def measure(name: str, sizes: Sizes) -> list[Row]:
    """All rows of one part, each told as it is found."""
    found = []
    with tempfile.TemporaryDirectory() as place:
        for row in PARTS[name](sizes, Path(place)):
            console.print(f"{row.what}: {row.figure}", style="dim", highlight=False)
            found.append(row)
    return found
