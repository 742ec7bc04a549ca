"""Does `filter.score: auto` pick well? Every score separates, SAL is trained with its candidates, FPR95 is compared.

    python benchmarks/auto_score.py FOLDER [--real DATA_ROOT] [--seeds 5] [--group NAME ...] [--separation-only]

FOLDER gets one workspace for each ID set, and results.csv with one row for each score, OOD set and seed; what is
there already is not computed again. The tables of docs/auto-score.md are printed from it. Without --real only the
embedded data are used. DATA_ROOT is laid out as `data.root` is; of each of its sets a random part stands in. With
--separation-only no OOD classifier is trained, so there is no FPR95.
"""

from __future__ import annotations

import argparse
import csv
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from auto_score_tables import report
from PIL import Image

from salcli.artifacts import layout
from salcli.artifacts.candidates import Candidates, read_candidates, write_candidates
from salcli.artifacts.layout import Workspace
from salcli.artifacts.splits import read_wild_truth
from salcli.data.loading import load_source
from salcli.errors import ThresholdError
from salcli.params import Params, load_params
from salcli.presets.registry import preset
from salcli.project import create
from salcli.stages import evaluate, extract_grads, prepare, train_id, train_ood
from salcli.stages import filter as filter_stage

TRUE_OUTLIERS = "true outliers"
COLUMNS = [
    "id", "ood", "seed", "score", "id_accuracy", "excess", "excess_std", "wins_over_tau", "auroc", "err_in", "err_out",
    "chosen", "fpr95",
]  # fmt: skip
# An ID set keeps 1,280 of 4,000 images for training, 320 for calibration and 1,600 for the wild.
N_ID, N_OOD = 4000, 1000
SHORT = {
    "model.backbone": "small-cnn",
    "data.channels": 1,
    "train_id.epochs": 8,
    "train_id.batch_size": 64,
    "train_ood.epochs": 4,
    "train_ood.batch_size": 64,
}


@dataclass(frozen=True)
class Group:
    """An ID set with the OOD sets that hide in its wild data."""

    id: str
    ood: list[str]
    values: dict[str, Any] = field(default_factory=dict)
    is_real: bool = True


GROUPS = [
    Group("digits-0-7", ["digits-8-9", "photo-patches"], is_real=False),
    Group("mnist", ["fashion-mnist"], {**SHORT, "data.image_size": 10}),
    Group("fashion-mnist", ["mnist"], {**SHORT, "data.image_size": 10}),
    Group("cifar10", ["fashion-mnist"], {**SHORT, "data.image_size": 12}),
]


