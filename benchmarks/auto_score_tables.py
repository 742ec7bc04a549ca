"""The tables of docs/auto-score.md, from the rows that auto_score.py wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from pathlib import Path

EXPERIMENT = ["id", "ood", "seed"]
PAIR = ["id", "ood"]
TAU, TRUE_OUTLIERS = "sal", "true outliers"
RULES = ["τ", "auto", "largest excess", "best score in hindsight", TRUE_OUTLIERS]


def report(results: Path) -> str:
    """FPR95 of every rule; what `auto` did; every score as separator."""
    rows = pd.read_csv(results)
    return "\n\n".join([_rules(rows), _choices(rows), _scores(rows)])


def fpr95_by_rule(rows: pd.DataFrame) -> pd.DataFrame:
    """For each pair and seed, FPR95 of SAL with the candidates that each rule takes."""
    found = []
    for experiment, own in rows.groupby(EXPERIMENT, sort=False):
        scores = own[own["score"] != TRUE_OUTLIERS].set_index("score")
        usable = scores[scores["fpr95"].notna()]
        figures = {
            "τ": scores["fpr95"][TAU],
            "auto": scores["fpr95"][scores["chosen"].idxmax()],
            "largest excess": scores["fpr95"][usable["excess"].idxmax()],
            "best score in hindsight": usable["fpr95"].min(),
            TRUE_OUTLIERS: own.set_index("score")["fpr95"][TRUE_OUTLIERS],
        }
        found.append({**dict(zip(EXPERIMENT, experiment, strict=True)), **figures})
    return pd.DataFrame(found)


def _rules(rows: pd.DataFrame) -> str:
    figures = fpr95_by_rule(rows)
    lines = [_line(["ID", "wild OOD", "ID acc.", *RULES]), _line(["---"] * 2 + ["---:"] * (1 + len(RULES)))]
    for pair, own in figures.groupby(PAIR, sort=False):
        accuracy = rows[(rows["id"] == pair[0]) & (rows["ood"] == pair[1])].groupby("seed")["id_accuracy"].first()
        lines.append(_line([*pair, f"{accuracy.mean():.1%}", *(_spread(own[rule]) for rule in RULES)]))
    return "SAL's FPR95 in %, mean ± std over seeds\n\n" + "\n".join(lines)


def _choices(rows: pd.DataFrame) -> str:
    """How often `auto` left τ, for what, and whether that was better."""
    figures = fpr95_by_rule(rows).set_index(EXPERIMENT)
    lines = [
        _line(["ID", "wild OOD", "left τ", "for", "better", "worse"]),
        _line(["---", "---", "---:", "---", "---:", "---:"]),
    ]
    for pair, own in rows[rows["chosen"] == 1].groupby(PAIR, sort=False):
        left = own[own["score"] != TAU]
        difference = np.array(
            [figures.loc[tuple(row)]["auto"] - figures.loc[tuple(row)]["τ"] for row in left[EXPERIMENT].to_numpy()]
        )
        names = ", ".join(f"{name} {count}×" for name, count in left["score"].value_counts().items()) or "–"
        counts = f"{len(left)} of {len(own)}", names, int((difference < 0).sum()), int((difference > 0).sum())
        lines.append(_line([*pair, *map(str, counts)]))
    return "What auto did\n\n" + "\n".join(lines)


def _scores(rows: pd.DataFrame) -> str:
    """Excess against what it stands for."""
    parts = []
    for pair, own in rows[rows["score"] != TRUE_OUTLIERS].groupby(PAIR, sort=False):
        columns = ["excess", "auroc", "err_in", "err_out", "fpr95"]
        lines = [_line(["score", "excess", "AUROC", "ERR_in", "ERR_out", "FPR95"]), _line(["---"] + ["---:"] * 5)]
        lines += [
            _line([str(name), *(_spread(one[column]) for column in columns)])
            for name, one in own.groupby("score", sort=False)
        ]
        correlation = [
            one["excess"].corr(one["fpr95"], method="spearman") for _, one in own.groupby("seed", sort=False)
        ]
        note = f"Rank correlation of excess with FPR95 over the scores: {np.nanmean(correlation):.2f} (mean over seeds)"
        parts.append(f"{pair[0]} / {pair[1]}\n\n" + "\n".join(lines) + f"\n\n{note}")
    return "\n\n".join(parts)


def _spread(values: pd.Series) -> str:
    return f"{100 * values.mean():.1f} ± {100 * values.std():.1f}"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
