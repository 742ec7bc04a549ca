"""Our figures beside the paper's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from salcli.errors import MissingArtifactError
from salcli.paper.figures import OF_ALL_SETS, settings
from salcli.presets import presets
from salcli.reporting.paper_match import METRICS, NO_SINGLE_SET, matching_settings, our_method, paper_names
from salcli.reporting.results import AVERAGE, SHORT

if TYPE_CHECKING:
    from salcli.paper import Figure, Setting
    from salcli.params import Params
    from salcli.reporting.results import Results


@dataclass(frozen=True)
class Cell:
    """One figure in percent, ours and the paper's; NaN where there is none."""

    ours: float = math.nan
    ours_std: float = math.nan
    paper: float = math.nan

    @property
    def difference(self) -> float:
        """Ours less the paper's."""
        return self.ours - self.paper


@dataclass(frozen=True)
class ComparedRow:
    """One method of the paper on one OOD set. n_seeds: of ours, 0 where we have not run it."""

    test: str
    method: str
    n_seeds: int
    has_short_schedule: bool  # ours was trained for fewer epochs than its authors train
    cells: dict[str, Cell]  # by our metrics' names; without ID accuracy, where that is of no single set


@dataclass(frozen=True)
class Comparison:
    """One table of the paper. Our results that it has nothing for are named, and so is what we have not run."""

    setting: Setting
    place: str
    rows: list[ComparedRow]
    only_ours: list[str]
    not_evaluated: list[str]
    shorter: list[str]  # schedules that are shorter than the preset's, as people read them
    n_seeds: int


def compare(results: Results, params: Params) -> list[Comparison]:
    """Our results beside each table of the paper that fits params."""
    compared = [_compare(results.runs, setting, params) for setting in matching_settings(params)]
    with_ours = [one for one in compared if any(row.n_seeds for row in one.rows)]
    if not with_ours:
        missing = dict.fromkeys(test for one in compared for test in one.not_evaluated)
        raise MissingArtifactError(
            f"none of the paper's OOD sets is evaluated yet ({', '.join(missing)}); do it with: dvc repro"
        )
    return with_ours


def _compare(runs: pd.DataFrame, setting: Setting, params: Params) -> Comparison:
    figures = [figure for figure in settings()[setting] if figure.metric in METRICS]
    sets = list(dict.fromkeys((figure.wild, figure.test) for figure in figures if figure.test not in NO_SINGLE_SET))
    evaluated = [pair for pair in sets if not _of_pair(runs, pair).empty]
    groups = {test: _of_pair(runs, (wild, test)) for wild, test in evaluated}
    if len(evaluated) > 1:
        groups[AVERAGE] = _averages(runs, evaluated, is_complete=evaluated == sets)
    rows = [
        _row(
            test,
            own_runs[own_runs["method"] == our_method(method, params)],
            [figure for figure in figures if figure.method == method],
            is_sum=test == AVERAGE or len(groups) == 1,
        )
        for test, own_runs in groups.items()
        for method in dict.fromkeys(figure.method for figure in figures)
    ]
    known = {our_method(figure.method, params) for figure in figures}
    return Comparison(
        setting=setting,
        place=presets()[setting.table].paper,
        rows=rows,
        only_ours=[paper_names(method, params)[0] for method in params.evaluate.methods if method not in known],
        not_evaluated=[test for wild, test in sets if (wild, test) not in evaluated],
        shorter=_shorter_schedules(setting.table, params),
        n_seeds=int(runs["seed"].nunique()),
    )


def _shorter_schedules(table: str, params: Params) -> list[str]:
    preset = presets()[table].params
    epochs = {"train_id": params.train_id.epochs, "train_ood": params.train_ood.epochs}
    return [
        f"{section}.epochs {own} instead of {preset[section]['epochs']}"
        for section, own in epochs.items()
        if own < preset[section]["epochs"]
    ]


def _row(test: str, ours: pd.DataFrame, figures: list[Figure], *, is_sum: bool) -> ComparedRow:
    """One method: our runs on the set, and all of the paper's figures. What is of no single set goes to the sum."""
    places = {test, OF_ALL_SETS} if is_sum else {test}
    paper = {METRICS[figure.metric]: figure.value for figure in figures if figure.test in places}
    cells = {
        metric: Cell(
            ours=float(ours[metric].mean()),
            ours_std=float(ours[metric].std()) if len(ours) > 1 else math.nan,
            paper=paper.get(metric, math.nan),
        )
        for metric in METRICS.values()
    }
    if not is_sum and "id_accuracy" not in paper:
        del cells["id_accuracy"]  # the paper has one for all sets: it stands in the sum
    return ComparedRow(test, figures[0].method, len(ours), bool(ours[SHORT].any()), cells)


def _of_pair(runs: pd.DataFrame, pair: tuple[str, str]) -> pd.DataFrame:
    wild, test = pair
    return runs[(runs["ood"] == wild) & (runs["test_set"] == test)]


def _averages(runs: pd.DataFrame, pairs: list[tuple[str, str]], *, is_complete: bool) -> pd.DataFrame:
    """One line for each method and seed that was run on every set, so that nothing unlike is compared.

    Without all of the paper's sets, an average over OOD sets is none that it reports; ID accuracy still is.
    """
    parts = pd.concat([_of_pair(runs, pair) for pair in pairs])
    grouped = parts.groupby(["method", "seed"], sort=False)[list(METRICS.values())]
    averages = grouped.mean()[grouped.size() == len(pairs)].reset_index()
    averages[SHORT] = averages["method"].isin(runs["method"][runs[SHORT]])
    if not is_complete:
        averages[["fpr95", "auroc"]] = math.nan
    return averages
