"""What the benchmark measures, and what was found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """A bound that the figure should keep."""

    bound: float
    at_most: bool = False

    def is_met(self, value: float) -> bool:
        """Whether it does."""
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.bound:g}"


@dataclass(frozen=True)
class Row:
    """One line of the table. `ours` and `other` are what the figure is the ratio of, as people read them."""

    what: str
    goal: Goal
    value: float
    ours: str
    other: str
    unit: str = "×"
    note: str = ""

    @property
    def is_met(self) -> bool:
        """Whether the goal is."""
        return self.goal.is_met(self.value)

    @property
    def figure(self) -> str:
        """The value, as people read it."""
        return f"{self.value:.3g} {self.unit}"


@dataclass(frozen=True)
class Sizes:
    """How much of everything. The defaults fit a laptop; each is a flag, for larger machines."""

    device: str = "cpu"
    repeats: int = 3
    backbone: str = "wrn-40-2"
    images: int = 1024  # that go through the network
    wild: int = 27_778  # gradients to filter
    classes: int = 100
    features: int = 128
    big_wild: int = 100_000
    big_classes: int = 1000
    big_features: int = 2048
    scores: int = 10_000_000
