"""summary: means over seeds and OOD sets, which `dvc metrics`, `dvc exp show` and `dvc plots` show first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from salcli.params.reading import read_yaml
from salcli.report.last_word import last_word
from salcli.report.results import ESTIMATED, Results, asked_for, method_means
from salcli.store.files import Found, read_header, write_json, write_text
from salcli.store.layout import METHODS_PLOT, ROC_PLOT, RUNS, SUMMARY, Workspace

SHOWN = ("fpr95", "auroc", "id_accuracy")


def run(params_file: Path) -> list[str]:
    """Write summary.json, and the methods' FPR95 and ROC curves in one file each. Returns the last word."""
    import pandas as pd

    workspace, params = Workspace(params_file.parent), read_yaml(params_file)
    results = Results.from_folder(workspace.root / RUNS, asked_for(params))
    summaries: dict[str, dict[str, Any]] = {}
    bars, curves = [], []
    for part in results.by_pi():
        (pi,) = part.shares
        keys = [key for key in results.files if key.pi == pi]
        detectors = {(one.seed, one.ood): _row(workspace.find(one.experiment.detector)) for one in keys}
        summaries[f"pi-{pi}"] = summary(part, detectors)
        suffix = f", π {pi}" if len(results.shares) > 1 else ""
        labels = {name: label + suffix for name, label in zip(part.runs["method"], part.runs["label"], strict=True)}
        bars.append(method_means(part.runs).dropna(subset="fpr95").rename(labels)[list(ESTIMATED)].reset_index())
        files = [results.files[key].with_name("roc.csv") for key in keys]
        curve = pd.concat(map(pd.read_csv, files)).groupby(["method", "fpr"], sort=False)["tpr"].mean()
        curves.append(curve.rename(labels, level="method").reset_index())
    write_json(workspace.target(SUMMARY), summaries if len(summaries) > 1 else summaries.popitem()[1])
    for artifact, frames in ((METHODS_PLOT, bars), (ROC_PLOT, curves)):
        write_text(workspace.target(artifact), pd.concat(frames).to_csv(index=False, float_format="%.6g"))
    return last_word(workspace, params, results.labels)


def _row(detector: Found) -> str:
    """The method of a detector's file: where `detector.method` is auto, the chosen one."""
    return str(read_header(detector).about["method"]["row"])


def summary(results: Results, detectors: Mapping[tuple[int, str], str]) -> dict[str, Any]:
    """The detectors' metrics and the method with the lowest FPR95, as shares; of one π. What is unknown is left out.

    Where nothing is measured, their estimates. `detectors`: the method of each seed and wild set, for auto may choose
    another one for each.
    """
    runs = results.runs
    is_own = runs["method"] == [detectors[place] for place in zip(runs["seed"], runs["ood"], strict=True)]
    own = method_means(runs[is_own].assign(method="")).mean()
    found: dict[str, Any] = {"detector": ", ".join(dict.fromkeys(detectors.values())), **(own[list(SHOWN)] / 100)}
    estimates = [one["methods"].get(detectors[place.seed, place.ood]) for place, one in results.estimates.items()]
    if results.is_measured:
        fpr95 = method_means(runs)["fpr95"]
        found |= {"best": fpr95.idxmin(), "best_fpr95": fpr95.min() / 100}
    elif estimates and all(estimates):
        found |= {f"estimated_{name}": np.mean([one[name][0] for one in estimates]) / 100 for name in ESTIMATED}
    numbers = {name: round(float(value), 6) for name, value in found.items() if not isinstance(value, str)}
    return {name: value for name, value in (found | numbers).items() if value == value}
