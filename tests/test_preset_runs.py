"""Presets run from raw files to its table: few images in the right format, small, one epoch."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, get_args

import pytest
from conftest import REPOSITORY
from fake_data import lay_out
from test_cli import salcli

from salcli.artifacts.layout import Workspace
from salcli.params import Encoder, Params, WildRival, load_params
from salcli.presets import preset, presets
from salcli.project import create
from salcli.reporting.results import METRICS, Results, asked_for
from salcli.stages import evaluate, extract_grads, prepare, train_encoder, train_id, train_ood
from salcli.stages import filter as filter_stage

if TYPE_CHECKING:
    from pathlib import Path

# The formats and the protocol stay, and mostly the network; the pictures are a sixteenth, and everything happens once.
SHRUNK = {
    "seeds": [0],
    "train_id.epochs": 1,
    "train_id.batch_size": 64,
    "train_ood.epochs": 1,
    "train_ood.batch_size": 32,
    "filter.threshold_quantile": 0.5,  # an untrained network separates nothing; something has to be left
    "evaluate.knn_k": 5,
}
# Presets whose rivals are trained, too: between them they have all of them. It takes as long as all others together.
WITH_RIVALS = {
    "cifar10": {
        f"train_encoder.{name}.{key}": value
        for name in ("knn-plus", "csi")
        for key, value in {"epochs": 1, "warmup_epochs": 0, "batch_size": 32, "head.epochs": 1}.items()
    },
    "weakly-supervised": {
        "train_rival.step.epochs": 1,
        "train_rival.step.batch_size": 32,
        "train_rival.step.structure.steps": 3,
    },
}
SMALL_PICTURES = {"data.image_size": 8}
N_PER_CLASS = 14  # a twentieth of them, for calibration, is one


def shrunk(root: Path, name: str) -> Params:
    """An initialised folder of a preset with small data sets; one wild set of each format, one unseen set."""
    chosen = preset(name)
    data = chosen.params["data"]
    lay_out(root / data["root"], [data["id"], *data["ood"], *data["test_ood"]], N_PER_CLASS)
    n_wild = 1 if "resnet" in name else 2  # the large network once
    values = {**SHRUNK, "data.ood": data["ood"][:n_wild], "data.test_ood": data["test_ood"][:2]}
    if name in WITH_RIVALS:
        values |= WITH_RIVALS[name]
    else:
        trained = {*get_args(WildRival), *get_args(Encoder)}
        methods = [method for method in chosen.params["evaluate"]["methods"] if method not in trained]
        values |= {"rivals": [], "encoders": [], "evaluate.methods": methods}
    if data["image_size"] > 8:
        values |= SMALL_PICTURES
    if chosen.params["model"]["backbone"] == "wrn-40-2" and name != "cifar10":  # once is enough for the deep one
        values |= {"model.backbone": "wrn-10-2"}
    create(root, chosen, values, dvc=False, force=True)
    return load_params(root / "params.yaml")[0]


def run_everything(workspace: Workspace, params: Params) -> None:
    """What `dvc repro` does, in one process."""
    data, (seed,) = params.data, params.seeds
    for name in (data.id, *data.ood):
        prepare.prepare_set(workspace, data, name)
    for name in data.test_ood:
        prepare.prepare_unseen_set(workspace, data, name)
    prepare.prepare_split(workspace, data, seed)
    train_id.run(workspace, params, seed)
    extract_grads.run_id(workspace, params, seed)
    for encoder in params.encoders:
        train_encoder.run(workspace, params, encoder, seed)
    for ood in data.ood:
        prepare.prepare_wild(workspace, data, ood, seed)
        extract_grads.run_wild(workspace, params, ood, seed)
        filter_stage.run(workspace, params, ood, seed)
        for method in ("sal", *params.rivals):
            train_ood.run(workspace, params, ood, seed, method=method)
        for unseen in (None, *data.test_ood):
            evaluate.run(workspace, params, ood, seed, unseen=unseen)


@pytest.mark.slow
# The default runs in other tests. ResNet-34 is ResNet-18 with more blocks, and would take as long as five others.
@pytest.mark.parametrize("name", sorted(set(presets()) - {"default", "resnet34"}))
def test_a_shrunk_preset_runs_to_its_table(name: str, tmp_path: Path) -> None:
    params = shrunk(tmp_path, name)
    workspace = Workspace(tmp_path)
    run_everything(workspace, params)
    results = Results.from_folder(tmp_path / "runs", asked_for(params))
    found = set(zip(results.runs["ood"], results.runs["test_set"], results.runs["seed"], strict=True))
    assert found == asked_for(params)
    assert set(results.runs["method"]) == set(params.evaluate.methods)
    assert results.runs[list(METRICS)].notna().all(axis=None)
    assert results.runs[list(METRICS)].apply(lambda column: column.between(0, 100)).all(axis=None)


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_is_a_valid_params_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text(preset(name).text)
    load_params(tmp_path / "params.yaml")


@pytest.fixture(scope="module")
def initialised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("initialised")
    create(root, preset("default"))
    return root


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(presets()))
def test_dvc_understands_the_folder_of_every_preset(name: str, initialised: Path) -> None:
    (initialised / "params.yaml").write_text(preset(name).text)
    done = subprocess.run(
        [sys.executable, "-m", "dvc", "dag", "--dot"], cwd=initialised, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    params = load_params(initialised / "params.yaml")[0]
    for ood, test, seed in asked_for(params):
        stage = f"evaluate@{ood}-{seed}" if test == ood else f"evaluate-unseen@{ood}-{test}-{seed}"
        assert f'"{stage}"' in done.stdout


@pytest.mark.slow
def test_a_preset_through_dvc_repro(tmp_path: Path) -> None:
    root = tmp_path / "folder"
    chosen = preset("unseen-300k")  # the one with unseen sets
    lay_out(root / "data/raw", ["cifar10", "300k-random", "svhn"], 60)
    create(root, chosen, {**SHRUNK, **SMALL_PICTURES, "model.backbone": "wrn-10-1", "data.test_ood": ["svhn"]})
    done = subprocess.run([sys.executable, "-m", "dvc", "repro"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = json.loads((root / "runs/0/300k-random/unseen/svhn/metrics.json").read_text())
    assert set(metrics) == {*chosen.params["evaluate"]["methods"], "samples"}
    again = subprocess.run([sys.executable, "-m", "dvc", "repro"], cwd=root, capture_output=True, text=True)
    assert again.stdout.count("Running stage") == 1  # the one that looks what has changed outside
    (root / "data/raw/train_32x32.mat").touch()  # other raw data: they are decoded again, but come out the same
    touched = subprocess.run([sys.executable, "-m", "dvc", "repro"], cwd=root, capture_output=True, text=True)
    ran = re.findall(r"Running stage '(.+?)'", touched.stdout)
    assert ran == [".salcli/dvc.yaml:fingerprints", "prepare-unseen-set@svhn"]
    table = salcli("table", "--paper", "--params", str(root / "params.yaml"))
    assert table.exit_code == 2  # the paper has no such network
    shown = salcli("table", "--params", str(root / "params.yaml"))
    assert "svhn" in shown.output
    assert "OOD in the wild data: 300k-random." in shown.output
    shutil.rmtree(root)


def test_every_table_of_the_paper_has_a_preset() -> None:
    tables = {line.split(",")[0] for line in (REPOSITORY / "salcli/paper/results.csv").read_text().splitlines()[1:]}
    assert tables == set(presets()) - {"default", "global-reference"}
