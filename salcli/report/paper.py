"""The paper's numbers (paper.csv), which of its tables fit a params.yaml, and ours beside them."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import groupby
from statistics import mean
from typing import TYPE_CHECKING

from salcli.errors import MissingArtifactError, PaperError
from salcli.params.presets import presets, resolved
from salcli.params.reading import AVERAGE
from salcli.report.results import (
    LOWER_IS_BETTER,
    SHORT,
    SHORT_SCHEDULE,
    Cell,
    EvaluationKey,
    Grid,
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
UNSEEN_300K, UNSEEN_TIN = "unseen-300k", "unseen-tin"
THEORY, MAIN, MIXING_RATIO = "theory", "main-cifar100", "mixing-ratio"
OTHER_CROP = {"tin-crop": "tin-resize", "tin-resize": "tin-crop"}
N_RUNS = {"main-cifar100": 10, "cifar10": 10}  # what the captions say the numbers are averaged over; no other says so
ALL_ID = ", all ID"  # a row whose network was trained on all ID data but the test's
ALSO = {"energy-vos": "energy-oe"}  # "Energy (w/ OE)" is this loss in WOODS' published sweeps
OUR_METRICS = {"fpr95": "fpr95", "auroc": "auroc", "id_acc": "id_accuracy"}  # the paper's names → ours
COLUMNS = {"fpr95": "FPR95 ↓", "auroc": "AUROC ↑", "id_accuracy": "ID acc. ↑"}
NO_SINGLE_SET = {OF_ALL_SETS, AVERAGE}
NOTHING = "–"
CALIBRATIONS = {"train": "the paper's text", "holdout": "our default", "id-svd": "the authors' code"}
# what the captions and the text of these tables leave open
NOT_STATED = {
    "resnet18": "π",
    "resnet34": "π",
    "near-cifar50": "π and the network",
    "unseen-tin": "π and the network",
    "weakly-supervised": "π and the network",
}
ERRORS = {"err_out": "ERR_out ↓", "err_in": "ERR_in ↓", "fpr95": "FPR95 ↓"}  # columns of Table 6
WITH_ERRORS = (THEORY, "predicted-labels")
PROTOCOLS = {
    "held out": "held out: T on held-out ID data, with predicted labels (ours)",
    "paper's text": "paper's text: T on ID training data, with true labels on the wild v; the text fixes neither",
    "released code": "released code: the filter, T and fine-tuning of the authors' main.py",
}
AT_ONE = "At π = 1 the authors' code has one ID image to 120 OOD images; ours has none, so there is no ERR_in."
STRICTER = (
    "Our splits are stricter: the classifier has not seen the wild half of the ID data, no image is both wild and test."
)


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
        if self.setting.table == UNSEEN_300K:
            return "300k-random"
        return OTHER_CROP[self.test] if self.setting.table == UNSEEN_TIN else self.test


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

    None where the params are those of Table 6, which `compare_errors` compares as a whole.
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
    """Settings with errors of the filter on an OOD set of ours, one for each π."""
    found = {
        one.setting.pi: one.setting
        for one in reversed(paper_numbers())  # Table 6 comes first, and stays
        if one.setting.table in WITH_ERRORS and _fits(one.setting, params) and one.test in params.data.ood
    }
    return [*found.values()][::-1]


def our_methods(paper_method: str, params: Params) -> list[str]:
    """The methods and variants of ours that the paper calls so; several where variants differ only in protocol."""
    return [name for name in params.evaluate.methods if paper_method in paper_names(name, params)]


def paper_names(method: str, params: Params) -> list[str]:
    """What the paper calls a method, or a variant of SAL, with these params."""
    if method in params.variants:
        own = params.for_variant(method)
        variants = {
            f"{own.filter.score} filter": own.filter.score != "sal",
            "candidate-id": own.train_ood.candidate_id,
        }
        differences = [*(name for name, differs in variants.items() if differs), *_variants_of_tau(own)]
        return [f"SAL ({', '.join(differences)})"] if differences else ["SAL", "SAL (c=1)"]
    method = ALSO.get(method, method).partition("@")[0]  # knn@all-id: KNN of another network
    if method == "sal-posthoc":  # τ itself: what is done with it afterwards makes no difference
        return [f"SAL ({', '.join(['post-hoc', *_variants_of_tau(params)])})"]
    return [name for name in _rivals_of_the_paper() if _our_spelling(name) == method] or [method]


@cache
def _rivals_of_the_paper() -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.method for one in paper_numbers()))


def _our_spelling(paper_method: str) -> str:
    """Energy-OE is energy-oe, KNN+ is knn-plus."""
    return paper_method.lower().replace("+", "-plus")


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
    return [one for one in settings()[setting] if one.metric in OUR_METRICS and one.test not in NO_SINGLE_SET]


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
    near = [name for name, preset in presets().items() if preset.paper and resolved(preset)["data"]["id"] == data.id]
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

    test: str
    method: str
    n_seeds: int
    has_short_schedule: bool  # ours was trained for fewer epochs than its authors train
    pairs: dict[str, Pair]  # by our metrics' names; without ID accuracy, where that is of no single set


@dataclass(frozen=True)
class Comparison:
    """One table of the paper. Results of ours that it lacks are named, and so is what we have not run."""

    setting: Setting
    source: str  # where the paper has it
    rows: list[ComparedRow]
    only_ours: list[str]
    not_evaluated: list[str]
    shorter: list[str]  # schedules that are shorter than the preset's
    protocols: list[str]  # what the protocols in the names of rows are
    n_seeds: int


def beside_the_paper(results: Results, params: Params) -> list[Comparison]:
    """Our results beside each table of the paper that fits params."""
    compared = [_compare(results, setting, params) for setting in matching_settings(params)]
    with_ours = [one for one in compared if any(row.n_seeds for row in one.rows)]
    if compared and not with_ours:
        missing = dict.fromkeys(test for one in compared for test in one.not_evaluated)
        raise MissingArtifactError(
            f"none of the paper's OOD sets is evaluated yet ({', '.join(missing)}); do it with: dvc repro"
        )
    return with_ours


def _compare(results: Results, setting: Setting, params: Params) -> Comparison:
    runs = results.runs[results.runs["pi"] == _pi_of_ours(setting, params)]
    labels = dict(zip(runs["method"], runs["label"], strict=True))
    numbers = [one for one in settings()[setting] if one.metric in OUR_METRICS]
    sets = list(dict.fromkeys((one.wild, one.test) for one in numbers if one.test not in NO_SINGLE_SET))
    evaluated = [pair for pair in sets if not _of_pair(runs, pair).empty]
    groups = {test: _of_pair(runs, (wild, test)) for wild, test in evaluated}
    if len(evaluated) > 1:
        groups[AVERAGE] = _averages(runs, evaluated, is_complete=evaluated == sets)
    methods = {method: our_methods(method, params) for method in dict.fromkeys(one.method for one in numbers)}
    rows = [
        _row(
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
    return Comparison(
        setting=setting,
        source=presets()[setting.table].paper,
        rows=rows,
        only_ours=[
            labels.get(name, paper_names(name, params)[0]) for name in params.evaluate.methods if name not in known
        ],
        not_evaluated=[test for wild, test in sets if (wild, test) not in evaluated],
        shorter=_shorter_schedules(setting.table, params),
        protocols=_protocols([row.method for row in rows], params),
        n_seeds=int(runs["seed"].nunique()),
    )


def compare_errors(folder: Path, only: Collection[EvaluationKey], params: Params) -> list[tuple[Setting, ComparedRow]]:
    """Errors of the filter and FPR95 by π, of every variant that the paper calls SAL (Table 6)."""
    rows, variants = [], _named("SAL", our_methods("SAL", params), {}, params)
    points = {variant: sweep_points(folder, only, variant) for variant, _ in variants if variant}
    for setting in _with_errors(params):
        paper = {one.metric: one.value for one in settings()[setting]}
        (test,) = {one.test for one in settings()[setting]}
        for variant, name in variants:
            own = [one for one in points.get(variant, ()) if (one.ood, one.pi) == (test, setting.pi)]
            pairs = {}
            for metric in ERRORS:
                values = [100 * value for one in own if (value := getattr(one, metric)) is not None]
                theirs = 100 * paper.get(metric, math.nan) / AS_SHARE[metric]
                pairs[metric] = Pair(mean(values) if values else math.nan, math.nan, theirs)
            rows.append((setting, ComparedRow(test, name, len(own), False, pairs)))
    return rows if any(row.n_seeds for _, row in rows) else []


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


def _protocols(rows: Sequence[str], params: Params) -> list[str]:
    """What the names in these rows mean."""
    found = {name: text for name, text in PROTOCOLS.items() if any(row.endswith(f": {name}") for row in rows)}
    if "released code" in found:
        is_theirs = params.data.mixing == "recycle"
        found["released code"] += ", on its wild set" if is_theirs else ", on our wild set (theirs: preset released)"
    return [*found.values()]


def _shorter_schedules(table: str, params: Params) -> list[str]:
    preset = resolved(presets()[table])
    epochs = {"train_id": params.train_id.epochs, "train_ood": params.train_ood.epochs}
    return [
        f"{section}.epochs {own} instead of {preset[section]['epochs']}"
        for section, own in epochs.items()
        if own < preset[section]["epochs"]
    ]


def _row(test: str, name: str, ours: pd.DataFrame, numbers: list[PaperNumber], *, is_sum: bool) -> ComparedRow:
    """Our runs of one method on the set, and the paper's numbers. What is of no single set goes to the sum."""
    tests = {test, OF_ALL_SETS} if is_sum else {test}
    paper = {OUR_METRICS[one.metric]: one.value for one in numbers if one.test in tests}
    pairs = {
        metric: Pair(
            ours=float(ours[metric].mean()),
            ours_std=float(ours[metric].std()) if len(ours) > 1 else math.nan,
            paper=paper.get(metric, math.nan),
        )
        for metric in COLUMNS
    }
    if not is_sum and "id_accuracy" not in paper:
        del pairs["id_accuracy"]  # the paper has one for all sets, which stands in the sum
    return ComparedRow(test, name, len(ours), bool(ours[SHORT].any()), pairs)


