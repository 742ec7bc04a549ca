"""All metrics.json files of a workspace as tables: mean ± std over seeds, one table for each share π of OOD data.

Everything that a table needs stands in those files, the labels of the methods too, so neither torch nor the methods
are loaded. What the stored scores add, intervals above all, is in intervals.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Group, RenderableType

from salcli.conformal.resampling import NO_HOLDOUT
from salcli.errors import MissingArtifactError, ParamsError, SalError
from salcli.params.reading import AVERAGE, check_groups, lookup
from salcli.report.console import Cell, Grid
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
SHORT, PROTOCOL, NOTES = "short_schedule", "protocol", "notes"
FILTER_ERRORS = ("err_in", "err_out")  # columns of runs, of variants of SAL
DRAWS = {"fpr95": "fpr95_draws", "auroc": "auroc_draws"}  # columns of runs with the metric in each resample
LEAST = "least_step"  # column of runs: percent that a difference must be, however small its interval
ENDS = (0.025, 0.975)  # of an interval
ID_POSITIVE, OOD_POSITIVE = "id-positive", "ood-positive"
CONVENTIONS = {ID_POSITIVE: FPR95_CONVENTION, OOD_POSITIVE: FPR95_OOD_POSITIVE}
SHORT_SCHEDULE = "\n(short schedule)"  # on a line of its own in the terminal
FULL_WIDTH, WIDER = 96, 2  # terminal columns that mean ± std needs, and "(short schedule)" beyond that
CANNOT_TELL, NOTHING = "cannot tell", "–"
INTERVAL = "95% interval"
WHOLE_NUMBER = re.compile(r"(?<![\w.,])(\d{1,3}(?:,\d{3})+|\d+)(?!\w|[.,]\d)")
BEATS = (
    "Beats: a lower FPR95 in every seed, by more than resamples of the test samples explain (95% interval of all "
    "differences at once)."
)
# below runs/: on the OOD set of the wild data, and on sets that are only tested on
EVALUATIONS = ("*/*/pi-*/evaluation/metrics.json", "*/*/pi-*/evaluation/unseen/*/metrics.json")
SHARED_SAMPLES = {"n_id_train": "ID train", "n_calibration": "ID calibration", "n_wild": "wild", "id_test": "ID test"}


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


def _by_key(paths: Iterable[Path]) -> dict[EvaluationKey, Path]:
    """An unseen set that is also in the wild data counts once."""
    found: dict[EvaluationKey, Path] = {}
    for path in paths:
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
    intervals: bool = False  # show FPR95 and AUROC alone, each with its interval; needs the draws of intervals.py
    verdicts: Mapping[str, str] = field(default_factory=dict)  # by π: what the table shows, in a sentence

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        only: Collection[EvaluationKey] | None = None,
        groups: Mapping[str, Sequence[str]] | None = None,
    ) -> Results:
        """Every evaluation below a runs folder, or `only` some of them."""
        found = _by_key(path for pattern in EVALUATIONS for path in sorted(folder.glob(pattern)))
        wanted = [path for key, path in found.items() if only is None or key in only]
        if not wanted:
            made_by = "salcli evaluate --scratch" if SCRATCH in folder.parts else "dvc repro, or salcli evaluate"
            raise MissingArtifactError(f"there is no evaluation below {folder} yet; make one with: {made_by}")
        return cls.read(wanted, len(found) - len(wanted), groups)

    @classmethod
    def read(
        cls, paths: Iterable[Path], n_left_out: int = 0, groups: Mapping[str, Sequence[str]] | None = None
    ) -> Results:
        """Some metrics.json files, for example those that `evaluate` has just written."""
        import pandas as pd

        runs: list[dict[str, Any]] = []
        counts: dict[EvaluationKey, dict[str, int]] = {}
        files = _by_key(paths)
        for key, path in files.items():
            own_runs, counts[key] = _read_evaluation(path, key)
            runs += own_runs
        estimates = {key: found for key, path in files.items() if (found := _read_estimates(path, key))}
        frame = pd.DataFrame(runs).sort_values(  # what is unknown comes last
            "pi", key=lambda column: pd.to_numeric(column, errors="coerce"), kind="stable", ignore_index=True
        )
        return cls(frame, _samples(counts), n_left_out, estimates, files, groups or {})

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
    def unknown_sets(self) -> list[str]:
        """Test sets without OOD data, because nobody knows what in the wild data is OOD."""
        is_unknown = self.runs["fpr95"].isna().groupby(self._names(), sort=False).all()
        return list(is_unknown.index[is_unknown])

    @property
    def is_measured(self) -> bool:
        """Whether any test set has OOD data."""
        return self.unknown_sets != self.ood_sets

    @property
    def shown_sets(self) -> list[str]:
        """Without unknown ones: they have an accuracy alone, which the others have too. All, if all are unknown."""
        return [name for name in self.ood_sets if name not in self.unknown_sets] or self.ood_sets

    @property
    def n_seeds(self) -> int:
        return int(self.runs["seed"].nunique())

    def _names(self) -> list[str]:
        """The test set of each run; with the wild one, where that is another and there are several."""
        pairs, is_plain = zip(self.runs["ood"], self.runs["test_set"], strict=True), self.runs["ood"].nunique() == 1
        return [test if is_plain or test == wild else f"{test} (wild {wild})" for wild, test in pairs]

    @property
    def notes(self) -> list[str]:
        """What the fits of methods had to say."""
        return [note for note, _ in _alike(note for own in self.runs.get(NOTES, ()) for note in own)]

    def without_notes(self) -> Results:
        return replace(self, runs=self.runs.drop(columns=NOTES))

    def sections(self) -> list[tuple[str, pd.DataFrame]]:
        """Of one π: every OOD set, every group, the average of all sets, each with its runs."""
        names = np.array(self._names())
        found = [(ood, self.runs[names == ood]) for ood in self.shown_sets]
        groups = [(group, self.runs[self.runs["test_set"].isin(sets)]) for group, sets in self.groups.items()]
        average = [(AVERAGE, self.runs)] if len(found) > 1 else []
        return [*found, *((group, runs) for group, runs in groups if len(runs)), *average]

    def rows(self) -> pd.DataFrame:
        """One line for each method in every section of every π, in percent; the best method first.

        METRIC_mean is over sets within a seed, then over seeds; METRIC_std over seeds, NaN for a single one. With
        `intervals` also METRIC_low and METRIC_high of FPR95 and AUROC.
        """
        import pandas as pd

        sections = []
        for part in self.by_pi():
            ranking = method_means(part.runs).sort_index()["fpr95"].sort_values(kind="stable").index
            sections += [part._rows(ood, runs, ranking) for ood, runs in part.sections()]
        return pd.concat(sections, ignore_index=True).assign(fpr95_convention=self.convention)

    def _rows(self, ood: str, runs: pd.DataFrame, ranking: pd.Index[str]) -> pd.DataFrame:
        import pandas as pd

        by_seed = runs.groupby(["method", "seed"])[list(METRICS)].mean().astype(float).groupby("method")
        order, mean = ranking[ranking.isin(runs["method"])], by_seed.mean()
        if self.sort:
            is_lower = self.sort in LOWER_IS_BETTER
            order = mean.loc[order, self.sort].sort_values(kind="stable", ascending=is_lower).index
        about: dict[str, Any] = {
            "pi": self.shares[0],
            "ood": ood,
            "method": order,
            "label": order.map(self.labels),
            "n_seeds": by_seed.size()[order],
            "short_schedule": order.isin(self.runs["method"][self.runs[SHORT]]),  # of any seed
        }
        parts = [pd.DataFrame(about, index=order), mean.add_suffix("_mean"), by_seed.std().add_suffix("_std")]
        if self.intervals:
            means: dict[Any, Any] = mean.to_dict("index")
            ends = {method: _intervals(runs[runs["method"] == method], means[method]) for method in order}
            parts.append(pd.DataFrame.from_dict(ends, orient="index"))
        return pd.concat([part.loc[order] for part in parts], axis=1)

    @property
    def labels(self) -> dict[str, str]:
        return dict(zip(self.runs["method"], self.runs["label"], strict=True))

    def estimated(self) -> pd.DataFrame:
        """What held-out wild data say without labels, of one π: mean over seeds, by wild set and method; in percent.

        Empty unless most seeds can tell: the others are those whose π̂ happens to be high.
        """
        import pandas as pd

        lines = []
        for ood in dict.fromkeys(key.ood for key in self.estimates):
            seeds = self.estimates_of(ood)
            telling = [own["methods"] for own in seeds if own["methods"]]
            if 2 * len(telling) <= len(seeds):
                continue
            shares = [own["pi"] for own in seeds if own["pi"]]
            for method in dict.fromkeys(name for own in telling for name in own):
                line = {"pi": self.shares[0], "ood": ood, "method": method}
                line["is_chosen"] = {own["chosen"] for own in seeds} == {method}
                for metric in ESTIMATED:
                    line |= _over_seeds(metric, [own[method][metric] for own in telling if method in own])
                lines.append(line | (_over_seeds("pi", shares) if shares else {}))
        return pd.DataFrame(lines, columns=None if lines else ["pi", "ood", "method", "is_chosen"])

    def estimates_of(self, ood: str) -> list[Mapping[str, Any]]:
        """Of one π, for each seed."""
        return [own for key, own in self.estimates.items() if key.ood == ood]


def _over_seeds(name: str, estimates: Sequence[tuple[float, ...]]) -> dict[str, float]:
    values = map(float, np.mean(estimates, axis=0))
    return {f"estimated_{name}_{end}": value for end, value in zip(ESTIMATE, values, strict=True)}


def method_means(runs: pd.DataFrame) -> pd.DataFrame:
    """Every metric of each method: over the sets of a seed first, then over seeds."""
    by_seed = runs.groupby(["method", "seed"], sort=False)[list(METRICS)].mean().astype(float)
    return by_seed.groupby("method", sort=False).mean()


def mean_draws(runs: pd.DataFrame, metric: str) -> np.ndarray:
    """A metric of one method in each resample: mean over sets, then over seeds."""
    _, seed, n_sets = np.unique(runs["seed"], return_inverse=True, return_counts=True)
    mean: np.ndarray = np.stack(list(runs[DRAWS[metric]])).T @ (1 / n_sets[seed] / len(n_sets))
    return mean


def _intervals(runs: pd.DataFrame, mean: Mapping[str, float]) -> dict[str, float]:
    """METRIC_low and METRIC_high: 95% intervals over test samples.

    Resamples have ties, so their thresholds are off by half a rank: their mean is moved to the sample's. Where no
    sample is on the wrong side, resamples are all alike, but up to 3/n of new samples may be (the rule of three).
    """
    runs = runs[runs["fpr95"].notna()]
    if not len(runs):
        return {f"{metric}_{end}": math.nan for metric in DRAWS for end in ("low", "high")}
    found: dict[str, float] = {}
    least = runs[LEAST].mean()
    for metric in DRAWS:
        draws = mean_draws(runs, metric)
        low, high = np.clip(np.quantile(draws - draws.mean() + mean[metric], ENDS), 0, 100)
        if metric == "fpr95" or draws.std() < 1e-4:
            low, high = min(low, 100 - least), max(high, least)
        found |= {f"{metric}_low": float(low), f"{metric}_high": float(high)}
    return found


# --- reading one evaluation


def _read_evaluation(path: Path, key: EvaluationKey) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The metrics of each method, and the counts of samples in it and in the filter.json files."""
    with reading_json(Found(path, key.made_by)) as content:
        counts = {name: int(content["samples"][name]) for name in ("id_test", "ood_test")}
        runs = {
            method: {
                **key._asdict(),
                "method": method,
                "label": str(values.get("label", method)),
                **{name: math.nan if values[name] is None else 100 * float(values[name]) for name in METRICS},
                **dict.fromkeys(FILTER_ERRORS, math.nan),
                SHORT: bool(values.get(SHORT, False)),
                PROTOCOL: str(values.get(PROTOCOL, "")),
                NOTES: [str(note) for note in values.get(NOTES, ())],
            }
            for method, values in content.items()
            if method != "samples"
        }
    for variant, filtered in filter_metrics(path, key).items() if key.test_set == key.ood else ():
        is_held_out = filtered.get(PROTOCOL, "held out") == "held out"  # others calibrate on training data
        counts |= {name: filtered[name] for name in ("n_id_train", "n_wild", *["n_calibration"] * is_held_out)}
        run = runs.get(variant, {NOTES: []})
        of = "" if variant == SAL else f" of {run.get('label', variant)}"
        counts[f"candidates{of}"] = filtered["n_candidates"]
        run[NOTES] += filtered[NOTES]
        run |= {name: 100 * filtered[name] for name in FILTER_ERRORS if filtered.get(name) is not None}
    return list(runs.values()), counts


