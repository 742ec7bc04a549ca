"""The paper's numbers (paper.csv), which of its tables fit a params.yaml, and ours beside them."""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
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
    NOTHING,
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
CALIBRATIONS = {"train": "the paper's text", "holdout": "our default", "id-svd": "the authors' code"}
PROTOCOLS = {
    "held out": "held out: T on held-out ID data, with predicted labels (ours)",
    "paper's text": "paper's text: T on ID training data, with true labels on the wild v; the text fixes neither",
    "released code": "released code: the filter, T and fine-tuning of the authors' main.py",
}
AT_ONE = {
    "disjoint": "At π = 1 the authors' code has one ID image to 120 OOD images; ours has none, so there is no ERR_in.",
    "recycle": "At π = 1 there is one ID image to 120 OOD images, as in the authors' code; ERR_in is of those.",
}
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
    return {setting: tuple(own) for setting, own in groupby(paper_numbers(), key=lambda one: one.setting)}


# --- which of its tables fit


def matching_settings(params: Params) -> list[Setting]:
    """The tables to compare with, in the order of data.pi, the nearest first. One that adds nothing is left out.

    None where the params are those of Table 6, which `errors_beside_the_paper` compares as a whole.
    """
    if {*_with_errors(params)} >= {one for one in settings() if one.table == THEORY}:
        return []
    fitting = [setting for setting in settings() if _fits(setting, params)]
    asked = {(wild, test) for wild in params.data.ood for test in (wild, *params.data.test_ood)}
    rows = [{*paper_names(name, params)} for name in params.evaluate.methods]

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
    shares = [*map(pi_text, params.data.pi)]
    return sorted(chosen, key=lambda setting: shares.index(_pi_of_ours(setting, params)))


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


def _nothing_found(params: Params) -> str:
    data = params.data
    names = ", ".join(dict.fromkeys(paper_names(method, params)[0] for method in params.evaluate.methods))
    shares = ", ".join(pi_text(pi) for pi in data.pi)
    lines = [
        "the paper reports no FPR95 or AUROC for these params",
        f"looked for: {data.id}, {params.model.backbone}, π {shares}, OOD {', '.join(data.ood)}; {names}",
    ]
    near = [name for name, one in presets().items() if one.paper and _preset_params(name)["data"]["id"] == data.id]
    lines.append(f"presets that fit {data.id}: {', '.join(near)}" if near else "presets that fit: salcli presets")
    return "\n  ".join(lines)


# --- ours beside the paper's


@dataclass(frozen=True)
class Comparison:
    """One table of the paper: one π, or the filter's errors at all of them.

    `rows` has a line for each OOD set and method, with METRIC_ours, _ours_std, _paper and _difference in percent, NaN
    where there is none. n_seeds: of ours, 0 where we have not run it.
    """

    title: str
    columns: dict[str, str]
    rows: pd.DataFrame
    notes: list[str]


def beside_the_paper(results: Results, params: Params) -> list[Comparison]:
    """Our results beside each table of the paper that fits params."""
    chosen = matching_settings(params)
    compared = [one for setting in chosen if (one := _compare(results, setting, params))]
    if chosen and not compared:
        missing = dict.fromkeys(one.test for setting in chosen for one in _comparable(setting))
        raise MissingArtifactError(
            f"none of the paper's OOD sets is evaluated yet ({', '.join(missing)}); do it with: dvc repro"
        )
    return compared


def _compare(results: Results, setting: Setting, params: Params) -> Comparison | None:
    """None where we have run nothing of it."""
    import pandas as pd

    runs = results.runs[results.runs["pi"] == _pi_of_ours(setting, params)]
    labels = dict(zip(runs["method"], runs["label"], strict=True))
    numbers = [one for one in settings()[setting] if one.metric in COLUMNS]
    sets = {one.test: (runs["ood"] == one.wild) & (runs["test_set"] == one.test) for one in _comparable(setting)}
    groups = {test: runs[is_own] for test, is_own in sets.items() if is_own.any()}
    not_evaluated = [test for test in sets if test not in groups]
    if len(groups) > 1 and any(one.test in (OF_ALL_SETS, AVERAGE) for one in numbers):
        groups[AVERAGE] = _averages(runs, groups, is_complete=not not_evaluated)
    methods = {method: _named(method, labels, params) for method in dict.fromkeys(one.method for one in numbers)}
    lines = []
    for test, own in groups.items():
        tests = {test, OF_ALL_SETS} if _is_sum(test, groups) else {test}
        for method, names in methods.items():
            paper = {one.metric: one.value for one in numbers if one.method == method and one.test in tests}
            if "id_accuracy" not in paper and not _is_sum(test, groups):  # mostly one for all sets, in the sum
                own = own.assign(id_accuracy=math.nan)
            for ours, name in names.items():
                lines.append(_line(setting, test, name, own[own["method"] == ours], paper, COLUMNS))
    if not any(line["n_seeds"] for line in lines):
        return None
    rows = pd.DataFrame(lines)
    known = {name for names in methods.values() for name in names}
    only_ours = [
        labels.get(name, paper_names(name, params)[0]) for name in params.evaluate.methods if name not in known
    ]
    pi = f", π {setting.pi:g}" if setting.pi is not None else ""
    return Comparison(
        title=f"{setting.id}, {setting.backbone}{pi} ({setting.table})",
        columns=COLUMNS,
        rows=rows,
        notes=_notes(setting.table, rows, params, int(runs["seed"].nunique()), not_evaluated, only_ours),
    )