def _of_pair(runs: pd.DataFrame, pair: tuple[str, str]) -> pd.DataFrame:
    wild, test = pair
    return runs[(runs["ood"] == wild) & (runs["test_set"] == test)]


def _averages(runs: pd.DataFrame, pairs: list[tuple[str, str]], *, is_complete: bool) -> pd.DataFrame:
    """One line for each method and seed that was run on every set, so that only like is compared with like.

    Without all of the paper's sets there is no average over OOD sets that it reports; ID accuracy still is.
    """
    import pandas as pd

    parts = pd.concat([_of_pair(runs, pair) for pair in pairs])
    grouped = parts.groupby(["method", "seed"], sort=False)[list(COLUMNS)]
    averages = grouped.mean()[grouped.size() == len(pairs)].reset_index()
    averages[SHORT] = averages["method"].isin(runs["method"][runs[SHORT]])
    if not is_complete:
        averages[["fpr95", "auroc"]] = math.nan
    return averages


# --- the comparison as a table


def paper_grids(comparisons: Sequence[Comparison], errors: Grid | None = None) -> list[Grid]:
    """What several tables have to say alike stands under the last."""
    grids = [*map(paper_grid, comparisons), *([errors] if errors else [])]
    later: list[list[str]] = [[note for grid in grids[i + 1 :] for note in grid.notes] for i in range(len(grids))]
    return [
        replace(grid, notes=[note for note in grid.notes if note not in said])
        for grid, said in zip(grids, later, strict=True)
    ]


