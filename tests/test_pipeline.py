"""The pipeline through real `dvc` commands, in a temporary clone of the project."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY
from ruamel.yaml import YAML

from salcli.params_file import read_yaml, with_overrides

pytestmark = pytest.mark.slow

QUICK = {"seeds": [0], "rivals": [], "data.ood": ["digits-8-9"], "train_id.epochs": 6, "train_ood.epochs": 2}
OF_ONE_EXPERIMENT = ["detector", "evaluate", "extract-wild", "filter", "mix-wild", "train-ood"]
AFTER_THE_FILTER = ["filter", "train-ood", "evaluate", "detector"]
FINGERPRINTS = ".salcli/dvc.yaml:fingerprints"


class Project:
    """A copy of the project with quick params, under git, as a user has it after a clone."""

    def __init__(self, root: Path) -> None:
        self.root = root
        tracked = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=REPOSITORY, capture_output=True, text=True, check=True,
        )  # fmt: skip
        for name in tracked.stdout.splitlines():
            left_out = name.startswith(("tests/", "docs/")) or name.endswith("dvc.lock")
            if not left_out and (REPOSITORY / name).exists():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(REPOSITORY / name, root / name)
        self.change_params(QUICK)
        identity = ["-c", "user.name=test", "-c", "user.email=test@example.invalid"]
        for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "start"]):
            subprocess.run(["git", *command], cwd=root, check=True)

    def change_params(self, overrides: dict[str, object]) -> None:
        path = self.root / "params.yaml"
        content = with_overrides(read_yaml(path), overrides)
        with path.open("w") as file:
            YAML().dump(content, file)

    def dvc(self, *arguments: str) -> str:
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "GIT_AUTHOR_NAME": "test", "GIT_AUTHOR_EMAIL": "test@example.invalid",
            "GIT_COMMITTER_NAME": "test", "GIT_COMMITTER_EMAIL": "test@example.invalid",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "dvc", *arguments], cwd=self.root, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def repro(self) -> list[str]:
        """The stages that ran, but for the one that looks each time what has changed outside."""
        return stages_of(self.dvc("repro"))

    def outputs(self) -> dict[str, str]:
        """Every output with its checksum, as DVC recorded it."""
        lock = YAML(typ="safe").load(self.root / "dvc.lock")
        return {out["path"]: out["md5"] for stage in lock["stages"].values() for out in stage["outs"]}


def stages_of(output: str) -> list[str]:
    return sorted(set(re.findall(r"Running stage '(.+?)'", output)) - {FINGERPRINTS})


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(tmp_path_factory.mktemp("project"))
    ran = project.repro()
    assert len(ran) == 11, ran
    return project


def test_a_second_repro_does_nothing(project: Project) -> None:
    assert project.repro() == []
    assert project.dvc("status").split() == [f"{FINGERPRINTS}:", "always", "changed"]


def test_two_runs_from_scratch_give_the_same_bytes(project: Project, tmp_path: Path) -> None:
    other = Project(tmp_path / "other")
    other.repro()
    first, second = project.outputs(), other.outputs()
    assert len(first) == 20
    assert {path for path in first if first[path] != second[path]} == set()
    assert first.keys() == second.keys()


def test_metrics_plots_and_dag_are_there(project: Project) -> None:
    metrics = json.loads(project.dvc("metrics", "show", "--json"))[""]["data"]
    evaluation = metrics[str(Path("runs/0/digits-8-9/metrics.json"))]["data"]
    assert 0 <= evaluation["sal"]["fpr95"] <= 1
    assert "err_in" in metrics[str(Path("runs/0/digits-8-9/filter.json"))]["data"]
    assert "evaluate@digits-8-9-0" in project.dvc("dag")
    page = project.dvc("plots", "show").strip().removeprefix("file://")
    html = Path(page).read_text()
    for curve in ("roc.csv", "histogram.csv", "train-id.csv", "train-sal.csv"):
        assert curve in html


def test_a_scratch_run_by_hand_leaves_nothing_to_do_for_dvc(project: Project) -> None:
    subprocess.run(
        [sys.executable, "-m", "salcli", "filter", "--threshold-quantile", "0.9", "--seed", "0"],
        cwd=project.root, check=True, capture_output=True,
    )  # fmt: skip
    assert project.repro() == []


def test_a_changed_quantile_runs_only_what_depends_on_it(project: Project) -> None:
    project.change_params({"filter.threshold_quantile": 0.9})
    assert project.repro() == sorted(f"{name}@digits-8-9-0" for name in AFTER_THE_FILTER)


def test_another_rival_trains_only_that_one(project: Project) -> None:
    project.change_params({"rivals": ["woods"]})
    assert project.repro() == ["evaluate@digits-8-9-0", "train-rival@digits-8-9-0-woods"]
    # WOODS depends on neither the filter nor the numbers of other rivals
    project.change_params({"train_rival.oe.loss_weight": 3, "filter.threshold_quantile": 0.88})
    assert project.repro() == sorted(f"{name}@digits-8-9-0" for name in AFTER_THE_FILTER)
    project.change_params({"rivals": []})
    assert project.repro() == ["evaluate@digits-8-9-0"]


def test_changed_code_runs_only_the_stages_that_import_it(project: Project) -> None:
    with (project.root / "salcli" / "sal" / "threshold.py").open("a") as file:
        file.write("\n# a remark\n")
    assert project.repro() == ["filter@digits-8-9-0"]  # its candidates are the same, so nothing after it runs


def test_another_ood_set_runs_only_what_is_new(project: Project) -> None:
    project.change_params({"data.ood": ["digits-8-9", "photo-patches"]})
    expected = [f"{stage}@photo-patches-0" for stage in OF_ONE_EXPERIMENT] + ["prepare-ood-set@photo-patches"]
    assert project.repro() == sorted(expected)


def test_another_seed_runs_only_what_is_new(project: Project) -> None:
    project.change_params({"data.ood": ["digits-8-9"], "seeds": [0, 1]})
    expected = [f"{stage}@digits-8-9-1" for stage in OF_ONE_EXPERIMENT]
    assert project.repro() == sorted([*expected, "split@1", "train-id@1", "extract-id@1"])


def test_an_experiment_with_a_changed_param_runs_and_is_recorded(project: Project) -> None:
    changes = ["evaluate.methods=[sal,msp]", "seeds=[0]", "data.ood=[digits-8-9]"]
    ran = project.dvc("exp", "run", "--name", "fewer", *(part for change in changes for part in ("-S", change)))
    assert stages_of(ran) == ["evaluate@digits-8-9-0"]
    assert "fewer" in project.dvc("exp", "show", "--csv")
