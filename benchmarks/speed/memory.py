"""The peak memory of a piece of work, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MEGABYTE = 2**20


@dataclass(frozen=True)
class Peak:
    """The most memory that a process had (its resident set), in megabytes: all of it, and what came with the work."""

    whole: float
    beyond_start: float

    def __str__(self) -> str:
        return f"{self.whole:.0f} MB"


def peak_of(probe: str, *arguments: object) -> Peak:
    """Of a probe (benchmarks/speed/probes.py)."""
    command = [sys.executable, "-m", "benchmarks.speed.probes", probe, *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Peak(**json.loads(done.stdout.splitlines()[-1]))


def peak_during(run: Callable[[], object]) -> Peak:
    """Of this process."""
    before, most, done = _resident(), [0.0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            most[0] = max(most[0], _resident())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
    return Peak(most[0], most[0] - before)


def _resident() -> float:
    """Of this process, in megabytes (Linux)."""
    with open("/proc/self/status") as status:  # noqa: PTH123  # many times a second
        line = next(line for line in status if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024 / MEGABYTE
