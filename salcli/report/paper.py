"""The paper's numbers (paper.csv), which of its tables fit a params.yaml, and ours beside them."""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import groupby
from statistics import mean
from typing import TYPE_CHECKING, Any

from salcli.errors import MissingArtifactError, PaperError
from salcli.params.presets import additions, presets, resolved
from salcli.params.reading import AVERAGE
from salcli.report.console import Cell, Grid
from salcli.report.results import (
    LOWER_IS_BETTER,
    METRICS,
    SHORT,
    SHORT_SCHEDULE,
    EvaluationKey,
    Results,
    pi_text,
    sweep_points,
)
from salcli.sal.metrics import FPR95_CONVENTION
from salcli.store.layout import UNKNOWN

if TYPE_CHECKING:  # slow to load
    from pathlib import Path

    import pandas as pd

    from salcli.params.schema import Params

PAPER = "Du et al., ICLR 2024"
OF_ALL_SETS = "-"  # instead of an OOD set: a number of no single set, like ID accuracy
THEORY, MAIN, MIXING_RATIO = "theory", "main-cifar100", "mixing-ratio"
WITH_ERRORS = (THEORY, "predicted-labels")  # tables of the filter's errors
ALL_ID = ", all ID"  # a row whose network was trained on all ID data but the test's
ALSO = {"energy-vos": "energy-oe"}  # "Energy (w/ OE)" is this loss in WOODS' published sweeps
COLUMNS = {metric: METRICS[metric] for metric in ("fpr95", "auroc", "id_accuracy")}
ERRORS = {"err_out": "ERR_out ↓", "err_in": "ERR_in ↓", "fpr95": METRICS["fpr95"]}
NOTHING = "–"
CALIBRATIONS = {"train": "the paper's text", "holdout": "our default", "id-svd": "the authors' code"}
PROTOCOLS = {
    "held out": "held out: T on held-out ID data, with predicted labels (ours)",
    "paper's text": "paper's text: T on ID training data, with true labels on the wild v; the text fixes neither",
    "released code": "released code: the filter, T and fine-tuning of the authors' main.py",
}
AT_ONE = "At π = 1 the authors' code has one ID image to 120 OOD images; ours has none, so there is no ERR_in."
STRICTER = (
    "Our splits are stricter: the classifier has not seen the wild half of the ID data, no image is both wild and test."
)
SEEN_ALL = "all ID: the network has seen the wild ID half, too, as those of the paper's ID-only baselines have."


# --- what the paper reports


@dataclass(frozen=True)
class Setting:
    """A table, or one π of it. `pi` is None where the paper does not say."""

    table: str
    id: str
    backbone: str
    pi: float | None


@dataclass(frozen=True)
class PaperNumber:
    """One number of a table; `test` is the OOD set that is tested on. In percent where it is a share of samples."""

    setting: Setting
    method: str
    test: str
    metric: str
    value: float

    @property
    def wild(self) -> str:
        """The OOD set in the wild data: the tested one, except where the paper tests on unseen sets."""
        data = _preset_params(self.setting.table)["data"]
        if self.test not in data["test_ood"]:
            return self.test
        (other,) = {*data["ood"]} - {self.test}
        return str(other)


@cache
def _preset_params(table: str) -> dict[str, Any]:
    return resolved(presets()[table])


@cache
def paper_numbers() -> tuple[PaperNumber, ...]:
    """All of them, in the paper's order."""
    text = (files("salcli.report") / "paper.csv").read_text(encoding="utf-8")
    return tuple(
        PaperNumber(
            setting=Setting(line["table"], line["id"], line["backbone"], float(line["pi"]) if line["pi"] else None),
            method=line["method"],
            test=line["ood"],
            metric=line["metric"],
            value=float(line["value"]),
        )
        for line in csv.DictReader(text.splitlines())
    )


@cache
def settings() -> dict[Setting, tuple[PaperNumber, ...]]:
    """The numbers of each setting, in the paper's order."""
    grouped: dict[Setting, list[PaperNumber]] = {}
    for number in paper_numbers():
        grouped.setdefault(number.setting, []).append(number)
    return {setting: tuple(own) for setting, own in grouped.items()}


# --- which of its tables fit


