"""All evaluations of a workspace as one table of figures: mean and std over seeds."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from salcli.artifacts import layout
from salcli.artifacts.layout import Found
from salcli.errors import BadArtifactError, MissingArtifactError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    import pandas as pd

    from salcli.artifacts.layout import Artifact
    from salcli.params import Params
    from salcli.stages.evaluate import Evaluated

METRICS = {
    "fpr95": "FPR95 ↓",
    "auroc": "AUROC ↑",
    "aupr_in": "AUPR-in ↑",
    "aupr_out": "AUPR-out ↑",
    "id_accuracy": "ID acc. ↑",
}
LOWER_IS_BETTER = {"fpr95"}
AVERAGE = "average"
SHORT = "short_schedule"
SHARED_SAMPLES = {"n_id_train": "ID train", "n_calibration": "ID calibration", "n_wild": "wild", "id_test": "ID test"}


@dataclass(frozen=True)
class Row:
    """One method on one OOD set, in percent. `best` names the metrics in which no other method beats it."""

    ood: str  # the test set, and the wild one where that is another
    method: str
    n_seeds: int
    mean: dict[str, float]
    std: dict[str, float]  # NaN for a single seed
    best: frozenset[str]
    has_short_schedule: bool  # of any seed


@dataclass(frozen=True)
class Results:
    """runs: one line for each wild OOD set (ood), test_set, seed and method, metrics in percent. samples: by name."""

    runs: pd.DataFrame
    samples: dict[str, str]
    n_left_out: int = 0  # evaluations that were found, but not asked for

    @classmethod
    def from_evaluations(cls, done: Sequence[Evaluated]) -> Results:
        """What `evaluate` just computed. An unseen set that is in the wild data, too, counts once."""
        first = {_Place.of(result): result for result in reversed(done)}
        done = [result for result in done if first[_Place.of(result)] is result]
        runs = [
            _run(
                _Place.of(result),
                method,
                {
                    **(asdict(own) if own else {}),
                    "id_accuracy": result.id_accuracy[method],
                    SHORT: method in result.short_schedules,
                },
            )
            for result in done
            for method, own in result.metrics.items()
        ]
        counts = [(_Place.of(one), {"id_test": one.n_id_test, "ood_test": one.n_ood_test}) for one in done]
        return cls(_frame(runs), _samples(counts))

    @classmethod
    def from_folder(cls, folder: Path, only: Collection[tuple[str, str, int]] | None = None) -> Results:
        """Every metrics.json below folder/SEED/OOD/, or `only` those of some OOD sets (wild, tested) and seeds."""
        runs: list[dict[str, Any]] = []
        counts: list[tuple[_Place, dict[str, int]]] = []
        n_left_out = 0
        own_tests, unseen = folder.glob("*/*/metrics.json"), folder.glob(f"*/*/{layout.UNSEEN}/*/metrics.json")
        for path in [*sorted(own_tests), *sorted(unseen)]:
            place = _Place.of_file(path.relative_to(folder))
            if place is None or place in [known for known, _ in counts]:  # unseen sets that are in the wild, too
                continue
            if only is not None and place not in only:
                n_left_out += 1
            else:
                own_runs, own_counts = _read_evaluation(path, place)
                runs += own_runs
                counts.append((place, own_counts))
        if not runs:
            made_by = "salcli evaluate --scratch" if layout.SCRATCH in folder.parts else "dvc repro, or salcli evaluate"
            raise MissingArtifactError(f"there is no evaluation below {folder} yet; make one with: {made_by}")
        return cls(_frame(runs), _samples(counts), n_left_out)

    @property
    def ood_sets(self) -> list[str]:
        """What is tested on, in the order it was found."""
        return list(dict.fromkeys(self._labels()))

    @property
    def wild_sets(self) -> list[str]:
        """What was in the wild data."""
        return list(self.runs["ood"].unique())

    def _labels(self) -> list[str]:
        """The test set of each run; with the wild one, where that is another and there are several."""
        pairs = zip(self.runs["ood"], self.runs["test_set"], strict=True)
        is_plain = len(self.wild_sets) == 1
        return [test if is_plain or test == wild else f"{test} (wild {wild})" for wild, test in pairs]

    @property
    def unknown_sets(self) -> list[str]:
        """What is wild as it comes, so that nobody knows its OOD data."""
        unknown = self.runs["fpr95"].isna()
        return [label for label in self.ood_sets if unknown[[one == label for one in self._labels()]].all()]

    @property
    def n_seeds(self) -> int:
        """How many seeds there are."""
        return int(self.runs["seed"].nunique())

    def rows(self) -> list[Row]:
        """Every OOD set, then their average (within a seed first, then over seeds); best method first."""
        metrics = list(METRICS)
        averages = self.runs.groupby(["method", "seed"], sort=False)[metrics].mean().reset_index()
        ranking = averages.groupby("method")["fpr95"].mean().sort_values(kind="stable").index
        labels = self._labels()
        groups = [(ood, self.runs[[label == ood for label in labels]]) for ood in self.ood_sets]
        known = [(ood, runs) for ood, runs in groups if runs["fpr95"].notna().any()]
        groups = known or groups  # where nobody knows what is OOD, only the accuracy is left, which others have, too
        if len(groups) > 1:
            groups.append((AVERAGE, averages))
        short = frozenset(self.runs["method"][self.runs[SHORT]])
        return [row for ood, runs in groups for row in _rows(ood, runs, list(ranking), short)]


def _frame(runs: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd  # slow to load, and most stages print no results

    return pd.DataFrame(runs)


def _rows(ood: str, runs: pd.DataFrame, ranking: list[str], short: frozenset[str]) -> list[Row]:
    grouped = runs.groupby("method")[list(METRICS)]
    mean, std, n_seeds = grouped.mean().astype(float), grouped.std().astype(float), grouped.size()
    shown = mean.map(lambda value: float(f"{value:.1f}"))  # what looks equal is equally good
    best = {metric: shown[metric].min() if metric in LOWER_IS_BETTER else shown[metric].max() for metric in METRICS}
    return [
        Row(
            ood=ood,
            method=method,
            n_seeds=int(n_seeds[method]),
            mean={metric: float(mean[metric][method]) for metric in METRICS},
            std={metric: float(std[metric][method]) for metric in METRICS},
            best=frozenset(metric for metric in METRICS if shown.at[method, metric] == best[metric]),
            has_short_schedule=method in short,
        )
        for method in ranking
        if method in mean.index
    ]


def asked_for(params: Params) -> set[tuple[str, str, int]]:
    """The evaluations that params.yaml asks for: wild OOD set, test set, seed."""
    data = params.data
    return {(ood, test, seed) for ood in data.ood for test in (ood, *data.test_ood) for seed in params.seeds}


class _Place(NamedTuple):
    """What an evaluation is about."""

    ood: str
    test_set: str
    seed: int

    @classmethod
    def of(cls, result: Evaluated) -> _Place:
        return cls(result.ood, result.test_set, result.seed)

    @classmethod
    def of_file(cls, path: Path) -> _Place | None:
        """From SEED/OOD/metrics.json or SEED/OOD/unseen/TEST/metrics.json; None for somebody's backup."""
        seed, ood, *_ = path.parts
        test_set = ood if len(path.parts) == 3 else path.parts[3]
        return cls(ood, test_set, int(seed)) if seed.isdecimal() else None


def _run(place: _Place, method: str, figures: dict[str, Any]) -> dict[str, Any]:
    """NaN where a figure is not known, because nobody knows what is OOD."""
    in_percent = {name: math.nan if figures.get(name) is None else 100 * float(figures[name]) for name in METRICS}
    return {**place._asdict(), "method": method, **in_percent, SHORT: bool(figures.get(SHORT, False))}


def _read_evaluation(path: Path, place: _Place) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The figures of each method, and the counts of samples in it and in the filter's figures beside it."""
    unseen = None if place.test_set == place.ood else place.test_set
    with _reading_json(path, layout.metrics(place.ood, place.seed, unseen)) as content:
        counts = {name: int(content["samples"][name]) for name in ("id_test", "ood_test")}
        methods = {method: figures for method, figures in content.items() if method != "samples"}
        for name in METRICS:
            for figures in methods.values():
                figures[name]  # a figure that is not known is null, not absent
        runs = [_run(place, method, figures) for method, figures in methods.items()]
    filtered = path.with_name("filter.json")
    if filtered.exists():
        with _reading_json(filtered, layout.filter_metrics(place.ood, place.seed)) as content:
            counts |= {name: int(content[name]) for name in ("n_id_train", "n_calibration", "n_wild", "n_candidates")}
    return runs, counts


@contextmanager
def _reading_json(path: Path, artifact: Artifact) -> Iterator[Any]:
    try:
        yield json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise BadArtifactError(
            f"{path} is damaged or not ours ({error}); {Found(path, artifact.made_by).cure}"
        ) from None


def _samples(counts: list[tuple[_Place, dict[str, int]]]) -> dict[str, str]:
    """How many samples each set has; a range where runs differ."""
    samples = {name: _range([own[key] for _, own in counts if key in own]) for key, name in SHARED_SAMPLES.items()}
    for ood in dict.fromkeys(place.test_set for place, _ in counts):
        own_counts = [own for place, own in counts if place.test_set == ood]
        samples[f"{ood} test"] = _range([own["ood_test"] for own in own_counts if own["ood_test"]])
        samples[f"{ood} candidates"] = _range([own["n_candidates"] for own in own_counts if "n_candidates" in own])
    return {name: text for name, text in samples.items() if text}


def _range(values: list[int]) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"
