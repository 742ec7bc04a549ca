"""From folders of images and a network file to a table, command by command. The truth of the wild data is not known."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
from helpers.cli import salcli
from helpers.custom_images import NETWORK, lay_out, options
from helpers.custom_networks import fresh_imports

from salcli.store.layout import Experiment

pytestmark = pytest.mark.slow
EXPERIMENT = Experiment(0, "unlabeled")
QUICK = ["variants=[sal]", "train_id.epochs=20", "train_ood.epochs=4", "evaluate.methods=[sal, msp]"]
QUICK += ["filter.threshold_quantile=0.9"]
STAGES = "prepare", "train-id", "extract-grads", "filter", "train-ood", "evaluate", "detector"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("custom")
    photos, folder = lay_out(root, n_labeled=40, n_wild=48), root / "my detector"
    folder.mkdir()
    (folder / "nets.py").write_text(NETWORK)
    arguments = [word for value in QUICK for word in ("--set", value)]
    arguments += ["--test-ood", str(photos / "known-odd"), "--model", "nets:Net", *options(photos)]
    with fresh_imports():
        for command in (["init", str(folder), *arguments], *([s, "--params", f"{folder}/params.yaml"] for s in STAGES)):
            result = salcli(*command)
            assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def project(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(built, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def test_every_stage_runs_on_custom_images_with_a_custom_network(project: Path) -> None:
    metrics = json.loads((project / EXPERIMENT.evaluation("metrics.json").path).read_text())
    assert metrics["sal"]["fpr95"] is metrics["sal"]["auroc"] is None
    assert metrics["sal"]["id_accuracy"] > 0.9
    filtered = json.loads((project / EXPERIMENT.filter_metrics.path).read_text())
    assert filtered["err_in"] is filtered["err_out"] is None
    assert filtered["n_wild"] == 38  # of 48, a fifth is held out
    unseen = json.loads((project / EXPERIMENT.evaluation("metrics.json", "known-odd").path).read_text())
    assert 0 <= unseen["sal"]["fpr95"] <= 1
    assert unseen["samples"] == {"id_test": 16, "ood_test": 8}


def test_commands_say_unknown_and_go_on(project: Path) -> None:
    with fresh_imports():
        table = salcli("table")
        assert table.exit_code == 0, table.stderr
        assert re.search(r"known-odd +(SAL|MSP) +\d", table.stdout)
        theory = salcli("theory")
        assert theory.exit_code == 0, theory.stderr
        assert theory.stdout.count(" unknown") == 4
        assert salcli("review", "--out", "list.csv").exit_code == 0
        page = salcli("report", "--out", "page.html", "--no-open")
        assert page.exit_code == 0, page.stderr
    assert "unknown" in (project / "page.html").read_text()
    with (project / "list.csv").open(encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    assert all(row["file"].startswith("day ") for row in rows), "in which folder of the wild data"
    assert {row["predicted"] for row in rows} <= {"a", "b"}