def matching_settings(params: Params) -> list[Setting]:
    """The tables to compare with, the nearest first. One that adds nothing to those before it is left out.

    None where the params are those of Table 6, which `errors_beside_the_paper` compares as a whole.
    """
    if {*_with_errors(params)} >= {one for one in settings() if one.table == THEORY}:
        return []
    fitting = [setting for setting in settings() if _fits(setting, params)]
    asked, rows = _experiments(params), [{*paper_names(name, params)} for name in params.evaluate.methods]

    def distance(setting: Setting) -> tuple[int, bool]:
        """How many of our rows the table lacks, and whether it has other OOD sets."""
        own = _comparable(setting)
        methods = {one.method for one in own}
        return sum(not names & methods for names in rows), {(one.wild, one.test) for one in own} != asked

    chosen: list[Setting] = []
    covered: set[tuple[str, ...]] = set()
    for setting in sorted(fitting, key=distance):  # stable: otherwise in the paper's order
        own = {
            (name, one.wild, one.test, one.metric, _pi_of_ours(setting, params))
            for one in _comparable(setting)
            for name in our_methods(one.method, params)
            if (one.wild, one.test) in asked
        }
        if own - covered:
            chosen.append(setting)
            covered |= own
    if not chosen and not _with_errors(params):
        raise PaperError(_nothing_found(params))
    return chosen


def _with_errors(params: Params) -> list[Setting]:
    """Settings with errors of the filter on an OOD set of ours, one for each π; Table 6 where there are two."""
    fitting = [
        setting
        for setting, (first, *_) in settings().items()
        if setting.table in WITH_ERRORS and _fits(setting, params) and first.test in params.data.ood
    ]
    by_pi = {setting.pi or 0.0: setting for setting in reversed(fitting)}
    return [by_pi[pi] for pi in sorted(by_pi)]


def our_methods(paper_method: str, params: Params) -> list[str]:
    """The methods and variants of ours that the paper calls so; several where variants differ only in protocol."""
    return [name for name in params.evaluate.methods if paper_method in paper_names(name, params)]


def paper_names(method: str, params: Params) -> list[str]:
    """What the paper calls a method, or a variant of SAL, with these params."""
    if method in params.variants:
        own = params.for_variant(method)
        variants = {
            own.filter.score: own.filter.score != "sal",
            "fitted head": own.train_ood.head == "fitted",
            "candidate-id": own.train_ood.candidate_id,
        }
        differences = [*(name for name, differs in variants.items() if differs), *_variants_of_tau(own)]
        return [f"SAL ({', '.join(differences)})"] if differences else ["SAL", "SAL (c=1)"]
    method = ALSO.get(method, method).partition("@")[0]  # knn@all-id: KNN of another network
    if method == "sal-posthoc":  # τ itself: what is done with it afterwards makes no difference
        return [f"SAL ({', '.join(['post-hoc', *_variants_of_tau(params)])})"]
    return [_by_our_spelling().get(method, method)]


@cache
def _by_our_spelling() -> dict[str, str]:
    """Energy-OE is energy-oe, KNN+ is knn-plus."""
    return {one.method.lower().replace("+", "-plus"): one.method for one in paper_numbers()}


def _variants_of_tau(params: Params) -> list[str]:
    chosen = params.filter
    variants = {
        "class-agnostic": chosen.svd == "class-agnostic",
        "random-labels": chosen.labels == "random-wild",
        "random labels of ID data, too": chosen.labels == "random",
        f"temperature {chosen.temperature}": chosen.temperature != 1,
        "global reference": chosen.reference == "global",
        f"c={chosen.n_vectors}": chosen.n_vectors > 1,
    }
    return [name for name, differs in variants.items() if differs]


def _fits(setting: Setting, params: Params) -> bool:
    known = [float(pi) for pi in params.data.pi if pi != UNKNOWN]
    same_pi = setting.pi is None or any(math.isclose(setting.pi, pi) for pi in known)
    return (setting.id, setting.backbone) == (params.data.id, params.model.backbone) and same_pi


def _pi_of_ours(setting: Setting, params: Params) -> str:
    """The π of our runs that a setting is compared with."""
    return pi_text(params.data.pi[0] if setting.pi is None else setting.pi)


def _comparable(setting: Setting) -> list[PaperNumber]:
    """Numbers of single OOD sets in metrics that we have too. Tables of the filter's errors are compared as a whole."""
    if setting.table in WITH_ERRORS:
        return []
    return [one for one in settings()[setting] if one.metric in COLUMNS and one.test not in (OF_ALL_SETS, AVERAGE)]


