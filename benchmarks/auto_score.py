"""Does `filter.score: auto` choose well? Separates with every score, trains SAL with its candidates, compares FPR95.

    python benchmarks/auto_score.py FOLDER [--real DATA_ROOT] [--seeds 5] [--group NAME ...] [--separation-only]

FOLDER gets one project for each ID set, and results.csv with one row for each score, OOD set and seed; what is there
already is not computed again. Then the tables of docs/auto-score.md are printed. Without --real only the embedded data
are used. DATA_ROOT has the layout of `data.root`; a random part of each of its sets is used. With --separation-only no
OOD classifier is trained, so there is no FPR95.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from salcli.data.catalogue import load_source
from salcli.errors import ThresholdError
from salcli.params.presets import preset
from salcli.params.schema import Params, load_params
from salcli.pipeline import evaluate, extract, prepare, train_id, train_ood
from salcli.pipeline import filter as filter_stage
from salcli.pipeline.inputs import known_truth
from salcli.project.init import create
from salcli.store.formats import Candidates, read_candidates, write_candidates
from salcli.store.layout import Experiment, Workspace

TAU, TRUE_OUTLIERS = "sal", "true outliers"
OF_TRIAL = ["score", "excess", "excess_std", "beaten", "auroc", "err_in", "err_out"]
COLUMNS = ["id", "ood", "seed", "id_accuracy", *OF_TRIAL, "chosen", "fpr95"]
# An ID set keeps 1,280 of 4,000 images for training, 320 for calibration and 1,600 for the wild data.
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
    """An ID set and the OOD sets that are mixed into its wild data."""

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--real", type=Path, help="the folder of the real data sets")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--separation-only", action="store_true", help="train no OOD classifier: minutes, no FPR95")
    parser.add_argument("--group", action="append", help="an ID set; repeat for several")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    results = chosen.folder / "results.csv"
    for group in GROUPS:
        if (group.is_real and chosen.real is None) or (chosen.group and group.id not in chosen.group):
            continue
        workspace, params = _project(chosen.folder / group.id, group, chosen.real)
        for seed in range(chosen.seeds):
            done = pd.read_csv(results) if results.exists() else pd.DataFrame(columns=COLUMNS)
            if ((done["id"] == group.id) & (done["seed"] == seed)).any():
                continue
            started = time.monotonic()
            rows = pd.DataFrame(_one_seed(workspace, params, seed, trains=not chosen.separation_only), columns=COLUMNS)
            rows.to_csv(results, mode="a", header=not results.exists(), index=False)
            print(f"{group.id}, seed {seed}: {time.monotonic() - started:.0f} s", flush=True)
    print(report(pd.read_csv(results)))


# -- the experiment


def _project(folder: Path, group: Group, real: Path | None) -> tuple[Workspace, Params]:
    """Created once, with every set prepared."""
    workspace = Workspace(folder)
    if not (folder / "params.yaml").exists():
        values = {"data.id": group.id, "data.ood": group.ood, "evaluate.methods": [TAU], **group.values}
        create(folder, preset("default"), values, dvc=False, force=True)
        if real is not None and group.is_real:
            for name, n_images in ((group.id, N_ID), *((ood, N_OOD) for ood in group.ood)):
                _write_part(name, n_images, real, folder / "data" / "raw")
        params, _ = load_params(folder / "params.yaml")
        for name in (group.id, *group.ood):
            prepare.prepare_set(workspace, params, name)
    return workspace, load_params(folder / "params.yaml")[0]


def _write_part(name: str, n_images: int, real: Path, target: Path) -> None:
    """A random part of a set, in gray, as a file that salcli uses in place of the whole set."""
    source = load_source(name, real)
    part = source.take(np.sort(np.random.default_rng(0).choice(len(source), n_images, replace=False)))
    if part.array is not None:
        images = part.array[:, 0]
    else:
        images = np.stack([np.asarray(Image.open(file).convert("L")) for file in part.files])
    labels = {} if part.labels is None else {"labels": part.labels}
    target.mkdir(parents=True, exist_ok=True)
    np.savez(target / f"{name}.npz", images=images, class_names=np.array(part.class_names), **labels)


def _one_seed(workspace: Workspace, params: Params, seed: int, *, trains: bool) -> list[dict[str, Any]]:
    experiments = [Experiment(seed, ood, params.data.pi[0]) for ood in params.data.ood]
    prepare.prepare_split(workspace, params.data, experiments[0])
    accuracy = train_id.run(workspace, params, experiments[0]).test_accuracy
    extract.run_id(workspace, params, experiments[0])
    rows = []
    for experiment in experiments:
        prepare.prepare_wild(workspace, params.data, experiment)
        extract.run_wild(workspace, params, experiment)
        common = {"id": params.data.id, "ood": experiment.ood, "seed": seed, "id_accuracy": accuracy}
        rows += [{**common, **row} for row in _every_score(workspace, params, experiment, trains=trains)]
    return rows


def _every_score(
    workspace: Workspace, params: Params, experiment: Experiment, *, trains: bool
) -> Iterator[dict[str, Any]]:
    """What `auto` sees of each score, what it chose, and FPR95 of SAL trained with each score's candidates."""
    compared = filter_stage.run(workspace, _with_score(params, "auto"), experiment)
    trained: dict[bytes, float] = {}
    for trial in compared.trials:
        assert trial.errors is not None
        known = {**vars(trial), **vars(trial.errors)}
        yield {
            **{column: known[column] for column in OF_TRIAL},
            "chosen": int(trial.score == compared.candidates.score_name),
            "fpr95": _fpr95_with(trial.score, workspace, params, experiment, trained) if trains else np.nan,
        }
    if trains:
        _take_true_outliers(workspace, experiment)
        yield {"score": TRUE_OUTLIERS, "fpr95": _fpr95(workspace, params, experiment, trained)}


