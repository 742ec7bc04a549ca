"""Two ways to do the same, timed side by side: machines are noisy, so one is never timed without the other."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Timed:
    """Seconds of both, turn by turn. Other work on the machine makes a turn slower, never faster: the best counts."""

    ours: list[float]
    other: list[float]

    @property
    def times_faster(self) -> float:
        """How many times as long the other way takes, best against best."""
        return min(self.other) / min(self.ours)

    @property
    def times_longer(self) -> float:
        """How many times as long ours takes."""
        return min(self.ours) / min(self.other)


def side_by_side(ours: Callable[[], object], other: Callable[[], object], repeats: int) -> Timed:
    """Alternately, each after one turn that does not count; in the order a b, b a, a b, …, so that drift cancels."""
    timed = Timed([], [])
    ours(), other()
    for turn in range(repeats):
        pair = [(ours, timed.ours), (other, timed.other)]
        for run, seconds in pair if turn % 2 == 0 else reversed(pair):
            seconds.append(seconds_of(run))
    return timed


def seconds_of(run: Callable[[], object]) -> float:
    """How long it takes, with all that it has given to a GPU."""
    _wait()
    start = time.perf_counter()
    run()
    _wait()
    return time.perf_counter() - start


def shown(seconds: list[float]) -> str:
    """The best, as people read it."""
    return f"{min(seconds):.3g} s"


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
