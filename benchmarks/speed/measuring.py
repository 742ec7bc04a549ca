"""Timing and peak memory of two ways to do the same, and the rows of the table that they become."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """How much of everything. The defaults fit a laptop; each is a flag, for larger machines."""

    device: str = "cpu"
    repeats: int = 2
    backbone: str = "wrn-40-2"
    images: int = 512  # that go through the network
    wild: int = 27_778  # samples to filter
    classes: int = 100
    features: int = 128
    big_wild: int = 100_000
    big_classes: int = 1000
    big_features: int = 2048
    scores: int = 10_000_000
    photos: int = 160  # that are embedded
    vectors: int = 27_778  # wild ones; as many ID samples as with CIFAR-10
    dimensions: int = 1280
    known: int = 25_000  # among which KNN looks
    queries: int = 10_000


# For a quick try: whether all parts run, not how fast.
QUICK = Sizes(
    repeats=1, backbone="small-cnn", images=256, wild=800, classes=10, features=64, big_wild=1000, big_classes=20,
    big_features=64, scores=100_000, photos=16, vectors=400, dimensions=64, known=1000, queries=500,
)  # fmt: skip


# -- rows of the table


@dataclass(frozen=True)
class Goal:
    """A bound for a value: at least, or at most."""

    bound: float
    at_most: bool = False

    def margin(self, value: float) -> float:
        """How many times better than the bound the value is; 1 or more if the goal is met."""
        return self.bound / value if self.at_most else value / self.bound

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.bound:g}"


@dataclass(frozen=True)
class Row:
    """One line of the table: a value, and the two measurements that it is the ratio of, as text."""

    what: str
    goal: Goal
    value: float
    ours: str
    baseline: str
    unit: str = "×"
    note: str = ""

    @classmethod
    def of_times(cls, what: str, goal: Goal, timed: Timed, note: str = "") -> Row:
        """The ratio that the goal is about: how many times as long we take, or how many times as fast we are."""
        value = timed.times_longer if goal.at_most else timed.times_faster
        return cls(what, goal, value, seconds_text(min(timed.ours)), seconds_text(min(timed.baseline)), note=note)

    @classmethod
    def of_memory(cls, what: str, ours: Peak, baseline: Peak) -> Row:
        """Memory that should not grow with the data."""
        goal, value = Goal(1.1, at_most=True), ours.own / baseline.own
        return cls(what, goal, value, f"{ours.own:.0f} MB", f"{baseline.own:.0f} MB")

    @property
    def is_met(self) -> bool:
        return self.goal.margin(self.value) >= 1

    @property
    def value_text(self) -> str:
        return f"{self.value:.3g} {self.unit}"


Part = Callable[[Sizes, Path], Iterator[Row]]  # a part of the benchmark, with a folder for its files


def measure(part: Part, sizes: Sizes) -> list[Row]:
    """All rows of a part, each printed as soon as it is measured."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in part(sizes, Path(folder)):
            print(f"{row.what}: {row.value_text}", flush=True)
            rows.append(row)
    return rows


# -- time


@dataclass(frozen=True)
class Timed:
    """Seconds of both ways in each round. Other work on the machine can only slow a round down: the best counts."""

    ours: list[float]
    baseline: list[float]

    @property
    def times_faster(self) -> float:
        return min(self.baseline) / min(self.ours)

    @property
    def times_longer(self) -> float:
        return min(self.ours) / min(self.baseline)

    def per_item(self, n_ours: int, n_baseline: int) -> Timed:
        return Timed([s / n_ours for s in self.ours], [s / n_baseline for s in self.baseline])


def side_by_side(ours: Callable[[], object], baseline: Callable[[], object], repeats: int) -> Timed:
    """Time both in turn, after one run of each to warm up; in the order a b, b a, a b, …, so that drift cancels."""
    timed = Timed([], [])
    ours(), baseline()
    for turn in range(repeats):
        pair = [(ours, timed.ours), (baseline, timed.baseline)]
        for run, seconds in pair if turn % 2 == 0 else reversed(pair):
            seconds.append(seconds_of(run))
    return timed


def seconds_of(run: Callable[[], object]) -> float:
    """Wall time, including all work that it has queued on a GPU."""
    _wait_for_gpu()
    start = time.perf_counter()
    run()
    _wait_for_gpu()
    return time.perf_counter() - start


def seconds_text(seconds: float) -> str:
    if seconds < 0.1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# -- memory


class Peak(NamedTuple):
    """The most memory that a process had, in megabytes.

    `whole` includes pages of files that were mapped for a moment: the system's cache, which it takes back when it needs
    to. `own` is without them.
    """

    whole: float
    own: float


def in_new_process(run: Callable[..., T], *arguments: object) -> T:
    """`run(*arguments)` in a process of its own: memory that one part leaves behind has slowed the next by 20 %."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(run, *arguments).result()


def lowest_peak(probe: Callable[..., Peak], *arguments: object, repeats: int = 1) -> Peak:
    """The lowest of several runs, because it is chance when memory is freed."""
    return min((in_new_process(probe, *arguments) for _ in range(repeats)), key=lambda peak: peak.own)


def peak_during(run: Callable[[], object]) -> Peak:
    """The peak of this process while `run` runs."""
    seen, done = [_memory()], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            seen.append(_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
    return Peak(*(max(column) for column in zip(*seen, strict=True)))


def _memory() -> Peak:
    """Of this process now. Linux only."""
    with open("/proc/self/status") as status:  # noqa: PTH123  # many times a second
        kilobytes = dict(line.split()[:2] for line in status if line.startswith(("VmRSS:", "RssAnon:")))
    return Peak(int(kilobytes["VmRSS:"]) / 1024, int(kilobytes["RssAnon:"]) / 1024)