def _experiments(params: Params) -> set[tuple[str, str]]:
    """Pairs of a wild and a tested OOD set."""
    data = params.data
    return {(wild, test) for wild in data.ood for test in (wild, *data.test_ood)}


def _nothing_found(params: Params) -> str:
    data = params.data
    names = ", ".join(dict.fromkeys(paper_names(method, params)[0] for method in params.evaluate.methods))
    shares = ", ".join(pi_text(pi) for pi in data.pi)
    lines = [
        "the paper reports no FPR95 or AUROC for these params",
        f"looked for: {data.id}, {params.model.backbone}, π {shares}, OOD {', '.join(data.ood)}; {names}",
    ]
    only_errors = [setting.table for setting in settings() if _fits(setting, params) and not _comparable(setting)]
    if only_errors:
        lines.append(
            f"of {', '.join(only_errors)} it reports the filter's errors alone; yours: "
            "dvc metrics show runs/*/*/*/sal/filter.json"
        )
    near = [name for name, one in presets().items() if one.paper and _preset_params(name)["data"]["id"] == data.id]
    lines.append(f"presets that fit {data.id}: {', '.join(near)}" if near else "presets that fit: salcli presets")
    return "\n  ".join(lines)


# --- ours beside the paper's


@dataclass(frozen=True)
class Pair:
    """One metric in percent, ours and the paper's; NaN where there is none."""

    ours: float = math.nan
    ours_std: float = math.nan
    paper: float = math.nan

    @property
    def difference(self) -> float:
        return self.ours - self.paper


@dataclass(frozen=True)
class ComparedRow:
    """One method of the paper on one OOD set. n_seeds: of ours, 0 where we have not run it."""

    pi: float | None
    test: str
    method: str
    n_seeds: int
    has_short_schedule: bool  # ours was trained for fewer epochs than its authors train
    pairs: dict[str, Pair]  # by our metrics' names; without ID accuracy, where that is of no single set


@dataclass(frozen=True)
class Comparison:
    """One table of the paper: one π, or the filter's errors at all of them."""

    table: str
    title: str
    columns: dict[str, str]
    rows: list[ComparedRow]
    notes: list[str]


def beside_the_paper(results: Results, params: Params) -> list[Comparison]:
    """Our results beside each table of the paper that fits params."""
    chosen = matching_settings(params)
    compared = [_compare(results, setting, params) for setting in chosen]
    with_ours = [one for one in compared if any(row.n_seeds for row in one.rows)]
    if compared and not with_ours:
        missing = dict.fromkeys(one.test for setting in chosen for one in _comparable(setting))
        raise MissingArtifactError(
            f"none of the paper's OOD sets is evaluated yet ({', '.join(missing)}); do it with: dvc repro"
        )
    return with_ours


def _compare(results: Results, setting: Setting, params: Params) -> Comparison:
    runs = results.runs[results.runs["pi"] == _pi_of_ours(setting, params)]
    labels = dict(zip(runs["method"], runs["label"], strict=True))
    numbers = [one for one in settings()[setting] if one.metric in COLUMNS]
    sets = list(dict.fromkeys((one.wild, one.test) for one in _comparable(setting)))
    groups = {test: own for wild, test in sets if not (own := _of_pair(runs, wild, test)).empty}
    not_evaluated = [test for _, test in sets if test not in groups]
    if len(groups) > 1 and any(one.test in (OF_ALL_SETS, AVERAGE) for one in numbers):
        groups[AVERAGE] = _averages(runs, groups, is_complete=not not_evaluated)
    methods = {method: our_methods(method, params) for method in dict.fromkeys(one.method for one in numbers)}
    rows = [
        _row(
            setting.pi,
            test,
            name,
            own_runs[own_runs["method"] == ours],
            [one for one in numbers if one.method == method],
            is_sum=test == AVERAGE or len(groups) == 1,
        )
        for test, own_runs in groups.items()
        for method, all_ours in methods.items()
        for ours, name in _named(method, all_ours, labels, params)
    ]
    known = {name for all_ours in methods.values() for name in all_ours}
    only_ours = [
        labels.get(name, paper_names(name, params)[0]) for name in params.evaluate.methods if name not in known
    ]
    pi = f", π {setting.pi:g}" if setting.pi is not None else ""
    return Comparison(
        table=setting.table,
        title=f"{setting.id}, {setting.backbone}{pi} ({setting.table})",
        columns=COLUMNS,
        rows=rows,
        notes=_notes(setting.table, rows, params, int(runs["seed"].nunique()), not_evaluated, only_ours),
    )


