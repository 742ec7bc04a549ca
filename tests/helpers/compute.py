"""What tests of the engine share: a Compute on the CPU, random images, a task that is watched."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from salcli.engine.batches import Rows
from salcli.engine.device import Compute, Processes
from salcli.progress import Silent

CPU = torch.device("cpu")
DEVICES = [CPU, *([torch.device("cuda")] if torch.cuda.is_available() else [])]


@dataclass(frozen=True)
class Numerics:
    precision: str = "float32"
    deterministic: bool = False
    compile: bool = False


def compute_with(precision: str = "float32", device: torch.device = CPU, **options: bool) -> Compute:
    return Compute(device, Numerics(precision, **options), Processes())


def some_images(n: int, shape: tuple[int, ...] = (3, 6, 6), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def rows_of(samples: np.ndarray) -> Rows:
    return Rows((samples,), np.arange(len(samples)))


@dataclass
class Watched(Silent):
    """Remembers what it was told, and interrupts the run after so many samples."""

    stop_after: int | None = None
    notes: list[str] = field(default_factory=list)
    skipped: int = 0
    seen: int = 0

    @contextmanager
    def task(self, name: str, total: int, unit: str) -> Iterator["Watched"]:
        yield self

    def advance(self, n: int, **values: float) -> None:
        self.seen += n
        if self.stop_after is not None and self.seen > self.stop_after:
            raise KeyboardInterrupt

    def skip(self, n: int) -> None:
        self.skipped += n

    def note(self, text: str) -> None:
        self.notes.append(text)