def _read_estimates(path: Path, key: EvaluationKey) -> dict[str, Any] | None:
    """estimates.json beside metrics.json, in percent, unless no wild data are held out."""
    file = path.with_name("estimates.json")
    if key.test_set != key.ood or not file.exists():
        return None

    def percent(estimate: Mapping[str, float]) -> tuple[float, ...]:
        return tuple(100 * float(estimate[end]) for end in ESTIMATE)

    with reading_json(Found(file, key.made_by)) as content:
        if content["reason"] == NO_HOLDOUT:
            return None
        return {
            "pi": None if content["pi"]["value"] is None else percent(content["pi"]),
            "methods": {
                name: {metric: percent(own[metric]) for metric in ESTIMATED} for name, own in content["methods"].items()
            },
            **{name: str(content[name]) for name in ("chosen", "reason")},
        }


def filter_metrics(path: Path, key: EvaluationKey) -> dict[str, dict[str, Any]]:
    """filter.json of every variant of SAL, beside the folder of evaluations."""
    found = {}
    for file in sorted(_run_folder(path).glob("*/filter.json")):
        variant = file.parent.name
        with reading_json(Found(file, key.experiment.with_variant(variant).filter_metrics.made_by)) as content:
            counts = {name: int(content[name]) for name in ("n_id_train", "n_calibration", "n_wild", "n_candidates")}
            notes = [str(note) for note in content.get(NOTES, ())]
            found[variant] = {**content, **counts, NOTES: notes}
    return found


