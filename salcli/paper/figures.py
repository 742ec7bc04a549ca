"""results.csv: the paper's tables, one figure a line."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

OF_ALL_SETS = "-"  # in place of an OOD set: a figure that is none of a single one, like ID accuracy
UNSEEN_300K, UNSEEN_TIN = "unseen-300k", "unseen-tin"
OTHER_CROP = {"tin-crop": "tin-resize", "tin-resize": "tin-crop"}

N_RUNS = {"main-cifar100": 10, "cifar10": 10}  # what the captions say figures are averaged over; no other caption does


@dataclass(frozen=True)
class Setting:
    """A table, or one π of it. `pi` is None where the paper does not tell."""

    table: str
    id: str
    backbone: str
    pi: float | None

    @property
    def n_runs(self) -> int | None:
        """How many runs the figures are averaged over, None where the paper does not tell."""
        return N_RUNS.get(self.table)


@dataclass(frozen=True)
class Figure:
    """One figure; `test` is the OOD set that is tested on, in percent where the metric is a share of samples."""

    setting: Setting
    method: str
    test: str
    metric: str
    value: float

    @property
    def wild(self) -> str:
        """The OOD set that hides in the wild: the tested one itself, except where the paper tests on unseen ones."""
        if self.setting.table == UNSEEN_300K:
            return "300k-random"
        return OTHER_CROP[self.test] if self.setting.table == UNSEEN_TIN else self.test


@cache
def figures() -> tuple[Figure, ...]:
    """All of them, in the paper's order."""
    text = (files("salcli.paper") / "results.csv").read_text(encoding="utf-8")
    return tuple(
        Figure(
            setting=Setting(line["table"], line["id"], line["backbone"], float(line["pi"]) if line["pi"] else None),
            method=line["method"],
            test=line["ood"],
            metric=line["metric"],
            value=float(line["value"]),
        )
        for line in csv.DictReader(text.splitlines())
    )


@cache
def settings() -> dict[Setting, tuple[Figure, ...]]:
    """The figures of each setting, in the paper's order."""
    grouped: dict[Setting, list[Figure]] = {}
    for figure in figures():
        grouped.setdefault(figure.setting, []).append(figure)
    return {setting: tuple(own) for setting, own in grouped.items()}