def _of_pair(runs: pd.DataFrame, wild: str, test: str) -> pd.DataFrame:
    return runs[(runs["ood"] == wild) & (runs["test_set"] == test)]


def _averages(runs: pd.DataFrame, groups: Mapping[str, pd.DataFrame], *, is_complete: bool) -> pd.DataFrame:
    """One line for each method and seed that was run on every set, so that only like is compared with like.

    Without all of the paper's sets there is no average over OOD sets that it reports; ID accuracy still is.
    """
    import pandas as pd

    grouped = pd.concat([*groups.values()]).groupby(["method", "seed"], sort=False)[list(COLUMNS)]
    averages = grouped.mean()[grouped.size() == len(groups)].reset_index()
    averages[SHORT] = averages["method"].isin(runs["method"][runs[SHORT]])
    if not is_complete:
        averages[["fpr95", "auroc"]] = math.nan
    return averages


def _row(
    pi: float | None, test: str, name: str, ours: pd.DataFrame, numbers: list[PaperNumber], *, is_sum: bool
) -> ComparedRow:
    """Our runs of one method on the set, and the paper's numbers. What is of no single set goes to the sum."""
    tests = {test, OF_ALL_SETS} if is_sum else {test}
    paper = {one.metric: one.value for one in numbers if one.test in tests}
    pairs = {
        metric: Pair(
            ours=float(ours[metric].mean()),
            ours_std=float(ours[metric].std()) if len(ours) > 1 else math.nan,
            paper=paper.get(metric, math.nan),
        )
        for metric in COLUMNS
        if is_sum or metric != "id_accuracy" or metric in paper  # mostly one for all sets, which stands in the sum
    }
    return ComparedRow(pi, test, name, len(ours), bool(ours[SHORT].any()), pairs)


def errors_beside_the_paper(folder: Path, only: Collection[EvaluationKey], params: Params) -> list[Comparison]:
    """Errors of the filter and FPR95 by π, of every variant that the paper calls SAL (Table 6); none without runs."""
    rows, variants, chosen = [], _named("SAL", our_methods("SAL", params), {}, params), _with_errors(params)
    points = {variant: sweep_points(folder, only, variant) for variant, _ in variants if variant}
    for setting in chosen:
        paper, test = {one.metric: one.value for one in settings()[setting]}, settings()[setting][0].test
        for variant, name in variants:
            own = [one for one in points.get(variant, ()) if (one.ood, one.pi) == (test, setting.pi)]
            pairs = {}
            for metric in ERRORS:
                values = [100 * value for one in own if (value := getattr(one, metric)) is not None]
                pairs[metric] = Pair(mean(values) if values else math.nan, paper=paper.get(metric, math.nan))
            rows.append(ComparedRow(setting.pi, test, name, len(own), False, pairs))
    if not any(row.n_seeds for row in rows):
        return []
    first = chosen[0]
    return [
        Comparison(
            table=first.table,
            title=f"errors of the filter, {first.id}, {first.backbone}, {rows[0].test} ({first.table})",
            columns=ERRORS,
            rows=rows,
            notes=[
                _source(first.table),
                *_protocols(rows, params),
                *([AT_ONE] if any(row.pi == 1 for row in rows) else []),
                STRICTER,
            ],
        )
    ]


def _named(method: str, ours: list[str], labels: dict[str, str], params: Params) -> list[tuple[str, str]]:
    """Our methods with the name of their row: the paper's, and whose protocol a variant of SAL follows."""
    names = {name: _row_name(method, name, labels, params) for name in ours}
    repeated = [row for row in names.values() if [*names.values()].count(row) > 1]
    names = {name: f"{row}, {labels.get(name, name)}" if row in repeated else row for name, row in names.items()}
    return [*names.items()] or [("", method)]


def _row_name(method: str, ours: str, labels: dict[str, str], params: Params) -> str:
    from salcli.methods.sal import protocol  # the params have loaded it

    if ours in params.variants:
        return f"{method}: {protocol(params.for_variant(ours).filter)}"
    if "@" in ours or getattr(params.methods.of(ours), "images", "train") == "all":
        return f"{method}{ALL_ID}"
    return f"{method}: {labels.get(ours, ours)}" if ours in ALSO else method