def _samples(counts: Mapping[EvaluationKey, dict[str, int]]) -> dict[str, str]:
    """How many samples each set has; a range where runs differ."""
    names: dict[str, list[int]] = {name: [] for name in SHARED_SAMPLES.values()}
    for test in dict.fromkeys(key.test_set for key in counts):
        names[f"{test} test"] = []
        for own in (own for key, own in counts.items() if key.test_set == test):
            for key, count in own.items():
                if key == "ood_test" and not count:
                    continue
                name = f"{test} test" if key == "ood_test" else SHARED_SAMPLES.get(key, f"{test} {key}")
                names.setdefault(name, []).append(count)
    return {name: _range(found) for name, found in names.items() if found}


def _alike(notes: Iterable[str]) -> list[tuple[str, int]]:
    """Each once, and how many there are; those that differ in numbers alone are one, with ranges."""
    alike: dict[tuple[str, ...], list[list[str]]] = {}  # text between the numbers → all parts
    for note in notes:
        parts = WHOLE_NUMBER.split(note)
        alike.setdefault(tuple(parts[::2]), []).append(parts)
    return [
        (
            "".join(
                own[0] if len({*own}) == 1 else _range([int(number.replace(",", "")) for number in own])
                for own in zip(*found, strict=True)
            ),
            len(found),
        )
        for found in alike.values()
    ]


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


