"""What the stored test scores add to the results: FPR95 with OOD as positive, intervals, and which methods are better.

Intervals come from resamples of the test samples. Methods, seeds and sets with the same number of samples share them:
so differences are paired where the samples are the same, and where they are not, it makes no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from salcli.conformal.resampling import resample_counts, resampled, widest_deviation
from salcli.errors import MissingArtifactError
from salcli.progress import Progress, Silent
from salcli.report.results import DRAWS, ID_POSITIVE, LEAST, OOD_POSITIVE, PROTOCOL, EvaluationKey, Results, mean_draws
from salcli.sal.metrics import fpr_at_tpr
from salcli.store.files import Found, read_arrays
from salcli.store.layout import SAL, SAL_PLUS, TEST_SCORES

if TYPE_CHECKING:
    import pandas as pd

LEVEL = 0.95
BETTER = "is significantly better than"
SMALL = 4_000_000  # bytes of scores: about a second
N_RESAMPLES = 500


def has_scores(results: Results) -> bool:
    """Whether the scores of every evaluation are here; a clone may have the metrics alone."""
    return all(_scores_file(path).exists() for path in results.files.values())


def _scores_file(metrics: Path) -> Path:
    return metrics.with_name("scores.h5")


def with_scores(results: Results, progress: Progress, convention: str = ID_POSITIVE) -> Results:
    """With FPR95 by a convention, resamples of FPR95 and AUROC in the runs, and verdicts."""
    runs = results.runs.assign(**dict.fromkeys(DRAWS.values()), **{LEAST: np.nan})
    files = [_scores_file(path) for path in results.files.values()]
    if sum(file.stat().st_size for file in files if file.exists()) < SMALL:
        progress = Silent()  # a bar that comes and goes would only disturb the table
    evaluations = list(results.runs.groupby(list(EvaluationKey._fields), sort=False))
    with progress.task("intervals over test samples", len(evaluations), "evaluations") as task:
        for values, own in evaluations:
            key = EvaluationKey(*values)  # type: ignore[arg-type]
            if own["fpr95"].notna().any():
                _add(runs, own, Found(_scores_file(results.files[key]), key.made_by), convention)
            task.advance(1)
    done = replace(results, runs=runs, convention=convention)
    return replace(done, verdicts={part.shares[0]: verdict(part) for part in done.by_pi()})


def _add(runs: pd.DataFrame, own: pd.DataFrame, found: Found, convention: str) -> None:
    """The resamples of one evaluation."""
    if not found.path.exists():
        raise MissingArtifactError(f"{found.path} does not exist; get it with dvc pull, or {found.fix}")
    arrays = read_arrays(found, TEST_SCORES)
    try:
        ids, oods = (np.stack([arrays[f"{method}/{side}"] for method in own["method"]]) for side in ("id", "ood"))
    except (LookupError, ValueError) as error:
        raise found.damaged(error) from None
    n, m = ids.shape[1], oods.shape[1]
    counts = _counts(n, "id"), _counts(m, "ood")
    if convention == OOD_POSITIVE:
        ids, oods, counts = -oods, -ids, counts[::-1]
        runs.loc[own.index, "fpr95"] = [100 * fpr_at_tpr(*pair) for pair in zip(ids, oods, strict=True)]
    auroc, fpr = resampled(ids, oods, *counts)
    for metric, draws in {"fpr95": fpr[:, :, 0], "auroc": auroc}.items():
        for row, column in zip(own.index, 100 * draws.T, strict=True):
            runs.at[row, DRAWS[metric]] = column
    runs.loc[own.index, LEAST] = 100 * 3 / min(n, m)


@lru_cache(maxsize=8)
def _counts(n: int, side: str) -> np.ndarray:
    return resample_counts(n, N_RESAMPLES, np.random.default_rng([n, side == "id"]))


# --- the sentence under a table


def verdict(part: Results) -> str:
    """Of one π: where a method is significantly better than SAL+, and where SAL+ is than all others.

    Without a row of SAL+, of the first variant of SAL.
    """
    labels = dict(zip(part.runs["method"], part.runs["label"], strict=True))
    first = next(iter(part.runs["method"][part.runs[PROTOCOL] != ""]), SAL)
    subject = SAL_PLUS if SAL_PLUS in labels else first
    sal = labels.get(subject, SAL)
    beaten: dict[str, list[str]] = {}  # sections by the method that is best there
    best: list[str] = []
    unsure: list[str] = []
    n_worse = ""
    for section, runs in part.sections():
        signs = _against(subject, runs)
        winner = next((labels[method] for method, sign in signs.items() if sign < 0), None)
        if winner:
            beaten.setdefault(winner, []).append(section)
        elif signs:
            (best if all(sign > 0 for sign in signs.values()) else unsure).append(section)
            if any(signs.values()):
                n_worse = f", which {BETTER} {sum(signs.values())} of {len(signs)} ({section})"
    parts = [f"{label} {BETTER} {sal} on {_listed(sections)}" for label, sections in beaten.items()]
    parts += [f"{sal} {BETTER} every other method on {_listed(best)}"] if best else []
    if unsure:
        parts.append(f"no method {BETTER} {sal}" + (f" on {_listed(unsure)}" if parts else n_worse))
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _against(subject: str, runs: pd.DataFrame) -> dict[str, int]:
    """By method, best first: −1 if its FPR95 is significantly lower than the subject's, 1 if higher, else 0.

    All differences are within the interval at once with a chance of 95%: of many methods, the best would else look
    better than it is.
    """
    runs = runs[runs["fpr95"].notna()]
    n_runs = runs["method"].value_counts()
    comparable = [method for method in n_runs.index if n_runs[method] == n_runs.get(subject) and method != subject]
    if not comparable:
        return {}
    by_seed = runs.groupby(["method", "seed"])["fpr95"].mean().unstack()
    difference = by_seed.loc[comparable] - by_seed.loc[subject]
    draws = {method: mean_draws(own, "fpr95") for method, own in runs.groupby("method")}
    noise = np.array([draws[method] - draws[subject] for method in comparable])
    error = noise.std(axis=1)
    least = widest_deviation(noise, np.where(error > 0, error, np.inf), LEVEL) * error
    least = np.maximum(least, runs[LEAST].mean())
    mean = difference.mean(axis=1)
    is_lower = (mean < -least) & (difference < 0).all(axis=1)
    is_higher = (mean > least) & (difference > 0).all(axis=1)
    return {str(method): int(is_higher[method]) - int(is_lower[method]) for method in mean.sort_values().index}


def _listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