# --- what stands below a table


def _notes(
    table: str,
    rows: Sequence[ComparedRow],
    params: Params,
    n_seeds: int,
    not_evaluated: Sequence[str],
    only_ours: Sequence[str],
) -> list[str]:
    preset, unknown = _preset_params(table), presets()[table].not_stated
    n_runs = len(preset["seeds"])  # one where the paper does not say
    epochs = {"train_id": params.train_id.epochs, "train_ood": params.train_ood.epochs}
    shorter = [
        f"{section}.epochs {own} instead of {preset[section]['epochs']}"
        for section, own in epochs.items()
        if own < preset[section]["epochs"]
    ]
    notes = {
        _source(table): True,
        f"Ours: {f'mean of {n_seeds} seeds' if n_seeds > 1 else 'one seed'}. "
        f"The paper's: {f'mean of {n_runs} runs' if n_runs > 1 else 'it does not say of how many runs'}.": True,
        **dict.fromkeys(_protocols(rows, params), True),
        STRICTER: True,
        FPR95_CONVENTION: True,
        f"Short schedule: {', '.join(shorter)} in the paper's preset.": shorter,
        _schedules(params): any(row.n_seeds for row in rows),
        f"The paper does not state {unknown} of this table; ours are those of its other tables.": unknown,
        f"{NOTHING}: not reported, or a method that was not run here.": any(row.n_seeds == 0 for row in rows),
        SEEN_ALL: any(row.method.endswith(ALL_ID) for row in rows),
        f"In the paper's table, but not evaluated here: {', '.join(not_evaluated)}.": not_evaluated,
        f"Evaluated here, but not in the paper's table: {', '.join(only_ours)}.": only_ours,
    }
    return [note for note, is_needed in notes.items() if note and is_needed]


def _source(table: str) -> str:
    return f"Paper: {PAPER}, {presets()[table].paper}. Δ: ours less the paper's."


def _protocols(rows: Sequence[ComparedRow], params: Params) -> list[str]:
    """What the names in these rows mean."""
    found = {name: text for name, text in PROTOCOLS.items() if any(row.method.endswith(f": {name}") for row in rows)}
    if "released code" in found:
        is_theirs = params.data.mixing == "recycle"
        found["released code"] += ", on its wild set" if is_theirs else ", on our wild set (theirs: preset released)"
    return [f"{text}." for text in found.values()]


def _schedules(params: Params) -> str:
    """Which of the named schedules the rivals have; empty without rivals that have one."""
    trained = {*params.rivals, *params.encoders}
    names = []
    for name, one in additions().items():
        keys = {(*key.split(".")[1:],): value for key, value in one.values.items()}  # methods.NAME.KEY
        own = {(method, key): value for (method, key), value in keys.items() if method in trained}
        if not own:
            return ""
        names.append(name)
        if all(getattr(params.methods.of(method), key) == value for (method, key), value in own.items()):
            return f"{one.title[0].upper()}{one.title[1:]} (preset {name})."
    return f"Rivals' schedules are neither those of {' nor of '.join(names)}."


# --- the comparison as a table


def paper_grids(comparisons: Sequence[Comparison]) -> list[Grid]:
    """What several tables have to say alike stands under the last."""
    grids = [paper_grid(one) for one in comparisons]
    later: list[list[str]] = [[note for grid in grids[i + 1 :] for note in grid.notes] for i in range(len(grids))]
    return [
        replace(grid, notes=[note for note in grid.notes if note not in said])
        for grid, said in zip(grids, later, strict=True)
    ]