# --- the results table


def results_view(results: Results, width: int = FULL_WIDTH, *, estimates: bool = False) -> RenderableType:
    """For the terminal. A narrow one gets the means alone, rather than numbers cut in two."""
    has_room = width >= FULL_WIDTH + (WIDER if results.runs[SHORT].any() else 0)
    return Group(*(grid.rich() for grid in results_grids(results, with_std=has_room, estimates=estimates)))


def results_grids(results: Results, *, with_std: bool = True, estimates: bool = False) -> list[Grid]:
    """One table for each π, then those of estimates; the notes stand under the last of each kind.

    Estimates are shown where nothing is measured; with `estimates`, also beside what is.
    """
    parts = results.by_pi()
    shown = [grid for part in parts if (grid := estimates_grid(part, len(parts) > 1, everything=estimates))]
    if estimates or (shown and not results.is_measured):
        if not shown:
            raise MissingArtifactError(
                "there are no estimates: hold out wild data (data.wild_holdout: 0.2 in params.yaml) and run dvc repro"
            )
        shown[-1].notes.extend(results.notes)
        return shown
    grids, columns = [], list(METRICS.values())
    if results.intervals:
        columns = [name for metric in DRAWS for name in (METRICS[metric], INTERVAL)]
    for part in parts:
        pi = f", π {part.shares[0]}" if len(parts) > 1 else ""
        sections = [
            [[Cell(str(ood)), *cells] for cells in section_cells(rows, with_std=with_std)]
            for ood, rows in part.rows().groupby("ood", sort=False)
        ]
        notes = [results.verdicts[part.shares[0]]] if results.verdicts.get(part.shares[0]) else []
        notes += results_notes(results, with_std=with_std) if part is parts[-1] else []
        grids.append(Grid(f"OOD detection, in %{pi}", ["OOD test set", "method", *columns], sections, notes))
    return [*grids, *shown]