def _is_sum(test: str, sections: Sized) -> bool:
    """Whether what is of no single set stands here."""
    return test == AVERAGE or len(sections) == 1


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


def _line(
    setting: Setting, test: str, name: str, ours: pd.DataFrame, paper: Mapping[str, float], columns: Iterable[str]
) -> dict[str, Any]:
    """Our runs of one method on one set, and the paper's numbers."""
    line = {
        "table": setting.table,
        "pi": math.nan if setting.pi is None else setting.pi,
        "ood": test,
        "method": name,
        "n_seeds": len(ours),
        "short_schedule": bool(ours[SHORT].any()),  # ours was trained for fewer epochs than its authors train
    }
    for metric in columns:
        own, theirs = float(ours[metric].mean()), paper.get(metric, math.nan)
        numbers = {"ours": own, "ours_std": float(ours[metric].std()), "paper": theirs, "difference": own - theirs}
        line |= {f"{metric}_{what}": value for what, value in numbers.items()}
    return line


def errors_beside_the_paper(folder: Path, only: Collection[EvaluationKey], params: Params) -> list[Comparison]:
    """Errors of the filter and FPR95 by π, of every variant that the paper calls SAL (Table 6); none without runs."""
    import pandas as pd

    variants, chosen = _named("SAL", {}, params), _with_errors(params)
    points = {variant: sweep_points(folder, only, variant) for variant in variants if variant}
    lines = []
    for setting in chosen:
        paper, test = {one.metric: one.value for one in settings()[setting]}, settings()[setting][0].test
        for variant, own in points.items():
            own = own[(own["ood"] == test) & (own["pi"] == setting.pi)]
            ours = (100 * own[list(ERRORS)]).assign(**{SHORT: False})
            lines.append(_line(setting, test, variants[variant], ours, paper, ERRORS))
    if not any(line["n_seeds"] for line in lines):
        return []
    rows, first, test = pd.DataFrame(lines), chosen[0], lines[0]["ood"]
    return [
        Comparison(
            title=f"errors of the filter, {first.id}, {first.backbone}, {test} ({first.table})",
            columns=ERRORS,
            rows=rows,
            notes=[
                _source(first.table),
                *_protocols(rows["method"], params),
                *([AT_ONE[params.data.mixing]] if (rows["pi"] == 1).any() else []),
                "Contamination, ID data among the candidates, by π.",
                STRICTER,
            ],
        )
    ]


def _named(method: str, labels: Mapping[str, str], params: Params) -> dict[str, str]:
    """Our methods that the paper calls so, with the name of their row: the paper's, and whose protocol they follow."""
    names = {name: _row_name(method, name, labels, params) for name in our_methods(method, params)}
    rows = list(names.values())
    return {
        name: f"{row}, {labels.get(name, name)}" if rows.count(row) > 1 else row for name, row in names.items()
    } or {"": method}


def _row_name(method: str, ours: str, labels: Mapping[str, str], params: Params) -> str:
    from salcli.methods.sal import protocol  # the params have loaded it

    if ours in params.variants:
        return f"{method}: {protocol(params.for_variant(ours).filter)}"
    if "@" in ours or getattr(params.methods.of(ours), "images", "train") == "all":
        return f"{method}{ALL_ID}"
    return f"{method}: {labels.get(ours, ours)}" if ours in ALSO else method


# --- what stands below a table


def _notes(
    table: str,
    rows: pd.DataFrame,
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
        **dict.fromkeys(_protocols(rows["method"], params), True),
        STRICTER: True,
        FPR95_CONVENTION: True,
        f"Short schedule: {', '.join(shorter)} in the paper's preset.": shorter,
        _schedules(params): True,
        f"The paper does not state {unknown} of this table; ours are those of its other tables.": unknown,
        f"{NOTHING}: not reported, or a method that was not run here.": (rows["n_seeds"] == 0).any(),
        SEEN_ALL: rows["method"].str.endswith(ALL_ID).any(),
        f"In the paper's table, but not evaluated here: {', '.join(not_evaluated)}.": not_evaluated,
        f"Evaluated here, but not in the paper's table: {', '.join(only_ours)}.": only_ours,
    }
    return [note for note, is_needed in notes.items() if note and is_needed]