def errors_grid(rows: Sequence[tuple[Setting, ComparedRow]], params: Params) -> Grid | None:
    if not rows:
        return None
    first, test = rows[0][0], rows[0][1].test
    sections = [
        [[Cell(f"{setting.pi:g}"), Cell(row.method), *_cells(row, ERRORS)] for _, row in own]
        for setting, own in groupby(rows, key=lambda pair: pair[0])
    ]
    return Grid(
        title=f"Ours and the paper's, in %: errors of the filter, {first.id}, {first.backbone}, {test} ({first.table})",
        header=["π", "method", *(f"{name} {who}" for name in ERRORS.values() for who in ("ours", "paper", "Δ"))],
        sections=sections,
        notes=[
            f"Paper: {PAPER}, {presets()[first.table].paper}. Δ: ours less the paper's.",
            *(f"{protocol}." for protocol in _protocols([row.method for _, row in rows], params)),
            *([AT_ONE] if any(setting.pi == 1 for setting, _ in rows) else []),
            STRICTER,
        ],
        short_header=["π", "method", *_short_header(ERRORS)],
    )


def paper_grid(comparison: Comparison) -> Grid:
    setting = comparison.setting
    pi = f", π {setting.pi:g}" if setting.pi is not None else ""
    sections = [
        [
            [Cell(test), Cell(row.method + (SHORT_SCHEDULE if row.has_short_schedule else "")), *_cells(row)]
            for row in rows
        ]
        for test, rows in groupby(comparison.rows, key=lambda row: row.test)
    ]
    return Grid(
        title=f"Ours and the paper's, in %: {setting.id}, {setting.backbone}{pi} ({setting.table})",
        header=[
            "OOD test set",
            "method",
            *(f"{name} {who}" for name in COLUMNS.values() for who in ("ours", "paper", "Δ")),
        ],
        sections=sections,
        notes=_notes(comparison),
        short_header=["OOD\ntest set", "method", *_short_header(COLUMNS)],
    )