def section_cells(rows: pd.DataFrame, *, with_std: bool = True) -> list[list[Cell]]:
    """The method and its numbers, of one section; bold where no other number looks better."""
    names = rows["label"] + rows["short_schedule"].map({True: SHORT_SCHEDULE, False: ""})
    columns, has_intervals = [[Cell(name) for name in names]], "fpr95_low" in rows
    for metric in DRAWS if has_intervals else METRICS:
        means, stds = rows[f"{metric}_mean"], rows[f"{metric}_std"]
        shown = means.map(lambda value: float(f"{value:.1f}"))
        is_best = shown == (shown.min() if metric in LOWER_IS_BETTER else shown.max())
        columns.append([])
        for mean, std, bold in zip(means, stds, is_best, strict=True):
            spread = "" if math.isnan(std) or not with_std else f" ± {std:.1f}"  # a single seed has none
            columns[-1].append(Cell(UNKNOWN if math.isnan(mean) else f"{mean:.1f}{spread}", is_bold=bold))
        if has_intervals:
            ends = zip(rows[f"{metric}_low"], rows[f"{metric}_high"], strict=True)
            columns.append([Cell(UNKNOWN if math.isnan(low) else f"{low:.1f}–{high:.1f}") for low, high in ends])
    return [list(cells) for cells in zip(*columns, strict=True)]


def results_frame(results: Results, *, estimates: bool = False) -> pd.DataFrame:
    """For programs: one line for each π, OOD set and method. Estimates have columns of their own."""
    import pandas as pd

    keys, frame = ["pi", "ood", "method"], results.rows()
    own = pd.concat([part.estimated() for part in results.by_pi()], ignore_index=True)
    own = own[own["ood"].isin([*own["ood"]] if estimates else results.unknown_sets)]
    if not len(own):
        return frame
    is_alone = ~pd.MultiIndex.from_frame(own[keys]).isin(pd.MultiIndex.from_frame(frame[keys]))  # nothing is measured
    return pd.concat([frame.merge(own, on=keys, how="left"), own[is_alone]], ignore_index=True)


def results_notes(results: Results, *, with_std: bool = True) -> list[str]:
    """What the columns and sections of the tables mean, and how many samples there are."""
    notes, wild_sets = [CONVENTIONS[results.convention]] if results.is_measured else [], results.runs["ood"].unique()
    if results.unknown_sets:
        need = "unknown; they need OOD samples to test on (data.test_ood)"
        known = "of the OOD test sets" if results.is_measured else need
        notes.append(
            f"{', '.join(results.unknown_sets)}: unlabeled wild data. Nobody knows what in them is OOD, so FPR95, "
            f"AUROC and AUPR are {known}."
        )
    means, tested = {AVERAGE: "the OOD sets"} if len(results.shown_sets) > 1 else {}, {*results.runs["test_set"]}
    means |= {
        group: ", ".join(name for name in sets if name in tested)
        for group, sets in results.groups.items()
        if tested & {*sets}
    }
    over_sets = f" ({'; '.join(f'{name}: over {sets}' for name, sets in means.items())})" if means else ""
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
    protocols = results.runs[results.runs[PROTOCOL] != ""].groupby(PROTOCOL, sort=False)["label"].unique()
    if len(protocols) > 1:  # of variants of SAL
        named = "; ".join(f"{protocol}: {', '.join(labels)}" for protocol, labels in protocols.items())
        notes.append(f"Threshold: {named} (docs/paper.md).")
    notes += results.notes
    if len(wild_sets) == 1 and [*wild_sets] != results.ood_sets:
        is_mixed = results.shares == [UNKNOWN]
        what = "Trained with wild data that nobody has labeled" if is_mixed else "OOD in the wild data"
        notes.append(f"{what}: {wild_sets[0]}.")
    if results.n_left_out:
        notes.append(
            f"Left out: {results.n_left_out} evaluations that params.yaml does not ask for (--all shows them)."
        )
    notes.append("Samples: " + ", ".join(f"{name} {text}" for name, text in results.samples.items()) + ".")
    return notes


