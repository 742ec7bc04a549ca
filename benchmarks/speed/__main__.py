"""Measure, and show one table: `python -m benchmarks.speed [--only NAME] [--out FOLDER] [--images N] …`."""

from __future__ import annotations

import argparse
import json
import platform
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.speed.figure import draw
from benchmarks.speed.parts import PARTS, measure
from benchmarks.speed.rows import Row, Sizes

console = Console()


def main() -> None:
    """Run the parts one after the other: nothing else should run beside them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; repeat for several")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="for speed.json and speed.svg")
    for field in fields(Sizes):
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(field.default), default=field.default, help=f"default: {field.default}")
    chosen = vars(parser.parse_args())
    only, out = chosen.pop("only"), chosen.pop("out")
    sizes = Sizes(**chosen)
    # each part in a process of its own: what one leaves behind in memory has cost the next up to a fifth
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as fresh:
        found = [row for name in only or PARTS for row in fresh.submit(measure, name, sizes).result()]
    console.print(_table(found))
    out.mkdir(parents=True, exist_ok=True)
    machine = {"machine": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    content = {"sizes": asdict(sizes), **machine, "rows": [{**asdict(row), "is_met": row.is_met} for row in found]}
    (out / "speed.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    draw(found, out / "speed.svg")
    console.print(f"wrote {out / 'speed.json'}, {out / 'speed.svg'}", style="dim")


def _table(found: list[Row]) -> Table:
    table = Table(title="How fast, side by side", show_lines=False, pad_edge=False)
    table.add_column("what", ratio=1)
    for name in ("goal", "figure", "ours", "other"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for row in found:
        what = f"{row.what}\n[dim]{row.note}[/]" if row.note else row.what
        mark = "[green]✓[/]" if row.is_met else "[red]✗[/]"
        table.add_row(what, str(row.goal), row.figure, row.ours, row.other, mark)
    return table


if __name__ == "__main__":
    main()
