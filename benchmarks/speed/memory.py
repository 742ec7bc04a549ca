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


@dataclass(frozen=True)
class Peak:
    """The most memory that a process had, in megabytes.

    `whole` counts pages of files, too, which are mapped while a batch is read: the system's cache, which it takes back
    when it likes. `own` is without them.
    """

    whole: float
    own: float


def peak_of(probe: str, *arguments: object, repeats: int = 1) -> Peak:
    """Of a probe (benchmarks/speed/probes.py): the lowest of some runs, since it is chance what is freed when."""
    command = [sys.executable, "-m", "benchmarks.speed.probes", probe, *map(str, arguments)]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(repeats)]
    return min((Peak(**json.loads(done.stdout.splitlines()[-1])) for done in runs), key=lambda peak: peak.own)


def peak_during(run: Callable[[], object]) -> Peak:
    """Of this process."""
    seen, done = [_memory()], threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(_memory())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
    return Peak(*(max(column) for column in zip(*seen, strict=True)))


def _memory() -> tuple[float, float]:
    """Of this process now, as in `Peak` (Linux)."""
    with open("/proc/self/status") as status:  # noqa: PTH123  # many times a second
        kilobytes = dict(line.split()[:2] for line in status if line.startswith(("VmRSS:", "RssAnon:")))
    return int(kilobytes["VmRSS:"]) / 1024, int(kilobytes["RssAnon:"]) / 1024