# --- estimates without labels


def estimates_grid(results: Results, has_several_pi: bool, *, everything: bool) -> Grid | None:
    """FPR95 and AUROC estimated on held-out wild data, of one π; beside them what was measured, where it was."""
    shown = dict.fromkeys(key.ood for key in results.estimates if everything or key.ood in results.unknown_sets)
    own = results.runs[results.runs["ood"] == results.runs["test_set"]]
    has_measured, table = everything and bool(own["fpr95"].notna().any()), results.estimated()
    sections, columns = [], [f"est. {METRICS[metric]} (90%)" for metric in ESTIMATED]
    columns = [name for metric, name in zip(ESTIMATED, columns, strict=True) for name in (METRICS[metric], name)]
    columns = columns if has_measured else [*columns[1::2], METRICS["id_accuracy"]]
    for ood in shown:
        measured = method_means(own[own["ood"] == ood]).to_dict("index")
        estimates: dict[Any, Any] = table[table["ood"] == ood].set_index("method").to_dict("index")
        by, sign = (results.sort, -1) if results.sort == "auroc" else ("fpr95", 1)
        order = sorted(
            measured,
            key=lambda name: sign * estimates[name][f"estimated_{by}_value"] if name in estimates else math.inf,
        )
        chosen = {one["chosen"] for one in results.estimates_of(ood)}
        if not estimates and not has_measured:  # nothing is told apart: only what becomes the detector
            order = [name for name in order if name in chosen] or order
        section = []
        for name in order:
            row = [Cell(ood), Cell(results.labels[str(name)], is_bold=chosen == {name})]
            for metric in ESTIMATED:
                value, told = measured[name][metric], estimates.get(name)
                row += [Cell(UNKNOWN if math.isnan(value) else f"{value:.1f}")] * has_measured
                row.append(Cell(_estimate_text(told, metric) if told else CANNOT_TELL))
            row += [] if has_measured else [Cell(f"{measured[name]['id_accuracy']:.1f}")]
            section.append(row)
        sections.append(section)
    if not sections:
        return None
    pi = f", π {results.shares[0]}" if has_several_pi else ""
    title = f"OOD detection, {'measured and ' if has_measured else ''}estimated without labels, in %{pi}"
    return Grid(title, ["wild data", "method", *columns], sections, _estimate_notes(results, shown))


def _estimate_text(estimates: Mapping[str, float], name: str) -> str:
    value, low, high = (estimates[f"estimated_{name}_{end}"] for end in ESTIMATE)
    return f"{value:.0f} ({low:.0f}–{high:.0f})"


def _estimate_notes(results: Results, sets: Iterable[str]) -> list[str]:
    n_seeds, notes, tell = results.n_seeds, [], []
    for ood in sets:
        seeds = results.estimates_of(ood)
        tell += [n] if 2 * (n := sum(bool(one["methods"]) for one in seeds)) > len(seeds) else []
        if shares := [one["pi"] for one in seeds if one["pi"]]:
            share = _estimate_text(_over_seeds("pi", shares), "pi")
            notes.append(f"{ood}: π̂ = {share}%, the estimated share of OOD data in them.")
        reasons = _alike(one["reason"] for one in seeds)
        for reason, count in reasons:
            which = f", {count} of {n_seeds} seeds" if len(reasons) > 1 else ""
            notes.append(f"{ood}{which}: {reason}.")
    over = f"the {_range(tell)} of {n_seeds} seeds that can tell" if {*tell} - {n_seeds} else f"{n_seeds} seeds"
    seeds_text = f"; value and interval: mean over {over}" if n_seeds > 1 else ""
    what = "est.: estimated from held-out wild data and π̂, not measured; (90%): interval"
    return [f"{what}{seeds_text}. docs/without-labels.md", *notes]
