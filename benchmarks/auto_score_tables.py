"""The tables of docs/auto-score.md, from the rows that auto_score.py wrote: `python auto_score_tables.py CSV …`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

EXPERIMENT = ["id", "ood", "seed"]
PAIR = ["id", "ood"]
TAU, TRUE_OUTLIERS = "sal", "true outliers"
RULES = ["τ", "auto", "largest excess", "best in hindsight"]


def report(*results: Path) -> str:
    """What each rule's choice comes to, what `auto` did, and every score as separator."""
    rows = pd.concat([pd.read_csv(path) for path in results])
    parts = [_separation(rows), _choices(rows), _scores(rows)]
    trained = rows.groupby(EXPERIMENT)["fpr95"].transform("count") > 0
    if trained.any():
        parts.insert(0, _fpr95(rows[trained]))
    return "\n\n".join(parts)


def _chosen_by(rule: str, scores: pd.DataFrame, hindsight: pd.Series) -> str:
    """The name of the score that a rule separates with; hindsight is lower for better scores."""
    match rule:
        case "τ":
            return TAU
        case "auto":
            return str(scores["chosen"].idxmax())
        case "largest excess":
            return str(scores["excess"].idxmax())
        case _:
            return str(hindsight.idxmin())


def _fpr95(rows: pd.DataFrame) -> str:
    found = []
    for experiment, own in rows.groupby(EXPERIMENT, sort=False):
        by_score = own.set_index("score")
        scores = by_score.drop(index=TRUE_OUTLIERS)
        figures = {rule: scores["fpr95"][_chosen_by(rule, scores, scores["fpr95"])] for rule in RULES}
        figures[TRUE_OUTLIERS] = by_score["fpr95"][TRUE_OUTLIERS]
        found.append({**dict(zip(EXPERIMENT, experiment, strict=True)), **figures})
    columns = [*RULES, TRUE_OUTLIERS]
    lines = [_line(["ID", "wild OOD", "seeds", *columns]), _line(["---"] * 2 + ["---:"] * (1 + len(columns)))]
    for pair, own in pd.DataFrame(found).groupby(PAIR, sort=False):
        lines.append(_line([*pair, str(len(own)), *(_spread(own[rule]) for rule in columns)]))
    return "SAL's FPR95 in %\n\n" + "\n".join(lines)


def _separation(rows: pd.DataFrame) -> str:
    """ERR_in and ERR_out of each rule's candidates; in hindsight the best score is that of the smallest sum."""
    lines = [_line(["ID", "wild OOD", "seeds", "ID acc.", *RULES]), _line(["---"] * 2 + ["---:"] * (2 + len(RULES)))]
    for pair, own in _scored(rows).groupby(PAIR, sort=False):
        cells = []
        for rule in RULES:
            chosen = pd.DataFrame([_row(rule, one) for _, one in own.groupby("seed", sort=False)])
            cells.append(f"{_spread(chosen['err_in'])} / {_spread(chosen['err_out'])}")
        accuracy = own.groupby("seed")["id_accuracy"].first()
        lines.append(_line([*pair, str(len(accuracy)), f"{100 * accuracy.mean():.1f}", *cells]))
    return "ERR_in / ERR_out in %\n\n" + "\n".join(lines)


def _row(rule: str, one: pd.DataFrame) -> pd.Series:
    scores = one.set_index("score")
    return scores.loc[_chosen_by(rule, scores, scores["err_in"] + scores["err_out"])]


def _choices(rows: pd.DataFrame) -> str:
    """How often `auto` left τ, for what, and whether the sum of the two errors was smaller for it."""
    lines = [
        _line(["ID", "wild OOD", "left τ", "for", "better", "worse"]),
        _line(["---"] * 2 + ["---:", "---"] + ["---:"] * 2),
    ]
    for pair, own in _scored(rows).groupby(PAIR, sort=False):
        names, difference = [], []
        for _, one in own.groupby("seed", sort=False):
            auto, tau = _row("auto", one), _row("τ", one)
            names.append(auto.name)
            difference.append(auto["err_in"] + auto["err_out"] - tau["err_in"] - tau["err_out"])
        left = [name for name in names if name != TAU]
        counted = ", ".join(f"{name} {count}×" for name, count in pd.Series(left, dtype=str).value_counts().items())
        better, worse = int((np.array(difference) < 0).sum()), int((np.array(difference) > 0).sum())
        lines.append(_line([*pair, f"{len(left)} of {len(names)}", counted or "–", str(better), str(worse)]))
    return "What auto did\n\n" + "\n".join(lines)


def _scores(rows: pd.DataFrame) -> str:
    parts = []
    for pair, own in _scored(rows).groupby(PAIR, sort=False):
        columns = ["excess", "auroc", "err_in", "err_out"]
        lines = [_line(["score", "excess", "AUROC", "ERR_in", "ERR_out"]), _line(["---"] + ["---:"] * 4)]
        lines += [
            _line([str(name), *(_spread(one[column]) for column in columns)])
            for name, one in own.groupby("score", sort=False)
        ]
        by_seed = [one for _, one in own.groupby("seed", sort=False)]
        correlation = np.mean([one["excess"].corr(one["auroc"], method="spearman") for one in by_seed])
        note = f"Rank correlation of excess and AUROC over the scores, mean over seeds: {correlation:.2f}"
        parts.append(f"{pair[0]} / {pair[1]}\n\n" + "\n".join(lines) + f"\n\n{note}")
    return "\n\n".join(parts)


def _scored(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["score"] != TRUE_OUTLIERS]


def _spread(values: pd.Series) -> str:
    mean, std = 100 * values.mean(), 100 * values.std()
    return f"{mean:.1f}" if len(values) == 1 else f"{mean:.1f} ± {std:.1f}"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(report(*map(Path, sys.argv[1:])))