def _short_header(columns: Mapping[str, str]) -> list[str]:
    header = []
    for name in columns.values():
        words, arrow = name.rsplit(" ", 1)
        first, _, second = words.partition(" ")
        header += [f"{first}\nours", f"{second} {arrow}".strip() + "\npaper", "\nΔ"]
    return header


def paper_frame(comparisons: Sequence[Comparison], errors: Sequence[tuple[Setting, ComparedRow]] = ()) -> pd.DataFrame:
    """For programs: one line for each table, π, OOD set and method."""
    import pandas as pd

    tables = [(one.setting, row, COLUMNS) for one in comparisons for row in one.rows]
    tables += [(setting, row, ERRORS) for setting, row in errors]
    return pd.DataFrame(
        {
            "table": setting.table,
            "pi": setting.pi,
            "ood": row.test,
            "method": row.method,
            "n_seeds": row.n_seeds,
            "short_schedule": row.has_short_schedule,
            **{
                f"{metric}_{what}": getattr(row.pairs.get(metric, Pair()), what)
                for metric in columns
                for what in ("ours", "ours_std", "paper", "difference")
            },
        }
        for setting, row, columns in tables
    )


def _cells(row: ComparedRow, columns: Mapping[str, str] = COLUMNS) -> list[Cell]:
    """Ours, the paper's and the difference in each metric; empty where a metric is of no single set."""
    cells = []
    for metric in columns:
        pair = row.pairs.get(metric)
        if pair is None:
            cells += [Cell("")] * 3
            continue
        difference = NOTHING if math.isnan(pair.difference) else f"{pair.difference:+.2f}".replace("-", "−")
        numbers = [NOTHING if math.isnan(value) else f"{value:.2f}" for value in (pair.ours, pair.paper)]
        cells += [*map(Cell, numbers), Cell(difference, colour=_colour(metric, difference))]
    return cells


def _colour(metric: str, difference: str) -> str:
    """Green where ours is better; none for what looks equal."""
    if difference == NOTHING or not difference.strip("+−0."):
        return ""
    return "green" if difference.startswith("−") == (metric in LOWER_IS_BETTER or metric in ERRORS) else "red"


