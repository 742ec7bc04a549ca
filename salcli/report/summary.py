"""summary: means over seeds and OOD sets, which `dvc metrics`, `dvc exp show` and `dvc plots` show first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from salcli.params.reading import read_yaml
from salcli.report.results import METRICS, Results, asked_for
from salcli.store.files import write_json, write_text
from salcli.store.layout import METHODS_PLOT, ROC_PLOT, RUNS, SUMMARY, Workspace

if TYPE_CHECKING:  # slow to load
    import pandas as pd

SHOWN, ESTIMATED = ("fpr95", "auroc", "id_accuracy"), ("fpr95", "auroc")


def run(params_file: Path) -> None:
    """Write summary.json, and the methods' FPR95 and ROC curves in one file each."""
    import pandas as pd

    workspace, params = Workspace(params_file.parent), read_yaml(params_file)
    results = Results.from_folder(workspace.root / RUNS, asked_for(params))
    summaries: dict[str, dict[str, Any]] = {}
    bars, curves = [], []
    for part in results.by_pi():
        (pi,) = part.shares
        summaries[f"pi-{pi}"] = summary(part, params["detector"]["method"], params["variants"][0])
        suffix = f", π {pi}" if len(results.shares) > 1 else ""
        labels = {name: label + suffix for name, label in zip(part.runs["method"], part.runs["label"], strict=True)}
        bars.append(_means(part.runs).dropna(subset="fpr95").rename(labels)[list(ESTIMATED)].reset_index())
        files = [path.with_name("roc.csv") for place, path in results.files.items() if place.pi == pi]
        curve = pd.concat(map(pd.read_csv, files)).groupby(["method", "fpr"], sort=False)["tpr"].mean()
        curves.append(curve.rename(labels, level="method").reset_index())
    write_json(workspace.target(SUMMARY), summaries if len(summaries) > 1 else summaries.popitem()[1])
    for artifact, frames in ((METHODS_PLOT, bars), (ROC_PLOT, curves)):
        write_text(workspace.target(artifact), pd.concat(frames).to_csv(index=False, float_format="%.6g"))


def summary(results: Results, detector: str, first_variant: str) -> dict[str, Any]:
    """The detector's metrics and the method with the lowest FPR95, as shares; of one π. What is unknown is left out.

    Where nothing is measured, its estimates; the method that auto chooses may differ from seed to seed.
    """
    runs, is_auto = results.runs, detector == "auto"
    chosen = {(place.seed, place.ood): own["chosen"] for place, own in results.estimates.items()}
    places = zip(runs["seed"], runs["ood"], strict=True)
    is_own = runs["method"] == [chosen.get(one, first_variant) if is_auto else detector for one in places]
    own = _means(runs[is_own].assign(method=detector)).mean()
    found: dict[str, Any] = {"detector": detector, **(own[list(SHOWN)] / 100)}
    estimates = [one["methods"].get(one["chosen"] if is_auto else detector) for one in results.estimates.values()]
    if results.unknown_sets != results.ood_sets:
        fpr95 = _means(runs)["fpr95"]
        found |= {"best": fpr95.idxmin(), "best_fpr95": fpr95.min() / 100}
    elif estimates and all(estimates):
        found |= {f"estimated_{name}": np.mean([one[name][0] for one in estimates]) / 100 for name in ESTIMATED}
    numbers = {name: round(float(value), 6) for name, value in found.items() if not isinstance(value, str)}
    return {name: value for name, value in (found | numbers).items() if value == value}


def _means(runs: pd.DataFrame) -> pd.DataFrame:
    """Of each method: over the OOD sets of a seed first, then over seeds, as in the average of the table."""
    by_seed = runs.groupby(["method", "seed"], sort=False)[list(METRICS)].mean()
    return by_seed.groupby("method", sort=False).mean().astype(float)
