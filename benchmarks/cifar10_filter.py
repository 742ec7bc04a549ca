"""How good is the filter on real CIFAR-10, when the classifier has not seen the ID half of the wild data?

    python benchmarks/cifar10_filter.py FOLDER --real DATA_ROOT [--epochs 1 5 15] [--seeds 3]

Two questions, for classifiers of growing accuracy (one project below FOLDER for each number of epochs). How do the
three calibrations of T compare: ERR_in, ERR_out and, for the best classifier, FPR95 of SAL after training? How does τ
compare with the other scores as a separator: AUROC on the wild data? DATA_ROOT has the layout of `data.root`, with
CIFAR-10, Fashion-MNIST and MNIST. What is there already is not computed again. The tables of docs/cifar10-filter.md are
printed from FOLDER/calibrations.csv and FOLDER/separators.csv.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from salcli.params.presets import preset
from salcli.params.schema import Params, load_params
from salcli.pipeline import evaluate, extract, prepare, train_id, train_ood
from salcli.pipeline import filter as filter_stage
from salcli.project.init import create
from salcli.store.layout import Experiment, Workspace, prepared_set

WILD = ("fashion-mnist", "mnist")
CALIBRATIONS = ("holdout", "train", "id-svd")
VALUES = {
    "data.ood": list(WILD),
    "model.backbone": "wrn-16-1",
    "model.drop_rate": 0.0,
    "train_ood.epochs": 1,
    "train_ood.lr": 0.01,
    "rivals": [],
    "encoders": [],
    "evaluate.methods": ["sal"],
}
Rows = Iterator[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--real", type=Path, required=True, help="the folder of the data sets")
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 5, 15], help="of the ID classifiers")
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args()
    calibrations, separators = chosen.folder / "calibrations.csv", chosen.folder / "separators.csv"
    for seed in range(chosen.seeds):
        for epochs in chosen.epochs:
            workspace, params = _project(chosen.folder / f"epochs-{epochs}", epochs, chosen.real.resolve())
            experiments = [Experiment(seed, ood, params.data.pi[0]) for ood in WILD]
            _before_the_filter(workspace, params, experiments)
            for experiment in experiments:
                key = {"epochs": epochs, "seed": seed, "ood": experiment.ood}
                trains = epochs == max(chosen.epochs) and experiment.ood == WILD[0]
                _add_missing(separators, key, _aurocs(workspace, params, experiment))
                _add_missing(calibrations, key, _calibrated(workspace, params, experiment, trains=trains))
            print(f"seed {seed}, {epochs} epochs: done", flush=True)
    print(_table(pd.read_csv(calibrations), "calibration", ["err_in", "err_out", "fpr95"]))
    print(_table(pd.read_csv(separators), "score", ["auroc"]))


def _project(folder: Path, epochs: int, real: Path) -> tuple[Workspace, Params]:
    if not (folder / "params.yaml").exists():
        values = {**VALUES, "data.root": str(real), "train_id.epochs": epochs}
        create(folder, preset("cifar10"), values, dvc=False, force=True)
    return Workspace(folder), load_params(folder / "params.yaml")[0]


def _before_the_filter(workspace: Workspace, params: Params, experiments: list[Experiment]) -> None:
    """Every stage before the filter, unless its file is there already."""
    first = experiments[0]
    for name in (params.data.id, *params.data.ood):
        if not workspace.has(prepared_set(name)):
            prepare.prepare_set(workspace, params, name)
    if not workspace.has(first.split):
        prepare.prepare_split(workspace, params.data, first)
    if not workspace.has(first.classifier):
        train_id.run(workspace, params, first)
    if not workspace.has(first.id_representation("test")):  # the last of the three
        extract.run_id(workspace, params, first)
    for experiment in experiments:
        if not workspace.has(experiment.truth):
            prepare.prepare_wild(workspace, params.data, experiment)
        if not workspace.has(experiment.test_representation()):
            extract.run_wild(workspace, params, experiment)


def _aurocs(workspace: Workspace, params: Params, experiment: Experiment) -> Rows:
    """Of every score that `auto` compares: all but ODIN, which would take as long as everything else together."""
    found = filter_stage.run(workspace, _with_filter(params, score="auto"), experiment)
    for trial in found.trials:
        yield {"accuracy": 100 * found.fit.calibration_accuracy, "score": trial.score, "auroc": 100 * trial.auroc}


def _calibrated(workspace: Workspace, params: Params, experiment: Experiment, *, trains: bool) -> Rows:
    for calibration in CALIBRATIONS:
        changed = _with_filter(params, calibration=calibration)
        found = filter_stage.run(workspace, changed, experiment)
        assert found.errors is not None
        fpr95 = float("nan")
        if trains:
            train_ood.run(workspace, changed, experiment)
            metrics = evaluate.run(workspace, changed, experiment).metrics["sal"]
            assert metrics is not None
            fpr95 = metrics.fpr95
        yield {
            "accuracy": 100 * found.fit.calibration_accuracy,
            "calibration": calibration,
            "err_in": 100 * found.errors.err_in,
            "err_out": 100 * found.errors.err_out,
            "fpr95": 100 * fpr95,
        }


def _with_filter(params: Params, **values: str) -> Params:
    return params.model_copy(update={"filter": params.filter.model_copy(update=values)})


def _add_missing(path: Path, key: dict[str, Any], rows: Rows) -> None:
    """Append the rows of one experiment to a CSV file, unless it has them: then they are not computed."""
    if path.exists():
        done = pd.read_csv(path)
        if (done[list(key)] == pd.Series(key)).all(axis=1).any():
            return
    added = pd.DataFrame([{**key, **row} for row in rows])
    added.to_csv(path, mode="a", header=not path.exists(), index=False)


def _table(runs: pd.DataFrame, column: str, metrics: list[str]) -> str:
    """Mean ± std over seeds, for each OOD set and number of epochs."""
    grouped = runs.groupby(["ood", "epochs", column], sort=False)[["accuracy", *metrics]]
    mean, std = grouped.mean(), grouped.std()
    text = mean.map("{:.1f}".format) + " ± " + std.map("{:.1f}".format)
    return text.replace("nan ± nan", "–").to_string()


if __name__ == "__main__":
    main()
