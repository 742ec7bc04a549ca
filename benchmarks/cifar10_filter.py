"""How does the filter do on real CIFAR-10, when the classifier has not seen the wild ID half?

    python benchmarks/cifar10_filter.py FOLDER --real DATA_ROOT [--epochs 1 5 15] [--seeds 3]

Two questions, for classifiers of growing accuracy (one workspace below FOLDER for each number of epochs). How do the
three calibrations of T compare: ERR_in, ERR_out and, for the best classifier, FPR95 of SAL after training? How does τ
compare with the other scores as a separator: AUROC on the wild data? DATA_ROOT is laid out as `data.root` is, with
CIFAR-10, Fashion-MNIST and MNIST. What is there already is not computed again. The tables of docs/cifar10-filter.md are
printed from FOLDER/calibrations.csv and FOLDER/separators.csv.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import pandas as pd
from sklearn.metrics import roc_auc_score

from salcli.artifacts import layout
from salcli.artifacts.layout import Workspace
from salcli.artifacts.splits import read_wild_truth
from salcli.params import Params, load_params
from salcli.presets.registry import preset
from salcli.progress import Silent
from salcli.project import create
from salcli.stages import evaluate, extract_grads, prepare, train_id, train_ood
from salcli.stages import filter as filter_stage
from salcli.stages.separators import SEPARATORS, Gradients, Separators

WILD = ("fashion-mnist", "mnist")
CALIBRATIONS = ("holdout", "train", "id-svd")
SCORES = tuple(score for score in SEPARATORS if score != "odin")  # which would take as long as all else together
VALUES = {
    "data.ood": list(WILD),
    "model.backbone": "wrn-16-1",
    "model.drop_rate": 0.0,
    "train_ood.epochs": 1,
    "train_ood.lr": 0.01,
    "rivals": [],
    "evaluate.methods": ["sal"],
}


def main() -> None:
    """Run what is missing, then show the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--real", type=Path, required=True, help="where the data sets lie")
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 5, 15], help="of the ID classifiers")
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args()
    calibrations, separators = chosen.folder / "calibrations.csv", chosen.folder / "separators.csv"
    for seed in range(chosen.seeds):
        for epochs in chosen.epochs:
            workspace, params = _workspace(chosen.folder / f"epochs-{epochs}", epochs, chosen.real.resolve())
            accuracy = _train(workspace, params, seed)
            common = {"epochs": epochs, "seed": seed, "accuracy": 100 * accuracy}
            for ood in WILD:
                if _missing(separators, epochs, seed, ood):
                    _append(
                        separators, [{**common, "ood": ood, **row} for row in _aurocs(workspace, params, ood, seed)]
                    )
                if _missing(calibrations, epochs, seed, ood):
                    trains = epochs == max(chosen.epochs) and ood == WILD[0]
                    rows = [_calibrated(workspace, params, ood, seed, kind, trains=trains) for kind in CALIBRATIONS]
                    _append(calibrations, [{**common, "ood": ood, **row} for row in rows])
            print(f"seed {seed}, {epochs} epochs: done", flush=True)
    for path, column, figures in (
        (calibrations, "calibration", ["err_in", "err_out", "fpr95"]),
        (separators, "score", ["auroc"]),
    ):
        print(_table(pd.read_csv(path), column, figures))


def _workspace(folder: Path, epochs: int, real: Path) -> tuple[Workspace, Params]:
    if not (folder / "params.yaml").exists():
        values = {**VALUES, "data.root": str(real), "train_id.epochs": epochs}
        create(folder, preset("cifar10"), values, dvc=False, force=True)
    return Workspace(folder), load_params(folder / "params.yaml")[0]


def _train(workspace: Workspace, params: Params, seed: int) -> float:
    """Everything before the filter; the accuracy on calibration data, which the classifier has not seen."""
    for name in (params.data.id, *params.data.ood):
        if not workspace.has(layout.prepared_set(name)):
            prepare.prepare_set(workspace, params.data, name)
    if not workspace.has(layout.id_split(seed)):
        prepare.prepare_split(workspace, params.data, seed)
    if not workspace.has(layout.classifier(seed)):
        train_id.run(workspace, params, seed)
    if not workspace.has(layout.id_gradients("calibration", seed)):
        extract_grads.run_id(workspace, params, seed)
    for ood in params.data.ood:
        if not workspace.has(layout.wild_mixture(ood, seed)):
            prepare.prepare_wild(workspace, params.data, ood, seed)
        if not workspace.has(layout.wild_gradients(ood, seed)):
            extract_grads.run_wild(workspace, params, ood, seed)
    calibration = Gradients.open(workspace, WILD[0], seed).calibration
    return float((calibration.predicted == calibration.label).double().mean())


def _aurocs(workspace: Workspace, params: Params, ood: str, seed: int) -> list[dict[str, Any]]:
    separators = Separators(workspace, params, ood, seed, Gradients.open(workspace, ood, seed), Silent())
    is_ood = read_wild_truth(workspace.find(layout.wild_truth(ood, seed)))
    return [{"score": name, "auroc": 100 * roc_auc_score(is_ood, separators.scores(name)[0])} for name in SCORES]


def _calibrated(
    workspace: Workspace, params: Params, ood: str, seed: int, calibration: str, *, trains: bool
) -> dict[str, Any]:
    params = params.model_copy(update={"filter": params.filter.model_copy(update={"calibration": calibration})})
    errors = filter_stage.run(workspace, params, ood, seed).errors
    assert errors is not None
    row = {"calibration": calibration, "err_in": 100 * errors.err_in, "err_out": 100 * errors.err_out, "fpr95": ""}
    if trains:
        train_ood.run(workspace, params, ood, seed)
        row["fpr95"] = 100 * evaluate.run(workspace, params, ood, seed).metrics["sal"].fpr95
    return row


def _missing(path: Path, epochs: int, seed: int, ood: str) -> bool:
    if not path.exists():
        return True
    done = pd.read_csv(path)
    return done[(done["epochs"] == epochs) & (done["seed"] == seed) & (done["ood"] == ood)].empty


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def _table(runs: pd.DataFrame, column: str, figures: list[str]) -> str:
    """Mean ± std over seeds, for each OOD set and number of epochs."""
    grouped = runs.groupby(["ood", "epochs", column], sort=False)[["accuracy", *figures]]
    mean, std = grouped.mean(), grouped.std()
    text = mean.map("{:.1f}".format) + " ± " + std.map("{:.1f}".format)
    return text.replace("nan ± nan", "–").to_string()


if __name__ == "__main__":
    main()