def paper_grid(comparison: Comparison) -> Grid:
    by_pi = comparison.columns is ERRORS
    reported = {metric for row in comparison.rows for metric, pair in row.pairs.items() if not math.isnan(pair.paper)}
    columns = {metric: name for metric, name in comparison.columns.items() if metric in reported}
    short_header = []
    for name in columns.values():
        words, arrow = name.rsplit(" ", 1)
        first, _, second = words.partition(" ")
        short_header += [f"{first}\nours", f"{second} {arrow}".strip() + "\npaper", "\nΔ"]

    def section(row: ComparedRow) -> str:
        return f"{row.pi:g}" if by_pi else row.test

    return Grid(
        title=f"Ours and the paper's, in %: {comparison.title}",
        header=[
            "π" if by_pi else "OOD test set",
            "method",
            *(f"{name} {who}" for name in columns.values() for who in ("ours", "paper", "Δ")),
        ],
        sections=[
            [
                [
                    Cell(name),
                    Cell(row.method + (SHORT_SCHEDULE if row.has_short_schedule else "")),
                    *(cell for metric in columns for cell in _cells(metric, row.pairs.get(metric))),
                ]
                for row in rows
            ]
            for name, rows in groupby(comparison.rows, key=section)
        ],
        notes=comparison.notes,
        short_header=["π" if by_pi else "", "method" if by_pi else "OOD test set,\nmethod", *short_header],
        has_headings=not by_pi,
    )


def _cells(metric: str, pair: Pair | None) -> list[Cell]:
    """Ours, the paper's and the difference; empty where a metric is of no single set. Green where ours is better."""
    if pair is None:
        return [Cell("")] * 3
    difference = NOTHING if math.isnan(pair.difference) else f"{pair.difference:+.2f}".replace("-", "−")
    colour = ""
    if difference.strip("+−0.–"):  # none for what looks equal
        is_better = difference.startswith("−") == (metric in LOWER_IS_BETTER or metric in ERRORS)
        colour = "green" if is_better else "red"
    numbers = [NOTHING if math.isnan(value) else f"{value:.2f}" for value in (pair.ours, pair.paper)]
    return [*map(Cell, numbers), Cell(difference, colour=colour)]


def paper_frame(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """For programs: one line for each table, π, OOD set and method."""
    import pandas as pd

    return pd.DataFrame(
        {
            "table": one.table,
            "pi": row.pi,
            "ood": row.test,
            "method": row.method,
            "n_seeds": row.n_seeds,
            "short_schedule": row.has_short_schedule,
            **{
                f"{metric}_{what}": getattr(row.pairs.get(metric, Pair()), what)
                for metric in one.columns
                for what in ("ours", "ours_std", "paper", "difference")
            },
        }
        for one in comparisons
        for row in one.rows
    )


# --- SAL over π


@dataclass(frozen=True)
class PaperCurve:
    """One metric of SAL by π, as shares. `ood` is None where it is of other data or another network than ours."""

    metric: str
    ood: str | None
    name: str
    by_pi: dict[float, float]


def paper_curves(params: Params, ood_sets: Sequence[str]) -> list[PaperCurve]:
    """Of our own data and network, where the paper has them; otherwise of those that it has."""
    network, found = (params.data.id, params.model.backbone), []
    for metric in sorted(ERRORS):
        sal = [one for one in paper_numbers() if (one.method, one.metric) == ("SAL", metric) and one.test != AVERAGE]
        own = {
            ood: [
                one for one in sal if (one.setting.id, one.setting.backbone) == network and one.wild == one.test == ood
            ]
            for ood in ood_sets
        }
        others = {
            "textures": [one for one in sal if one.setting.table == THEORY],
            "mean of five OOD sets": [one for one in sal if one.setting.table in (MAIN, MIXING_RATIO)],
        }
        curves = [PaperCurve(metric, ood, f"paper: {ood}", _by_pi(numbers)) for ood, numbers in own.items()]
        if not any(own.values()):
            curves = [
                PaperCurve(metric, None, f"paper, other data: CIFAR-100, WRN-40-2, {name}", _by_pi(numbers))
                for name, numbers in others.items()
            ]
        found += [curve for curve in curves if curve.by_pi]
    return found


def _by_pi(numbers: Sequence[PaperNumber]) -> dict[float, float]:
    """As shares: one for each π, the mean where there are several."""
    values: dict[float, list[float]] = {}
    for one in numbers:
        if one.setting.pi:
            values.setdefault(one.setting.pi, []).append(one.value / 100)
    return {pi: mean(own) for pi, own in sorted(values.items())}


def paper_err_in_of_toy() -> dict[str, float]:
    """ERR_in of both scenarios of the example in the plane, as shares."""
    toy = [one for one in paper_numbers() if one.setting.table == "toy" and one.metric == "err_in"]
    return {one.test: one.value / 100 for one in toy}


def paper_zeta() -> dict[float, float]:
    """Table 5, by π."""
    return {one.setting.pi: one.value for one in paper_numbers() if one.metric == "zeta" and one.setting.pi}
