"""Speed and memory of salcli against other ways to do the same, as a table: `make bench`, or

    python -m benchmarks.speed [--quick] [--only PART] [--out FOLDER] [--device cuda] [--images N] …

Run it on a machine that does nothing else. It takes 12 minutes on two cores, 25 on slow ones.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, fields, replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.speed.filtering import filtering, scale
from benchmarks.speed.measuring import QUICK, Part, Row, Sizes, in_new_process, measure
from benchmarks.speed.stages import commands, extraction, scoring, training
from benchmarks.speed.vectors import vectors

PARTS: dict[str, Part] = {
    part.__name__: part for part in (extraction, filtering, scale, training, scoring, vectors, commands)
}
MET, MISSED = "#2a7f62", "#c0504d"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; repeat for several")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="for speed.json and speed.svg")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see whether everything runs")
    for field in fields(Sizes):
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(field.default), help=f"default: {field.default}")
    chosen = vars(parser.parse_args())
    only, out, is_quick = (chosen.pop(name) for name in ("only", "out", "quick"))
    given = {name: value for name, value in chosen.items() if value is not None}
    sizes = replace(QUICK if is_quick else Sizes(), **given)
    rows, minutes = [], {}
    for name in only or PARTS:
        start = time.perf_counter()
        rows += in_new_process(measure, PARTS[name], sizes)
        minutes[name] = round((time.perf_counter() - start) / 60, 1)
    console = Console()
    console.print(_table(rows))
    out.mkdir(parents=True, exist_ok=True)
    machine = {"machine": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    results = [{**asdict(row), "is_met": row.is_met} for row in rows]
    content = {"sizes": asdict(sizes), **machine, "minutes": minutes, "rows": results}
    (out / "speed.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    _draw(rows, out / "speed.svg")
    took = ", ".join(f"{name} {value} min" for name, value in minutes.items())
    console.print(f"{took}; wrote {out / 'speed.json'}, {out / 'speed.svg'}", style="dim")


def _table(rows: list[Row]) -> Table:
    table = Table(title="Speed and memory", pad_edge=False)
    table.add_column("what", ratio=1)
    for name in ("goal", "value", "ours", "baseline"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for row in rows:
        what = f"{row.what}\n[dim]{row.note}[/]" if row.note else row.what
        mark = "[green]✓[/]" if row.is_met else "[red]✗[/]"
        table.add_row(what, str(row.goal), row.value_text, row.ours, row.baseline, mark)
    return table


def _draw(rows: list[Row], path: Path) -> None:
    """A bar for each row: how many times better than its goal the value is. Bars to the left of 1 miss their goal."""
    margins = [row.goal.margin(row.value) for row in rows]
    figure, axes = plt.subplots(figsize=(10, 0.42 * len(rows) + 1.2), layout="constrained")
    positions = range(len(rows))
    colours = [MET if row.is_met else MISSED for row in rows]
    axes.barh(positions, [margin - 1 for margin in margins], left=1, color=colours, height=0.6)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(positions, [row.what for row in rows], fontsize=8)
    axes.invert_yaxis()
    for position, row, margin in zip(positions, rows, margins, strict=True):
        text = f" {row.value_text} (goal {row.goal}) "
        axes.annotate(text, (margin, position), va="center", ha="left" if margin >= 1 else "right", fontsize=8)
    axes.set_xlim(min(0.3, *margins) / 3, max(margins) * 8)
    axes.set_xlabel("times better than the goal")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
