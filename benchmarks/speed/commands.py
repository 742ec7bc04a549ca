"""What people wait for before anything is computed: start-up, and DVC's own work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.speed.clock import shown, side_by_side
from benchmarks.speed.rows import Goal, Row, Sizes

if TYPE_CHECKING:
    from collections.abc import Iterator

BIN = Path(sys.executable).parent
WORKED = re.compile(r"worked\s+([\d.]+)\s+s")  # what every stage says at its end, maybe over two lines


def rows(sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Three lines of the table."""
    timed = side_by_side(
        lambda: _run("salcli", "--help"), lambda: _run("python", "-c", "import typer, rich"), 3 * sizes.repeats
    )
    yield Row(
        'salcli --help / python -c "import typer, rich"',
        Goal(2, at_most=True), timed.times_longer, shown(timed.ours), shown(timed.other),
    )  # fmt: skip

    project = folder / "demo"
    _run("salcli", "init", str(project))
    started = time.perf_counter()
    output = _run("dvc", "repro", cwd=project)
    wall = time.perf_counter() - started
    worked = [float(seconds) for seconds in WORKED.findall(output)]
    yield Row(
        "dvc repro of the demo: seconds of work / all seconds",
        Goal(0.5), sum(worked) / wall, f"{sum(worked):.0f} s", f"{wall:.0f} s",
        note=f"{len(worked)} stages; work is what runs below a progress bar",
    )  # fmt: skip

    idle = []
    for _ in range(sizes.repeats):
        started = time.perf_counter()
        _run("dvc", "repro", cwd=project)
        idle.append(time.perf_counter() - started)
    yield Row(
        "dvc repro with nothing to do", Goal(3, at_most=True), min(idle), shown(idle), "–", unit="s",
        note="the best of several",
    )  # fmt: skip


def _run(program: str, *arguments: str, cwd: Path | None = None) -> str:
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [str(BIN / program), *arguments], cwd=cwd, env=environment, check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{program} {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout
