"""All metrics.json files of a workspace as tables: mean ± std over seeds, one table for each share π of OOD data.

Everything that a table needs stands in those files, the labels of the methods too, so neither torch nor the methods
are loaded. What the stored scores add, intervals above all, is in bootstrap.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Group, RenderableType

from salcli.errors import MissingArtifactError, ParamsError, SalError
from salcli.params.reading import AVERAGE, check_groups, lookup
from salcli.report.console import Cell, Grid
from salcli.sal.estimates import NO_HOLDOUT
from salcli.sal.metrics import FPR95_CONVENTION, FPR95_OOD_POSITIVE
from salcli.store.files import Found, reading_json
from salcli.store.layout import SAL, SCRATCH, UNKNOWN, Experiment

if TYPE_CHECKING:  # slow to load
    import pandas as pd

METRICS = {
    "fpr95": "FPR95 ↓",
    "auroc": "AUROC ↑",
    "aupr_in": "AUPR-in ↑",
    "aupr_out": "AUPR-out ↑",
    "id_accuracy": "ID acc. ↑",
}
LOWER_IS_BETTER = {"fpr95"}
ESTIMATED, ESTIMATE = ("fpr95", "auroc"), ("value", "low", "high")
SHORT, PROTOCOL = "short_schedule", "protocol"
DRAWS = {"fpr95": "fpr95_draws", "auroc": "auroc_draws"}  # columns of runs with the metric in each resample
LEAST = "least_step"  # column of runs: percent that a difference must be, however small its interval
ENDS = (0.025, 0.975)  # of an interval
ID_POSITIVE, OOD_POSITIVE = "id-positive", "ood-positive"
CONVENTIONS = {ID_POSITIVE: FPR95_CONVENTION, OOD_POSITIVE: FPR95_OOD_POSITIVE}
SHORT_SCHEDULE = "\n(short schedule)"  # on a line of its own in the terminal
FULL_WIDTH = 96  # terminal columns that mean ± std needs
CANNOT_TELL = "cannot tell"
INTERVAL = "95% interval"
BEATS = (
    "Beats: a lower FPR95 in every seed, by more than resamples of the test samples explain (95% interval of all "
    "differences at once)."
)
WIDER = 2  # what "(short schedule)" needs beyond that
# below runs/: on the OOD set of the wild data, and on sets that are only tested on
EVALUATIONS = ("*/*/pi-*/evaluation/metrics.json", "*/*/pi-*/evaluation/unseen/*/metrics.json")
SHARED_SAMPLES = {"n_id_train": "ID train", "n_calibration": "ID calibration", "n_wild": "wild", "id_test": "ID test"}


# --- collecting


class EvaluationKey(NamedTuple):
    """What one evaluation is about. `pi` is text, because it may be unknown."""

    seed: int
    ood: str  # in the wild data
    pi: str
    test_set: str

    @classmethod
    def of(cls, path: Path) -> EvaluationKey | None:
        """From …/SEED/OOD/pi-PI/evaluation/metrics.json or …/evaluation/unseen/TEST/metrics.json; None for a backup."""
        seed, ood, pi = _run_folder(path).parts[-3:]
        test_set = ood if path.parent.name == "evaluation" else path.parent.name
        return cls(int(seed), ood, pi_text(pi.removeprefix("pi-")), test_set) if seed.isdecimal() else None

    @property
    def experiment(self) -> Experiment:
        return Experiment(self.seed, self.ood, self.pi if self.pi == UNKNOWN else float(self.pi))

    @property
    def made_by(self) -> str:
        unseen = "" if self.test_set == self.ood else self.test_set
        return self.experiment.evaluation("metrics.json", unseen).made_by


def _run_folder(path: Path) -> Path:
    """SEED/OOD/pi-PI of a metrics.json."""
    return next(folder.parent for folder in path.parents if folder.name == "evaluation")


def _evaluations(folder: Path) -> dict[EvaluationKey, Path]:
    """Every metrics.json below a runs folder. An unseen set that is also in the wild data counts once."""
    found: dict[EvaluationKey, Path] = {}
    for pattern in EVALUATIONS:
        for path in sorted(folder.glob(pattern)):
            if key := EvaluationKey.of(path):
                found.setdefault(key, path)
    return found


def pi_text(pi: float | str) -> str:
    """0.1 and "0.10" are the same π."""
    return UNKNOWN if pi == UNKNOWN else f"{float(pi):g}"


def asked_for(raw: Mapping[str, Any]) -> set[EvaluationKey]:
    """The evaluations that params.yaml asks for. Takes its raw content: the schema would load every method."""
    try:
        data = raw["data"]
        return {
            EvaluationKey(int(seed), ood, pi_text(pi), test)
            for seed in raw["seeds"]
            for ood in data["ood"]
            for pi in data["pi"]
            for test in (ood, *data["test_ood"])
        }
    except (KeyError, TypeError, ValueError):
        wrong = (
            "params.yaml is not valid in seeds, data.ood, data.pi or data.test_ood; salcli prepare says what is wrong"
        )
        raise ParamsError(wrong) from None


def groups_of(raw: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """data.groups of params.yaml: test sets whose mean is shown, too."""
    try:
        groups: dict[str, Sequence[str]] = dict(lookup(raw, "data.groups") or {})
        check_groups(groups, [*lookup(raw, "data.ood"), *lookup(raw, "data.test_ood")] if groups else [])
    except (SalError, TypeError, ValueError) as error:
        raise ParamsError(f"params.yaml is not valid: data.groups: {error}") from None
    return groups


@dataclass(frozen=True)
class Row:
    """One method in one section, in percent. `best` names the metrics in which no other method beats it."""

    pi: str
    ood: str  # the test set, and the wild one where that is another; or a group, or the average
    method: str
    label: str
    n_seeds: int
    mean: dict[str, float]
    std: dict[str, float]  # NaN for a single seed
    best: frozenset[str]
    has_short_schedule: bool  # of any seed
    intervals: dict[str, tuple[float, float]]  # of FPR95 and AUROC, over test samples; empty unless asked for

    @property
    def name(self) -> str:
        return self.label + (SHORT_SCHEDULE if self.has_short_schedule else "")

    def cells(self, *, with_std: bool = True) -> Iterator[Cell]:
        for metric in self.intervals or METRICS:
            mean, std = self.mean[metric], self.std[metric]
            text = f"{mean:.1f}" if math.isnan(std) or not with_std else f"{mean:.1f} ± {std:.1f}"
            yield Cell(UNKNOWN) if math.isnan(mean) else Cell(text, is_bold=metric in self.best)
            if self.intervals:
                yield Cell(UNKNOWN if math.isnan(mean) else "–".join(f"{end:.1f}" for end in self.intervals[metric]))


@dataclass(frozen=True)
class Estimated:
    """What held-out wild data say about one wild set without labels, in percent: mean over seeds of (value, low, high).

    `reasons` say how the best method was chosen, or why nothing can be told, one for each seed.
    """

    ood: str
    share: tuple[float, ...] | None  # π̂
    methods: dict[str, dict[str, tuple[float, ...]]]  # fpr95 and auroc
    chosen: list[str]
    reasons: list[str]


@dataclass(frozen=True)
class Results:
    """runs: one line for each EvaluationKey and method, metrics in percent. samples: counts by name."""

    runs: pd.DataFrame
    samples: dict[str, str]
    n_left_out: int = 0  # evaluations that exist, but were not asked for
    estimates: Mapping[EvaluationKey, Mapping[str, Any]] = field(default_factory=dict)  # of estimates.json, if any
    files: Mapping[EvaluationKey, Path] = field(default_factory=dict)  # metrics.json
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)  # test sets whose mean is a section, too
    sort: str = ""  # the metric that each section is sorted by; "": all by the average FPR95
    convention: str = ID_POSITIVE  # of FPR95
    intervals: bool = False  # show FPR95 and AUROC alone, each with its interval; needs the draws of bootstrap.py
    verdicts: Mapping[str, str] = field(default_factory=dict)  # by π: what the table shows, in a sentence

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        only: Collection[EvaluationKey] | None = None,
        groups: Mapping[str, Sequence[str]] | None = None,
    ) -> Results:
        """Every evaluation below a runs folder, or `only` some of them."""
        found = _evaluations(folder)
        wanted = [path for key, path in found.items() if only is None or key in only]
        if not wanted:
            made_by = "salcli evaluate --scratch" if SCRATCH in folder.parts else "dvc repro, or salcli evaluate"
            raise MissingArtifactError(f"there is no evaluation below {folder} yet; make one with: {made_by}")
        return replace(cls.read(wanted, len(found) - len(wanted)), groups=groups or {})

    @classmethod
    def read(cls, paths: Iterable[Path], n_left_out: int = 0) -> Results:
        """Some metrics.json files, for example those that `evaluate` has just written."""
        import pandas as pd

        runs: list[dict[str, Any]] = []
        counts: dict[EvaluationKey, dict[str, int]] = {}
        estimates: dict[EvaluationKey, Mapping[str, Any]] = {}
        files: dict[EvaluationKey, Path] = {}
        for path in paths:
            key = EvaluationKey.of(path)
            if key is None or key in files:
                continue
            own_runs, counts[key] = _read_evaluation(path, key)
            runs += own_runs
            files[key] = path
            if found := _read_estimates(path, key):
                estimates[key] = found
        frame = pd.DataFrame(runs)
        frame = frame.sort_values("pi", key=lambda column: column.map(_by_value), kind="stable", ignore_index=True)
        return cls(frame, _samples(counts), n_left_out, estimates, files)

    def by_pi(self) -> list[Results]:
        """One part for each π, in ascending order: numbers at different π are never averaged."""
        parts = {pi: self.runs[self.runs["pi"] == pi].reset_index(drop=True) for pi in self.shares}
        return [
            replace(self, runs=part, estimates={key: own for key, own in self.estimates.items() if key.pi == pi})
            for pi, part in parts.items()
        ]

    @property
    def shares(self) -> list[str]:
        """Values of π."""
        return list(self.runs["pi"].unique())

    @property
    def ood_sets(self) -> list[str]:
        """Test sets, in the order they were found."""
        return list(dict.fromkeys(self._names()))

    @property
    def wild_sets(self) -> list[str]:
        return list(self.runs["ood"].unique())

    @property
    def unknown_sets(self) -> list[str]:
        """Test sets without OOD data, because nobody knows what in the wild data is OOD."""
        is_unknown = self.runs["fpr95"].isna().groupby(self._names(), sort=False).all()
        return list(is_unknown.index[is_unknown])

    @property
    def shown_sets(self) -> list[str]:
        """Without unknown ones: they have an accuracy alone, which the others have too. All, if all are unknown."""
        return [name for name in self.ood_sets if name not in self.unknown_sets] or self.ood_sets

    @property
    def n_seeds(self) -> int:
        return int(self.runs["seed"].nunique())

    def _names(self) -> list[str]:
        """The test set of each run; with the wild one, where that is another and there are several."""
        pairs = zip(self.runs["ood"], self.runs["test_set"], strict=True)
        is_plain = len(self.wild_sets) == 1
        return [test if is_plain or test == wild else f"{test} (wild {wild})" for wild, test in pairs]

    def estimated(self) -> list[Estimated]:
        """Of each wild set; of one π."""
        found = []
        for ood in dict.fromkeys(key.ood for key in self.estimates):
            seeds = [own for key, own in self.estimates.items() if key.ood == ood]
            names = dict.fromkeys(name for own in seeds for name in own["methods"])
            methods = {
                name: {
                    metric: _over_seeds(own["methods"][name][metric] for own in seeds if name in own["methods"])
                    for metric in ESTIMATED
                }
                for name in names
            }
            chosen, reasons = ([str(own[key]) for own in seeds] for key in ("chosen", "reason"))
            shares = [own["pi"] for own in seeds if own["pi"]]
            found.append(Estimated(ood, _over_seeds(shares) if shares else None, methods, chosen, reasons))
        return found

    def sections(self) -> list[tuple[str, pd.DataFrame]]:
        """Of one π: every OOD set, every group, the average of all sets, each with its runs."""
        names = np.array(self._names())
        found = [(ood, self.runs[names == ood]) for ood in self.shown_sets]
        groups = [(group, self.runs[self.runs["test_set"].isin(sets)]) for group, sets in self.groups.items()]
        average = [(AVERAGE, self.runs)] if len(found) > 1 else []
        return [*found, *((group, runs) for group, runs in groups if len(runs)), *average]

    def rows(self) -> list[Row]:
        """Every section of every π. Means are within a seed first, then over seeds; best method first."""
        if len(self.shares) > 1:
            return [row for part in self.by_pi() for row in part.rows()]
        ranking = list(_by_seed(self.runs).groupby("method")["fpr95"].mean().sort_values(kind="stable").index)
        return [row for ood, runs in self.sections() for row in self._rows(ood, runs, ranking)]

    def _rows(self, ood: str, runs: pd.DataFrame, ranking: list[str]) -> list[Row]:
        labels = dict(zip(self.runs["method"], self.runs["label"], strict=True))
        short = frozenset(self.runs["method"][self.runs[SHORT]])
        grouped = _by_seed(runs).groupby("method")[list(METRICS)]
        mean, std, n_seeds = grouped.mean().astype(float), grouped.std().astype(float), grouped.size()
        shown = mean.map(lambda value: float(f"{value:.1f}"))  # what looks equal is equally good
        best = {metric: shown[metric].min() if metric in LOWER_IS_BETTER else shown[metric].max() for metric in METRICS}
        order = [method for method in ranking if method in mean.index]
        if self.sort:
            is_lower = self.sort in LOWER_IS_BETTER
            order = list(mean.loc[order, self.sort].sort_values(kind="stable", ascending=is_lower).index)
        means: dict[Any, Any] = mean.to_dict("index")
        stds: dict[Any, Any] = std.to_dict("index")
        pi = self.shares[0]
        return [
            Row(
                pi=pi,
                ood=ood,
                method=method,
                label=labels[method],
                n_seeds=int(n_seeds[method]),
                mean=means[method],
                std=stds[method],
                best=frozenset(metric for metric in METRICS if shown.at[method, metric] == best[metric]),
                has_short_schedule=method in short,
                intervals=_intervals(runs[runs["method"] == method], means[method]) if self.intervals else {},
            )
            for method in order
        ]


def _by_seed(runs: pd.DataFrame) -> pd.DataFrame:
    """The mean over sets of each method and seed."""
    return runs.groupby(["method", "seed"], sort=False)[list(METRICS)].mean().reset_index()


def mean_draws(runs: pd.DataFrame, metric: str) -> np.ndarray:
    """A metric of one method in each resample: mean over sets, then over seeds."""
    _, seed, n_sets = np.unique(runs["seed"], return_inverse=True, return_counts=True)
    mean: np.ndarray = np.stack(list(runs[DRAWS[metric]])).T @ (1 / n_sets[seed] / len(n_sets))
    return mean


def _intervals(runs: pd.DataFrame, mean: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """95% intervals over test samples.

    Resamples have ties, so their thresholds are off by half a rank: their mean is moved to the sample's. Where no
    sample is on the wrong side, resamples are all alike, but up to 3/n of new samples may be (the rule of three).
    """
    runs = runs[runs["fpr95"].notna()]
    if not len(runs):
        return dict.fromkeys(DRAWS, (math.nan, math.nan))
    least, found = runs[LEAST].mean(), {}
    for metric in DRAWS:
        draws = mean_draws(runs, metric)
        low, high = np.clip(np.quantile(draws - draws.mean() + mean[metric], ENDS), 0, 100)
        if metric == "fpr95" or draws.std() < 1e-4:
            low, high = min(low, 100 - least), max(high, least)
        found[metric] = float(low), float(high)
    return found


def _by_value(pi: str) -> float:
    return math.inf if pi == UNKNOWN else float(pi)


def _read_evaluation(path: Path, key: EvaluationKey) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The metrics of each method, and the counts of samples in it and in the filter.json files."""
    with reading_json(Found(path, key.made_by)) as content:
        counts = {name: int(content["samples"][name]) for name in ("id_test", "ood_test")}
        runs = [
            {
                **key._asdict(),
                "method": method,
                "label": str(values.get("label", method)),
                **{name: math.nan if values[name] is None else 100 * float(values[name]) for name in METRICS},
                SHORT: bool(values.get(SHORT, False)),
                PROTOCOL: str(values.get(PROTOCOL, "")),
            }
            for method, values in content.items()
            if method != "samples"
        ]
    if key.test_set == key.ood:
        labels = {run["method"]: run["label"] for run in runs}
        for variant, filtered in filter_metrics(path, key).items():
            is_held_out = filtered.get(PROTOCOL, "held out") == "held out"  # others calibrate on training data
            names = "n_id_train", "n_wild", *(["n_calibration"] if is_held_out else [])
            counts |= {name: filtered[name] for name in names}
            of = "" if variant == SAL else f" of {labels.get(variant, variant)}"
            counts[f"candidates{of}"] = filtered["n_candidates"]
    return runs, counts


def _read_estimates(path: Path, key: EvaluationKey) -> dict[str, Any] | None:
    """estimates.json beside metrics.json, unless no wild data are held out."""
    file = path.with_name("estimates.json")
    if key.test_set != key.ood or not file.exists():
        return None
    with reading_json(Found(file, key.made_by)) as content:
        if content["reason"] == NO_HOLDOUT:
            return None
        methods = {
            name: {metric: _percent(own[metric]) for metric in ESTIMATED} for name, own in content["methods"].items()
        }
        return {
            "pi": None if content["pi"]["value"] is None else _percent(content["pi"]),
            "methods": methods,
            **{key: content[key] for key in ("chosen", "reason")},
        }


def _percent(estimate: Mapping[str, float]) -> tuple[float, ...]:
    return tuple(100 * float(estimate[key]) for key in ESTIMATE)


def _over_seeds(estimates: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(map(float, np.mean(list(estimates), axis=0)))


def filter_metrics(path: Path, key: EvaluationKey) -> dict[str, dict[str, Any]]:
    """filter.json of every variant of SAL, beside the folder of evaluations."""
    found = {}
    for file in sorted(_run_folder(path).glob("*/filter.json")):
        variant = file.parent.name
        with reading_json(Found(file, key.experiment.with_variant(variant).filter_metrics.made_by)) as content:
            counts = {name: int(content[name]) for name in ("n_id_train", "n_calibration", "n_wild", "n_candidates")}
            found[variant] = {**content, **counts}
    return found


def _samples(counts: Mapping[EvaluationKey, dict[str, int]]) -> dict[str, str]:
    """How many samples each set has; a range where runs differ."""
    every = counts.values()
    samples = {name: _range([own[key] for own in every if key in own]) for key, name in SHARED_SAMPLES.items()}
    for test in dict.fromkeys(key.test_set for key in counts):
        own_counts = [own for key, own in counts.items() if key.test_set == test]
        samples[f"{test} test"] = _range([own["ood_test"] for own in own_counts if own["ood_test"]])
        for key in dict.fromkeys(key for own in own_counts for key in own if key.startswith("candidates")):
            samples[f"{test} {key}"] = _range([own[key] for own in own_counts if key in own])
    return {name: text for name, text in samples.items() if text}


def _range(values: Sequence[int]) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


# --- the results table


def results_view(results: Results, width: int = FULL_WIDTH, *, estimates: bool = False) -> RenderableType:
    """For the terminal. A narrow one gets the means alone, rather than numbers cut in two."""
    is_wider = any(row.has_short_schedule for row in results.rows())
    has_room = width >= FULL_WIDTH + (WIDER if is_wider else 0)
    return Group(*(grid.rich() for grid in results_grids(results, with_std=has_room, estimates=estimates)))


def results_grids(results: Results, *, with_std: bool = True, estimates: bool = False) -> list[Grid]:
    """One table for each π, then those of estimates; the notes stand under the last of each kind.

    Estimates are shown where nothing is measured; with `estimates`, also beside what is.
    """
    parts = results.by_pi()
    shown = [grid for part in parts if (grid := estimates_grid(part, len(parts) > 1, everything=estimates))]
    if estimates or (shown and results.unknown_sets == results.ood_sets):
        if not shown:
            raise MissingArtifactError(
                "there are no estimates: hold out wild data (data.wild_holdout: 0.2 in params.yaml) and run dvc repro"
            )
        return shown
    grids, columns = [], list(METRICS.values())
    if results.intervals:
        columns = [name for metric in DRAWS for name in (METRICS[metric], INTERVAL)]
    for part in parts:
        pi = f", π {part.shares[0]}" if len(parts) > 1 else ""
        sections = [
            [[Cell(row.ood), Cell(row.name), *row.cells(with_std=with_std)] for row in rows]
            for _, rows in groupby(part.rows(), key=lambda row: row.ood)
        ]
        notes = [results.verdicts[part.shares[0]]] if results.verdicts.get(part.shares[0]) else []
        notes += results_notes(results, with_std=with_std) if part is parts[-1] else []
        grids.append(Grid(f"OOD detection, in %{pi}", ["OOD test set", "method", *columns], sections, notes))
    return [*grids, *shown]


def estimates_grid(results: Results, has_several_pi: bool, *, everything: bool) -> Grid | None:
    """FPR95 and AUROC estimated on held-out wild data, of one π; beside them what was measured, where it was."""
    found = [one for one in results.estimated() if everything or one.ood in results.unknown_sets]
    if not found:
        return None
    own = results.runs[results.runs["ood"] == results.runs["test_set"]]
    has_measured = everything and bool(own["fpr95"].notna().any())
    sections = []
    for one in found:
        runs = own[own["ood"] == one.ood]
        labels = dict(zip(runs["method"], runs["label"], strict=True))
        mean = runs.groupby("method")[list(METRICS)].mean().astype(float).to_dict()
        by, sign = (results.sort, -1) if results.sort == "auroc" else ("fpr95", 1)
        order = sorted(labels, key=lambda name: sign * one.methods[name][by][0] if name in one.methods else math.inf)
        if not one.methods and not has_measured:  # nothing is told apart: only what becomes the detector
            order = [name for name in order if name in one.chosen] or order
        section = []
        for name in order:
            row = {"wild data": Cell(one.ood), "method": Cell(labels[name], is_bold={*one.chosen} == {name})}
            for metric in ESTIMATED:
                if has_measured:
                    measured = mean[metric][name]
                    row[METRICS[metric]] = Cell(UNKNOWN if math.isnan(measured) else f"{measured:.1f}")
                estimate = one.methods.get(name, {}).get(metric)
                row[f"est. {METRICS[metric]} (90%)"] = Cell(_estimate_text(estimate) if estimate else CANNOT_TELL)
            if not has_measured:
                row[METRICS["id_accuracy"]] = Cell(f"{mean['id_accuracy'][name]:.1f}")
            section.append(row)
        sections.append(section)
    pi = f", π {results.shares[0]}" if has_several_pi else ""
    title = f"OOD detection, {'measured and ' if has_measured else ''}estimated without labels, in %{pi}"
    cells = [[list(row.values()) for row in section] for section in sections]
    return Grid(title, list(sections[0][0]), cells, _estimate_notes(found, results.n_seeds))


def _estimate_text(estimate: tuple[float, ...]) -> str:
    value, low, high = estimate
    return f"{value:.0f} ({low:.0f}–{high:.0f})"


def _estimate_notes(found: Sequence[Estimated], n_seeds: int) -> list[str]:
    seeds = f"; value and interval: mean over {n_seeds} seeds" if n_seeds > 1 else ""
    notes = [
        f"est.: estimated from held-out wild data and π̂, not measured; (90%): interval{seeds}. docs/without-labels.md"
    ]
    for one in found:
        if one.share:
            notes.append(f"{one.ood}: π̂ = {_estimate_text(one.share)}%, the estimated share of OOD data in them.")
        notes += [f"{one.ood}: {reason}." for reason in dict.fromkeys(one.reasons)]
    return notes


def results_frame(results: Results, *, estimates: bool = False) -> pd.DataFrame:
    """For programs: one line for each π, OOD set and method. Estimates have columns of their own."""
    import pandas as pd

    lines = [
        {
            "pi": part.shares[0],
            "ood": one.ood,
            "method": method,
            "is_chosen": {*one.chosen} == {method},
            **{
                f"estimated_{metric}_{key}": number
                for metric, estimate in {**own, "pi": one.share or ()}.items()
                for key, number in zip(ESTIMATE, estimate, strict=bool(estimate))
            },
        }
        for part in results.by_pi()
        for one in part.estimated()
        if estimates or one.ood in results.unknown_sets
        for method, own in one.methods.items()
    ]
    frame = pd.DataFrame(
        {
            "pi": row.pi,
            "ood": row.ood,
            "method": row.method,
            "label": row.label,
            "n_seeds": row.n_seeds,
            "short_schedule": row.has_short_schedule,
            **{f"{metric}_mean": row.mean[metric] for metric in METRICS},
            **{f"{metric}_std": row.std[metric] for metric in METRICS},
            **{
                f"{metric}_{end}": value
                for metric, interval in row.intervals.items()
                for end, value in zip(("low", "high"), interval, strict=True)
            },
            "fpr95_convention": results.convention,
        }
        for row in results.rows()
    )
    if not lines:
        return frame
    keys, own = ["pi", "ood", "method"], pd.DataFrame(lines)
    is_alone = ~pd.MultiIndex.from_frame(own[keys]).isin(pd.MultiIndex.from_frame(frame[keys]))  # nothing is measured
    return pd.concat([frame.merge(own, on=keys, how="left"), own[is_alone]], ignore_index=True)


def _protocol_notes(results: Results) -> list[str]:
    """Whose threshold each variant of SAL has, where they differ."""
    if PROTOCOL not in results.runs:
        return []
    labels: dict[str, list[str]] = {}
    for protocol, label in dict.fromkeys(zip(results.runs[PROTOCOL], results.runs["label"], strict=True)):
        if protocol:
            labels.setdefault(protocol, []).append(label)
    named = "; ".join(f"{protocol}: {', '.join(own)}" for protocol, own in labels.items())
    return [f"Threshold: {named} (docs/paper.md)."] if len(labels) > 1 else []


def results_notes(results: Results, *, with_std: bool = True) -> list[str]:
    """What the columns and sections of the tables mean, and how many samples there are."""
    notes = [CONVENTIONS[results.convention]] if results.unknown_sets != results.ood_sets else []
    if results.unknown_sets:
        names = ", ".join(results.unknown_sets)
        notes.append(
            f"{names}: unlabeled wild data. Nobody knows what in them is OOD, so FPR95, AUROC and AUPR are unknown; "
            "they need OOD samples to test on (data.test_ood)."
        )
    means = [f"{AVERAGE}: over the OOD sets"] if len(results.shown_sets) > 1 else []
    tested = set(results.runs["test_set"])
    means += [
        f"{group}: over {', '.join(there)}"
        for group, sets in results.groups.items()
        if (there := [name for name in sets if name in tested])
    ]
    over_sets = f" ({'; '.join(means)})" if means else ""
    what = "Mean ± std" if with_std else f"Mean (± std from {FULL_WIDTH} columns on)"
    over_seeds = f"{what} over {results.n_seeds} seeds" if results.n_seeds > 1 else "One seed"
    order = f"each section sorted by {METRICS[results.sort][:-2]}" if results.sort else "sorted by average FPR95"
    notes.append(f"{over_seeds}{over_sets}; best in bold; {order}.")
    if results.intervals:
        notes.append(
            f"{INTERVAL}: over the test samples, by resampling; it does not say what another training would give."
        )
    if any(results.verdicts.values()):
        notes.append(BEATS)
    notes += _protocol_notes(results)
    if results.wild_sets != results.ood_sets and len(results.wild_sets) == 1:
        is_mixed = results.shares == [UNKNOWN]
        what = "Trained with wild data that nobody has labeled" if is_mixed else "OOD in the wild data"
        notes.append(f"{what}: {results.wild_sets[0]}.")
    if results.n_left_out:
        notes.append(
            f"Left out: {results.n_left_out} evaluations that params.yaml does not ask for (--all shows them)."
        )
    notes.append("Samples: " + ", ".join(f"{name} {text}" for name, text in results.samples.items()) + ".")
    return notes


# --- SAL over π


@dataclass(frozen=True)
class SweepPoint:
    """SAL at one π, with one seed. Shares, not percent; None where a metric is not defined or not measured."""

    ood: str
    pi: float
    seed: int
    n_wild: int
    n_candidates: int
    err_in: float | None  # not defined at π = 1: there is no wild ID data
    err_out: float | None
    contamination: float | None  # ID data among the candidates
    fpr95: float
    auroc: float
    zeta: float | None  # Definition 2, on held-out ID data; None until `salcli theory` has run
    zeta_pairwise: float | None  # as the authors' code prints it


SWEPT = {"err_in": "ERR_in", "err_out": "ERR_out", "fpr95": "FPR95 ↓", "auroc": "AUROC ↑"}


def sweep_points(folder: Path, only: Collection[EvaluationKey] | None = None, variant: str = SAL) -> list[SweepPoint]:
    """One point for each experiment below a runs folder that is tested on the OOD set of its own wild data."""
    points = []
    for key, path in _evaluations(folder).items():
        if key.test_set != key.ood or key.pi == UNKNOWN or (only is not None and key not in only):
            continue
        experiment = key.experiment.with_variant(variant)
        filtered = filter_metrics(path, key).get(variant)
        theory = _run_folder(path) / variant / "theory.json"
        with reading_json(Found(path, key.made_by)) as content:
            values = content.get(variant)
            if filtered is None or values is None or values["fpr95"] is None:
                continue
            zeta: dict[str, Any] = {}
            precision = filtered.get("precision")
            if theory.exists():
                with reading_json(Found(theory, experiment.theory("json").made_by)) as measured:
                    zeta = measured
            points.append(
                SweepPoint(
                    ood=key.ood,
                    pi=float(key.pi),
                    seed=key.seed,
                    n_wild=filtered["n_wild"],
                    n_candidates=filtered["n_candidates"],
                    err_in=filtered["err_in"],
                    err_out=filtered["err_out"],
                    contamination=None if precision is None else 1 - precision,
                    fpr95=float(values["fpr95"]),
                    auroc=float(values["auroc"]),
                    zeta=zeta.get("zeta"),
                    zeta_pairwise=zeta.get("zeta_pairwise"),
                )
            )
    if not points:
        raise MissingArtifactError(f"there is no evaluation of {variant} below {folder} yet; make one with: dvc repro")
    sets = list(dict.fromkeys(point.ood for point in points))
    return sorted(points, key=lambda point: (sets.index(point.ood), point.pi, point.seed))


def over_seeds(points: Sequence[SweepPoint], metric: str) -> tuple[float, float]:
    """Mean and std of a metric, NaN where it is not defined; a single seed has no std."""
    values = [value for point in points if (value := getattr(point, metric)) is not None]
    mean = float(np.mean(values)) if values else np.nan
    return mean, float(np.std(values, ddof=1)) if len(values) > 1 else np.nan


def sweep_grid(points: Sequence[SweepPoint]) -> Grid:
    """One row for each π, one section for each OOD set."""
    sections = []
    for ood, of_set in groupby(points, key=lambda point: point.ood):
        sections.append([_sweep_row(ood, pi, list(own)) for pi, own in groupby(of_set, key=lambda point: point.pi)])
    n_seeds = len({point.seed for point in points})
    notes = [
        FPR95_CONVENTION,
        *([f"Mean ± std over {n_seeds} seeds."] if n_seeds > 1 else []),
        "Wild: the largest set with a share π of OOD, so its size changes with π. Found: candidates.",
        "Contam.: contamination, ID data among the candidates.",
        *(["–: at π = 1 there is no wild ID data."] if any(point.err_in is None for point in points) else []),
        *(["ζ: measured by salcli theory."] if any(point.zeta is None for point in points) else []),
    ]
    header = ["wild OOD", "π", "wild", "found", *SWEPT.values(), "ζ", "contam."]
    return Grid("SAL by the share π of OOD in the wild data, in %", header, sections, notes, n_left=1)


def _sweep_row(ood: str, pi: float, points: list[SweepPoint]) -> list[Cell]:
    texts = [ood, f"{pi:g}"]
    texts += [_range([getattr(point, name) for point in points]) for name in ("n_wild", "n_candidates")]
    for metric in SWEPT:
        mean, std = (100 * value for value in over_seeds(points, metric))
        texts.append("–" if math.isnan(mean) else f"{mean:.1f}" if math.isnan(std) else f"{mean:.1f} ± {std:.1f}")
    zeta, _ = over_seeds(points, "zeta")
    contaminated, _ = over_seeds(points, "contamination")
    texts += [
        "–" if math.isnan(zeta) else f"{zeta:.2f}",
        "–" if math.isnan(contaminated) else f"{100 * contaminated:.1f}",
    ]
    return [Cell(text) for text in texts]