def _fpr95_with(
    score: str, workspace: Workspace, params: Params, experiment: Experiment, trained: dict[bytes, float]
) -> float:
    try:
        filter_stage.run(workspace, _with_score(params, score), experiment)
    except ThresholdError:
        return np.nan
    return _fpr95(workspace, params, experiment, trained)


def _fpr95(workspace: Workspace, params: Params, experiment: Experiment, trained: dict[bytes, float]) -> float:
    """Of SAL with the candidates on disk; the same candidates are not trained with again."""
    key = _candidates(workspace, experiment).index.tobytes()
    if key not in trained:
        train_ood.run(workspace, params, experiment)
        metrics = evaluate.run(workspace, params, experiment).metrics[TAU]
        assert metrics is not None
        trained[key] = metrics.fpr95
    return trained[key]


def _with_score(params: Params, score: str) -> Params:
    return params.model_copy(update={"filter": params.filter.model_copy(update={"score": score})})


def _candidates(workspace: Workspace, experiment: Experiment) -> Candidates:
    return read_candidates(workspace.find(experiment.candidates))


def _take_true_outliers(workspace: Workspace, experiment: Experiment) -> None:
    """The limit of every score."""
    found = _candidates(workspace, experiment)
    is_ood = known_truth(workspace, len(found.wild_score), experiment)
    assert is_ood is not None
    taken = replace(found, index=np.flatnonzero(is_ood.numpy()))
    write_candidates(workspace.target(experiment.candidates), taken, workspace.about(experiment.candidates))


# -- the tables

EXPERIMENT, PAIR = ["id", "ood", "seed"], ["id", "ood"]
RULES = ["τ", "auto", "largest excess", "best in hindsight"]
TEXT = {"ID", "wild OOD", "score", "for"}  # columns without numbers


def report(rows: pd.DataFrame) -> str:
    """Results of each rule's choice, what `auto` did, and every score as a separator."""
    scored = rows[rows["score"] != TRUE_OUTLIERS]
    parts = [_separation(scored), _choices(scored), _scores(scored)]
    is_trained = rows.groupby(EXPERIMENT)["fpr95"].transform("count") > 0
    if is_trained.any():
        parts.insert(0, _fpr95_table(rows[is_trained]))
    return "\n\n".join(parts)


def _chosen_by(rule: str, scores: pd.DataFrame, hindsight: pd.Series) -> str:
    """The score that a rule separates with, in one experiment; hindsight is lower for better scores."""
    match rule:
        case "τ":
            return TAU
        case "auto":
            return str(scores["chosen"].idxmax())
        case "largest excess":
            return str(scores["excess"].idxmax())
        case _:
            return str(hindsight.idxmin())