def _notes(comparison: Comparison) -> list[str]:
    ours = f"mean of {comparison.n_seeds} seeds" if comparison.n_seeds > 1 else "one seed"
    n_runs = N_RUNS.get(comparison.setting.table)
    theirs = f"mean of {n_runs} runs" if n_runs else "it does not say of how many runs"
    notes = [
        f"Paper: {PAPER}, {comparison.source}. Δ: ours less the paper's.",
        f"Ours: {ours}. The paper's: {theirs}.",
        *(f"{protocol}." for protocol in comparison.protocols),
        STRICTER,
        FPR95_CONVENTION,
    ]
    if comparison.shorter:
        notes.append(f"Short schedule: {', '.join(comparison.shorter)} in the paper's preset.")
    if what := NOT_STATED.get(comparison.setting.table):
        notes.append(f"The paper does not state {what} of this table; ours are those of its other tables.")
    if any(row.n_seeds == 0 for row in comparison.rows):
        notes.append(f"{NOTHING}: not reported, or a method that was not run here.")
    if any(row.method.endswith(ALL_ID) for row in comparison.rows):
        notes.append(
            "all ID: the network has seen the wild ID half, too, as those of the paper's ID-only baselines have."
        )
    if comparison.not_evaluated:
        notes.append(f"In the paper's table, but not evaluated here: {', '.join(comparison.not_evaluated)}.")
    if comparison.only_ours:
        notes.append(f"Evaluated here, but not in the paper's table: {', '.join(comparison.only_ours)}.")
    return notes


# --- SAL over π


@dataclass(frozen=True)
class PaperCurve:
    """One metric of SAL by π, as shares. `ood` is None where it is of other data or another network than ours."""

    metric: str
    ood: str | None
    name: str
    by_pi: dict[float, float]


AS_SHARE = {"err_in": 1, "err_out": 1, "fpr95": 100}  # what the paper's numbers are divided by
REFERENCE = "CIFAR-100, WRN-40-2"  # data and network of the tables that have more than one π


def paper_curves(params: Params, ood_sets: Sequence[str]) -> list[PaperCurve]:
    """Of our own data and network, where the paper has them; otherwise of those that it has."""
    network = params.data.id, params.model.backbone

    def is_ours(one: PaperNumber, ood: str) -> bool:
        return (one.setting.id, one.setting.backbone) == network and one.wild == one.test == ood

    found = []
    for metric in AS_SHARE:
        own = [
            PaperCurve(metric, ood, f"paper: {ood}", _by_pi(metric, lambda one, ood=ood: is_ours(one, ood)))  # type: ignore[misc]
            for ood in ood_sets
        ]
        found += [curve for curve in own if curve.by_pi] or _of_other_data(metric)
    return found


def paper_err_in_of_toy() -> dict[str, float]:
    """ERR_in of both scenarios of the example in the plane."""
    return {one.test: one.value for one in paper_numbers() if one.setting.table == "toy" and one.metric == "err_in"}


def paper_zeta() -> dict[float, float]:
    """Table 5, by π."""
    return {one.setting.pi: one.value for one in paper_numbers() if one.metric == "zeta" and one.setting.pi}


def _of_other_data(metric: str) -> list[PaperCurve]:
    (ood,) = {one.test for one in paper_numbers() if one.setting.table == THEORY}
    of_errors = _by_pi(metric, lambda one: one.setting.table == THEORY)
    of_all = _by_pi(metric, lambda one: one.setting.table in (MAIN, MIXING_RATIO) and one.test != AVERAGE)
    curves = [
        PaperCurve(metric, None, f"paper, other data: {REFERENCE}, {ood}", of_errors),
        PaperCurve(metric, None, f"paper, other data: {REFERENCE}, mean of five OOD sets", of_all),
    ]
    return [curve for curve in curves if curve.by_pi]


def _by_pi(metric: str, is_wanted: Callable[[PaperNumber], bool]) -> dict[float, float]:
    """SAL's numbers as shares: one for each π, the mean where there are several."""
    values: dict[float, list[float]] = {}
    for one in paper_numbers():
        if one.method == "SAL" and one.metric == metric and one.setting.pi and is_wanted(one):
            values.setdefault(one.setting.pi, []).append(one.value / AS_SHARE[metric])
    return {pi: mean(own) for pi, own in sorted(values.items())}