def _source(table: str) -> str:
    return f"Paper: {PAPER}, {presets()[table].paper}. Δ: ours less the paper's."


def _protocols(methods: pd.Series[str], params: Params) -> list[str]:
    """What the names of these rows mean."""
    found = {name: text for name, text in PROTOCOLS.items() if methods.str.endswith(f": {name}").any()}
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
    by_pi, rows = comparison.columns is ERRORS, comparison.rows
    columns = {metric: name for metric, name in comparison.columns.items() if rows[f"{metric}_paper"].notna().any()}
    short_header = []
    for name in columns.values():
        words, arrow = name.rsplit(" ", 1)
        first, _, second = words.partition(" ")
        short_header += [f"{first}\nours", f"{second} {arrow}".strip() + "\npaper", "\nΔ"]
    sections = []
    groups = dict(list(rows.groupby("pi" if by_pi else "ood", sort=False)))
    for own in groups.values():
        section = []
        for row in own.to_dict("records"):
            name = row["method"] + (SHORT_SCHEDULE if row["short_schedule"] else "")
            cells = [Cell(f"{row['pi']:g}" if by_pi else row["ood"]), Cell(name)]
            for metric in columns:
                ours, paper = row[f"{metric}_ours"], row[f"{metric}_paper"]
                is_elsewhere = metric == "id_accuracy" and math.isnan(paper) and not _is_sum(row["ood"], groups)
                cells += [Cell("")] * 3 if is_elsewhere else _cells(metric, ours, paper)
            section.append(cells)
        sections.append(section)
    return Grid(
        title=f"Ours and the paper's, in %: {comparison.title}",
        header=[
            "π" if by_pi else "OOD test set",
            "method",
            *(f"{name} {who}" for name in columns.values() for who in ("ours", "paper", "Δ")),
        ],
        sections=sections,
        notes=comparison.notes,
        short_header=["π" if by_pi else "", "method" if by_pi else "OOD test set,\nmethod", *short_header],
        has_headings=not by_pi,
    )


def _cells(metric: str, ours: float, paper: float) -> list[Cell]:
    """Ours, the paper's and the difference; green where ours is better."""
    difference = NOTHING if math.isnan(ours - paper) else f"{ours - paper:+.2f}".replace("-", "−")
    colour = ""
    if difference.strip("+−0.–"):  # none for what looks equal
        is_better = difference.startswith("−") == (metric in LOWER_IS_BETTER or metric in ERRORS)
        colour = "green" if is_better else "red"
    numbers = [NOTHING if math.isnan(value) else f"{value:.2f}" for value in (ours, paper)]
    return [*map(Cell, numbers), Cell(difference, colour=colour)]


def paper_frame(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """For programs: one line for each table, π, OOD set and method."""
    import pandas as pd

    return pd.concat([one.rows for one in comparisons], ignore_index=True)


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
        same = [one for one in sal if (one.setting.id, one.setting.backbone) == network and one.wild == one.test]
        own = {ood: [one for one in same if one.test == ood] for ood in ood_sets}
        curves = [PaperCurve(metric, ood, f"paper: {ood}", _by_pi(numbers)) for ood, numbers in own.items()]
        if not any(own.values()):
            others = {"textures": (THEORY,), "mean of five OOD sets": (MAIN, MIXING_RATIO)}
            for name, tables in others.items():
                by_pi = _by_pi([one for one in sal if one.setting.table in tables])
                curves.append(PaperCurve(metric, None, f"paper, other data: CIFAR-100, WRN-40-2, {name}", by_pi))
        found += [curve for curve in curves if curve.by_pi]
    return found


def _by_pi(numbers: Sequence[PaperNumber]) -> dict[float, float]:
    """As shares: one for each π, the mean where there are several."""
    shares = sorted({one.setting.pi for one in numbers if one.setting.pi})
    return {pi: mean(one.value / 100 for one in numbers if one.setting.pi == pi) for pi in shares}


def paper_err_in_of_toy() -> dict[str, float]:
    """ERR_in of both scenarios of the example in the plane, as shares."""
    toy = [one for one in paper_numbers() if one.setting.table == "toy" and one.metric == "err_in"]
    return {one.test: one.value / 100 for one in toy}


def paper_zeta() -> dict[float, float]:
    """Table 5, by π."""
    return {one.setting.pi: one.value for one in paper_numbers() if one.metric == "zeta" and one.setting.pi}
