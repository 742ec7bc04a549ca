"""From two folders and a network file to a table, through the real commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from own_images import NETWORK, lay_out, options
from test_cli import salcli
from test_own_init import init, said

from salcli.artifacts import layout
from salcli.artifacts.candidates import read_candidates
from salcli.artifacts.checkpoint import read_header
from salcli.artifacts.images import read_file_names
from salcli.artifacts.layout import Workspace
from salcli.artifacts.splits import read_wild_source

pytestmark = pytest.mark.slow
QUICK = ["train_id.epochs=20", "train_ood.epochs=4", "evaluate.methods=[sal, msp]", "filter.threshold_quantile=0.9"]


def dvc(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-m", "dvc", *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a network from a file in its folder, and all that `dvc repro` makes."""
    root = tmp_path_factory.mktemp("own")
    photos = lay_out(root, n_labeled=40, n_wild=48)
    folder = root / "my detector"
    folder.mkdir()
    (folder / "nets.py").write_text(NETWORK)
    path, modules = list(sys.path), set(sys.modules)
    arguments = [word for value in QUICK for word in ("--set", value)]
    arguments += ["--test-ood", str(photos / "known-odd"), "--model", "nets:Net"]
    init(folder, *[word for word in options(photos) if word != "--no-dvc"], *arguments)
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name == "nets":
            del sys.modules[name]
    dvc(folder, "repro")
    return folder


def test_the_whole_pipeline_runs_on_own_data_with_an_own_network(project: Path) -> None:
    workspace = Workspace(project)
    header = read_header(workspace.find(layout.trained_network("sal", "unlabeled", 0)))
    assert (header.spec["backbone"], header.spec["head"]) == ("nets:Net", "out")
    figures = json.loads((project / "runs/0/unlabeled/metrics.json").read_text())
    assert figures["sal"]["fpr95"] is figures["sal"]["auroc"] is None
    assert figures["sal"]["id_accuracy"] > 0.9
    filtered = json.loads((project / "runs/0/unlabeled/filter.json").read_text())
    assert filtered["err_in"] is filtered["err_out"] is None
    assert filtered["n_wild"] == 48
    unseen = json.loads((project / "runs/0/unlabeled/unseen/known-odd/metrics.json").read_text())
    assert 0 <= unseen["sal"]["fpr95"] <= 1
    assert unseen["samples"] == {"id_test": 16, "ood_test": 8}


def test_candidates_lead_back_to_their_files(project: Path) -> None:
    """Every fourth of the wild images is odd, and its name tells."""
    workspace = Workspace(project)
    names = read_file_names(workspace.find(layout.prepared_set("unlabeled")))
    source = read_wild_source(workspace.find(layout.wild_mixture("unlabeled", 0)))
    found = read_candidates(workspace.find(layout.candidates("unlabeled", 0)))
    files = [names[place - 80] for place in source[found.index]]
    assert len(files) > 0
    assert all((project.parent / "photos" / "unlabeled" / name).is_file() for name in files)


def test_commands_say_unknown_and_go_on(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    table = salcli("table")
    assert table.exit_code == 0, table.stderr
    assert re.search(r"known-odd (SAL|MSP) \d", said(table.stdout))
    assert "unlabeled: wild data as they come, nobody knows what of them is OOD" in said(table.stdout)
    rows = json.loads(salcli("table", "--format", "json").stdout)
    assert {row["ood"] for row in rows} == {"known-odd"}
    theory = salcli("theory")
    assert theory.exit_code == 0, theory.stderr
    assert theory.stdout.count("unknown") == 5
    listed = salcli("data", "list")
    assert f"unlabeled: {project.parent / 'photos' / 'unlabeled'} (✓)" in listed.stdout
    by_name = {one["name"]: one for one in json.loads(salcli("data", "list", "--format", "json").stdout)}
    assert by_name["labeled"]["status"] == "here"
    refused = salcli("sweep-pi")
    assert refused.exit_code == 2
    assert "data.pi is unknown" in str(refused.stderr)
    assert salcli("table", "--paper").exit_code == 2


def test_a_changed_network_file_starts_its_training_again(project: Path) -> None:
    """Asked of DVC, not run: what would run is what depends on it."""
    (project / ".salcli" / "fingerprints.json").unlink()
    with (project / "nets.py").open("a") as file:
        file.write("# a remark\n")
    subprocess.run([sys.executable, "-m", "salcli", "fingerprints"], cwd=project, check=True)
    changed = set(re.findall(r"^([\w-]+)@", dvc(project, "status"), re.MULTILINE))
    assert changed == {"train-id"}