def _row(rule: str, one: pd.DataFrame) -> pd.Series:
    """The row of the score that a rule separates with; in hindsight, the smallest sum of the two errors is best."""
    scores = one.set_index("score")
    return scores.loc[_chosen_by(rule, scores, scores["err_in"] + scores["err_out"])]


def _fpr95_table(rows: pd.DataFrame) -> str:
    found = []
    for experiment, own in rows.groupby(EXPERIMENT, sort=False):
        by_score = own.set_index("score")
        scores = by_score.drop(index=TRUE_OUTLIERS)
        values = {rule: scores["fpr95"][_chosen_by(rule, scores, scores["fpr95"])] for rule in RULES}
        values[TRUE_OUTLIERS] = by_score["fpr95"][TRUE_OUTLIERS]
        found.append({**dict(zip(EXPERIMENT, experiment, strict=True)), **values})
    columns = [*RULES, TRUE_OUTLIERS]
    lines = [
        [*pair, len(own), *(_spread(own[rule]) for rule in columns)]
        for pair, own in pd.DataFrame(found).groupby(PAIR, sort=False)
    ]
    return _table("SAL's FPR95 in %", ["ID", "wild OOD", "seeds", *columns], lines)


def _separation(rows: pd.DataFrame) -> str:
    lines = []
    for pair, own in rows.groupby(PAIR, sort=False):
        cells = []
        for rule in RULES:
            chosen = pd.DataFrame([_row(rule, one) for _, one in own.groupby("seed", sort=False)])
            cells.append(f"{_spread(chosen['err_in'])} / {_spread(chosen['err_out'])}")
        accuracy = own.groupby("seed")["id_accuracy"].first()
        lines.append([*pair, len(accuracy), f"{100 * accuracy.mean():.1f}", *cells])
    return _table("ERR_in / ERR_out in %", ["ID", "wild OOD", "seeds", "ID acc.", *RULES], lines)


def _choices(rows: pd.DataFrame) -> str:
    """How often `auto` left τ, for which score, and whether that made the sum of the two errors smaller."""
    lines = []
    for pair, own in rows.groupby(PAIR, sort=False):
        names, change = [], []
        for _, one in own.groupby("seed", sort=False):
            auto, tau = _row("auto", one), _row("τ", one)
            names.append(auto.name)
            change.append((auto["err_in"] + auto["err_out"]) - (tau["err_in"] + tau["err_out"]))
        others = pd.Series([name for name in names if name != TAU], dtype=str)
        counted = ", ".join(f"{name} {count}×" for name, count in others.value_counts().items())
        better, worse = (np.array(change) < 0).sum(), (np.array(change) > 0).sum()
        lines.append([*pair, f"{len(others)} of {len(names)}", counted or "–", better, worse])
    return _table("What auto did", ["ID", "wild OOD", "left τ", "for", "better", "worse"], lines)


def _scores(rows: pd.DataFrame) -> str:
    columns, parts = ["excess", "auroc", "err_in", "err_out"], []
    for (id_set, ood), own in rows.groupby(PAIR, sort=False):
        lines = [
            [name, *(_spread(one[column]) for column in columns)] for name, one in own.groupby("score", sort=False)
        ]
        by_seed = [one for _, one in own.groupby("seed", sort=False)]
        correlation = np.mean([one["excess"].corr(one["auroc"], method="spearman") for one in by_seed])
        note = f"Rank correlation of excess and AUROC over the scores, mean over seeds: {correlation:.2f}"
        table = _table(f"{id_set} / {ood}", ["score", "excess", "AUROC", "ERR_in", "ERR_out"], lines)
        parts.append(f"{table}\n\n{note}")
    return "\n\n".join(parts)


def _spread(values: pd.Series) -> str:
    """Mean ± std in percent."""
    mean, std = 100 * values.mean(), 100 * values.std()
    return f"{mean:.1f}" if len(values) == 1 else f"{mean:.1f} ± {std:.1f}"


def _table(title: str, header: list[str], lines: Iterable[list[Any]]) -> str:
    """A Markdown table below its title, with numbers aligned to the right."""
    grid = [header, ["---" if name in TEXT else "---:" for name in header], *lines]
    return f"{title}\n\n" + "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in grid)


if __name__ == "__main__":
    main()
