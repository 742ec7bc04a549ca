"""Every preset runs from raw files to its table: few images in the real formats, small networks, one epoch."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dvc.repo import Repo
from helpers.cli import files, process, salcli
from helpers.fake_data import WRITERS, lay_out
from helpers.stages import run_every_stage

from salcli.models.network import Classifier, NetworkSpec
from salcli.params.presets import preset, presets, resolved
from salcli.params.reading import read_yaml
from salcli.params.schema import Params, load_params
from salcli.report.results import METRICS, Results, asked_for
from salcli.store.layout import Experiment, Workspace

# Formats and protocol stay; everything else is as small as it may be.
SHRUNK = {
    "seeds": "[0]",
    "train_id.epochs": "1",
    "train_id.batch_size": "8",  # enough steps for batch norm: without, a ResNet is certain of every sample, and τ is 0
    "train_id.lr": "0.01",
    "train_ood.epochs": "1",
    "train_ood.batch_size": "128",
    "filter.threshold_quantile": "0.8",  # a hardly trained network separates little; some candidates must be left
    "methods.knn.k": "5",
    "methods.all-id.epochs": "1",
    "methods.step.epochs": "1",
    "methods.step.batch_size": "64",
    "methods.step.structure.steps": "3",
} | {
    f"methods.{name}.{key}": value
    for name in ("knn-plus", "csi")
    for key, value in {"epochs": "1", "warmup_epochs": "0", "batch_size": "64", "head.epochs": "1"}.items()
}
IMAGES = {"data.image_size": "8", "model.backbone": "wrn-10-1"}
WEIGHTS = "wrn.pt"  # of presets with a frozen network
N_PER_CLASS = 12  # a twentieth of them, for calibration, is one


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All data sets in their published formats."""
    root = tmp_path_factory.mktemp("raw")
    lay_out(root, [name for name in WRITERS if "mnist" not in name], N_PER_CLASS)
    network = Classifier(NetworkSpec(IMAGES["model.backbone"], 2, (0.5,) * 3, (0.2,) * 3))
    torch.save(network.state_dict(), root / WEIGHTS)
    return root


def shrunk(name: str, raw: Path) -> dict[str, str]:
    """One wild set, at most two shares π and unseen sets; all variants and all rivals."""
    content = resolved(preset(name))
    data = content["data"]

    def first_and_last(items: list[Any]) -> list[Any]:
        return [*items[:1], *items[1:][-1:]]

    values: dict[str, Any] = SHRUNK | {"data.ood": data["ood"][:1], "data.test_ood": first_and_last(data["test_ood"])}
    values |= {"data.pi": first_and_last(data["pi"])}
    if name != "toy":
        values |= IMAGES | {"data.root": str(raw)}
    if data["id"] == "cifar100":
        values["data.id"] = "cifar10"  # fewer images
    if content["model"]["frozen"]:
        groups = {group: data["ood"][:1] for group, sets in data["groups"].items() if data["ood"][0] in sets}
        values |= {"data.channels": "3", "data.groups": json.dumps(groups), "model.weights": str(raw / WEIGHTS)}
        values |= {"model.mean": [0.5] * 3, "model.std": [0.2] * 3}
    elif "resnet" in content["model"]["backbone"]:
        values["model.backbone"] = content["model"]["backbone"]
    return {key: json.dumps(value) if isinstance(value, list) else value for key, value in values.items()}


def init(root: Path, name: str, values: dict[str, str], *options: str) -> Params:
    assignments = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    result = salcli("init", str(root), "--preset", name, *assignments, *options)
    assert result.exit_code == 0, result.stderr
    return load_params(root / "params.yaml")[0]


@pytest.fixture(scope="module")
def dvc_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("initialised")
    assert salcli("init", str(root)).exit_code == 0
    return root / ".dvc"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, one in presets().items() if one.paper])
def test_a_shrunk_preset_runs_to_its_table(name: str, tmp_path: Path, raw: Path, dvc_folder: Path) -> None:
    params = init(tmp_path, name, shrunk(name, raw), "--no-dvc")
    run_every_stage(Workspace(tmp_path), params)
    asked = asked_for(read_yaml(tmp_path / "params.yaml"))
    runs = Results.from_folder(tmp_path / "runs", asked).runs
    assert set(zip(runs["seed"], runs["ood"], runs["pi"], runs["test_set"], strict=True)) == asked
    assert set(runs["method"]) == set(params.evaluate.methods)
    assert runs[list(METRICS)].apply(lambda column: column.between(0, 100)).all(axis=None)
    assert not [path for path in tmp_path.glob("runs/**/*.json") if "NaN" in path.read_text()]
    assert salcli("summary", "--params", str(tmp_path / "params.yaml")).exit_code == 0
    shutil.copytree(dvc_folder, tmp_path / ".dvc")
    written = {name for name in files(tmp_path) if name.startswith(("data/", "runs/", "plots/", "summary"))}
    assert files_of_dvc(tmp_path) == written


def files_of_dvc(root: Path) -> set[str]:
    """What DVC expects the stages to write."""
    with Repo(str(root)) as repo:
        paths = {str(Path(out.fs_path).relative_to(root)) for stage in repo.index.stages for out in stage.outs}
    return paths - {".salcli/fingerprints.json"}


@pytest.mark.slow
def test_a_preset_through_dvc_repro(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed raw data run the stages of an unseen set. tests/pipeline/test_dvc_repro.py has the others."""
    root = tmp_path / "project"
    lay_out(root / "data/raw", ["cifar10", "300k-random", "svhn"], N_PER_CLASS)
    monkeypatch.chdir(root)
    values = shrunk("unseen-300k", root / "data/raw") | {"data.root": "data/raw", "data.test_ood": "[svhn]"}
    params = init(root, "unseen-300k", values)
    run_every_stage(Workspace(root), params)
    assert salcli("fingerprints").exit_code == salcli("summary").exit_code == 0
    with Repo(str(root)) as repo:
        repo.commit(force=True)
    lay_out(root / "data/raw", ["svhn"], N_PER_CLASS, seed=1)
    path = root / Experiment(0, "300k-random", 0.1).evaluation("metrics.json", "svhn").path
    before = json.loads(path.read_text())
    unseen = [f"{stage}-unseen@300k-random-0.1-0-svhn" for stage in ("extract", "evaluate")]
    assert reproduced(root) == ["fingerprints", "prepare-unseen-set@svhn", *unseen, "summary"]
    after = json.loads(path.read_text())
    assert after != before
    assert after.keys() == {*params.evaluate.methods, "samples"}
    shown = salcli("table").stdout
    assert "svhn" in shown
    assert "OOD in the wild data: 300k-random." in shown


def reproduced(root: Path) -> list[str]:
    """The stages that `dvc repro` ran."""
    done = process(sys.executable, "-m", "dvc", "repro", cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"Running stage '(.+?)'", done.stdout)