def main() -> None:
    """Run what is missing, then show the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--real", type=Path, help="where real data sets lie")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--separation-only", action="store_true", help="train no OOD classifier: minutes, no FPR95")
    parser.add_argument("--group", action="append", help="an ID set; repeat for several")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    results = chosen.folder / "results.csv"
    for group in GROUPS:
        if (group.is_real and chosen.real is None) or (chosen.group and group.id not in chosen.group):
            continue
        workspace, params = _workspace(chosen.folder / group.id, group, chosen.real)
        for seed in range(chosen.seeds):
            if (group.id, str(seed)) in _done(results):
                continue
            started = time.monotonic()
            _append(results, _one_seed(workspace, params, seed, trains=not chosen.separation_only))
            print(f"{group.id}, seed {seed}: {time.monotonic() - started:.0f} s", flush=True)
    print(report(results))


def _workspace(folder: Path, group: Group, real: Path | None) -> tuple[Workspace, Params]:
    """Made once, with every set decoded."""
    workspace = Workspace(folder)
    if not (folder / "params.yaml").exists():
        values = {"data.id": group.id, "data.ood": group.ood, "evaluate.methods": ["sal"], **group.values}
        create(folder, preset("default"), values, dvc=False, force=True)
        if real is not None and group.is_real:
            for name, n_images in ((group.id, N_ID), *((ood, N_OOD) for ood in group.ood)):
                _lay_part(name, n_images, real, folder / "data" / "raw")
        params, _ = load_params(folder / "params.yaml")
        for name in (group.id, *group.ood):
            prepare.prepare_set(workspace, params.data, name)
    return workspace, load_params(folder / "params.yaml")[0]


def _lay_part(name: str, n_images: int, real: Path, target: Path) -> None:
    """A random part of a set, in gray, as a file that stands in for the whole."""
    source = load_source(name, real)
    kept = np.sort(np.random.default_rng(0).choice(len(source), n_images, replace=False))
    pictures = source.pictures
    if isinstance(pictures, np.ndarray):
        images = pictures[kept, 0]
    else:
        images = np.stack([np.asarray(Image.open(pictures[place]).convert("L")) for place in kept])
    labels = {} if source.labels is None else {"labels": source.labels[kept]}
    target.mkdir(parents=True, exist_ok=True)
    np.savez(target / f"{name}.npz", images=images, class_names=np.array(source.class_names), **labels)


def _one_seed(workspace: Workspace, params: Params, seed: int, *, trains: bool) -> list[dict[str, Any]]:
    prepare.prepare_split(workspace, params.data, seed)
    accuracy = train_id.run(workspace, params, seed).test_accuracy
    extract_grads.run_id(workspace, params, seed)
    rows = []
    for ood in params.data.ood:
        prepare.prepare_wild(workspace, params.data, ood, seed)
        extract_grads.run_wild(workspace, params, ood, seed)
        common = {"id": params.data.id, "ood": ood, "seed": seed, "id_accuracy": accuracy}
        rows += [{**common, **row} for row in _every_score(workspace, params, ood, seed, trains=trains)]
    return rows


def _every_score(workspace: Workspace, params: Params, ood: str, seed: int, *, trains: bool) -> list[dict[str, Any]]:
    """What `auto` sees of each score, what it chose, and FPR95 of SAL trained with each score's candidates."""
    compared = filter_stage.run(workspace, _with_score(params, "auto"), ood, seed).comparison
    assert compared is not None
    trained: dict[bytes, float] = {}
    rows: list[dict[str, Any]] = []
    for trial in compared.trials:
        truth = compared.diagnosis[trial.score]
        row = {name: getattr(trial, name) for name in ("score", "excess", "excess_std", "wins_over_tau")}
        row |= {"auroc": truth.auroc, "err_in": truth.errors.err_in, "err_out": truth.errors.err_out}
        row |= {"chosen": int(trial.score == compared.chosen), "fpr95": np.nan}
        rows.append(row)
        if not trains:
            continue
        try:
            filter_stage.run(workspace, _with_score(params, trial.score), ood, seed)
        except ThresholdError:
            continue
        row["fpr95"] = _fpr95(workspace, params, ood, seed, trained)
    if not trains:
        return rows
    _take_true_outliers(workspace, ood, seed)
    rows.append({"score": TRUE_OUTLIERS, "fpr95": _fpr95(workspace, params, ood, seed, trained)})
    return rows


def _with_score(params: Params, score: str) -> Params:
    return params.model_copy(update={"filter": params.filter.model_copy(update={"score": score})})


def _fpr95(workspace: Workspace, params: Params, ood: str, seed: int, trained: dict[bytes, float]) -> float:
    """Of SAL with the candidates that are there; the same candidates need no second training."""
    key = _candidates(workspace, ood, seed).index.tobytes()
    if key not in trained:
        train_ood.run(workspace, params, ood, seed)
        trained[key] = evaluate.run(workspace, params, ood, seed).metrics["sal"].fpr95
    return trained[key]


def _candidates(workspace: Workspace, ood: str, seed: int) -> Candidates:
    return read_candidates(workspace.find(layout.candidates(ood, seed)))


def _take_true_outliers(workspace: Workspace, ood: str, seed: int) -> None:
    """What no score could do better."""
    found = _candidates(workspace, ood, seed)
    index = np.flatnonzero(read_wild_truth(workspace.find(layout.wild_truth(ood, seed))))
    taken = replace(found, index=index, score=found.wild_score[index], predicted=np.zeros_like(index))
    write_candidates(workspace.target(layout.candidates(ood, seed)), taken, {"seed": seed})


def _done(results: Path) -> set[tuple[str, str]]:
    if not results.exists():
        return set()
    with results.open(newline="") as file:
        return {(row["id"], row["seed"]) for row in csv.DictReader(file)}


def _append(results: Path, rows: list[dict[str, Any]]) -> None:
    is_new = not results.exists()
    with results.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
