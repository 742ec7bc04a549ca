"""The pipeline through real `dvc repro`, in a project made by `salcli init`, with the custom methods of the docs."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from dvc.repo import Repo
from helpers.cli import process, salcli
from helpers.quick import EXPERIMENT, OOD, QUICK, REPOSITORY
from ruamel.yaml import YAML

from salcli.params.reading import edited
from salcli.pipeline import fingerprints
from salcli.store.formats import read_candidates
from salcli.store.layout import Workspace

pytestmark = pytest.mark.slow
SCORE, RIVAL = "my_scores:MyScore", "my_losses:MyLoss"
VALUES = {
    **QUICK,
    "data.ood": [OOD],
    "train_id.epochs": 6,
    "train_ood.epochs": 1,
    "rivals": [RIVAL],
    f"methods.{SCORE}": {"temperature": 2},
    f"methods.{RIVAL}": {"weight": 0.1},
    "evaluate.methods": ["sal", "sal-plus", "msp", "knn", SCORE, RIVAL],
}
WILD = f"{OOD}-0.1-0"
EVALUATE, DETECTOR, TRAIN_RIVAL = f"evaluate@{WILD}", f"detector@{WILD}", f"train-rival@{WILD}-{RIVAL}"


class Project:
    """A project folder, in git, with the two files that docs/extending.md shows."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.shell("git init -q -b main && git config user.name me && git config user.email me@here")
        assert salcli("init", str(root), "--ci", "github").exit_code == 0
        score, rival = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "extending.md").read_text(), re.DOTALL)
        (root / "my_scores.py").write_text(score)
        (root / "my_losses.py").write_text(rival)
        self.change(VALUES)

    def change(self, values: dict[str, object]) -> None:
        path = self.root / "params.yaml"
        path.write_text(edited(path.read_text(), values))

    def run(self, *command: str) -> str:
        return self.shell(shlex.join(["python", "-m", *command]))

    def shell(self, script: str, code: int = 0, **environment: str) -> str:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = process("bash", "-e", "-c", script, cwd=self.root, PATH=path, **environment)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + (done.stderr if code else "")

    def repro(self) -> set[str]:
        """The stages that ran, but for the one that always runs."""
        ran = re.findall(r"Running stage '(.+?)'", self.run("dvc", "repro"))
        assert ran[0] == "fingerprints"
        return set(ran[1:])

    def changed(self) -> set[str]:
        """The stages that DVC would run, after the fingerprints were written again. Asked, not run."""
        fingerprints.run(self.root / "params.yaml")
        with Repo(str(self.root)) as repo:
            return {stage.split("dvc.yaml:")[-1] for stage in repo.status()} - {"fingerprints"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(tmp_path_factory.mktemp("project"))
    ran = project.repro()
    assert len(ran) == 14, ran
    assert TRAIN_RIVAL in ran
    return project


def test_custom_methods_are_rows_of_the_table(project: Project) -> None:
    metrics = json.loads((project.root / f"runs/0/{OOD}/pi-0.1/evaluation/metrics.json").read_text())
    assert {metrics[SCORE]["label"], metrics[RIVAL]["label"]} == {"Margin", "Squared logits"}
    for name in (SCORE, RIVAL):
        assert metrics[name]["auroc"] > 0.8
        assert metrics[name]["id_accuracy"] > 0.9
    table = project.run("salcli", "table", "--format", "markdown")
    assert "Margin" in table
    assert "Squared logits" in table


def test_dvc_shows_metrics_and_plots(project: Project) -> None:
    every = json.loads((project.root / f"runs/0/{OOD}/pi-0.1/evaluation/metrics.json").read_text())
    shown = project.run("dvc", "metrics", "show")
    assert max(map(len, shown.splitlines())) <= 120
    best = min((name for name in every if name != "samples"), key=lambda name: every[name]["fpr95"])
    summary = json.loads((project.root / "summary.json").read_text())
    assert summary == {
        "detector": "sal-plus",
        **{name: pytest.approx(every["sal-plus"][name], abs=1e-6) for name in ("fpr95", "auroc", "id_accuracy")},
        "best": best,
        "best_fpr95": pytest.approx(every[best]["fpr95"], abs=1e-6),
    }
    page = Path(project.run("dvc", "plots", "show").strip().removeprefix("file://")).read_text()
    for curve in ("plots_methods_csv", "plots_roc_csv", "histogram.csv", "train-sal.csv", f"train-{RIVAL}.csv"):
        assert curve in page


def test_the_workflow_shows_the_table_and_fails_if_fpr95_is_worse_than_on_the_base_branch(project: Project) -> None:
    steps = YAML(typ="safe").load(project.root / ".github/workflows/salcli.yml")["jobs"]["repro"]["steps"]
    scripts = {step["name"]: step["run"] for step in steps if "run" in step}
    summary, text = project.root / "summary.json", (project.root / "summary.json").read_text()
    project.shell("git add -A && git commit -qm 'a base' && git update-ref refs/remotes/origin/main HEAD")
    project.shell(scripts["Reproduce"])
    project.shell(scripts["Table"], GITHUB_STEP_SUMMARY=str(project.root / ".salcli/shown.md"))
    assert "| Squared logits |" in (project.root / ".salcli/shown.md").read_text()
    project.shell(scripts["Compare FPR95"], BASE="main", WORST="0.01")
    summary.write_text(json.dumps(json.loads(text) | {"fpr95": 1.0}))
    shown = project.shell(scripts["Compare FPR95"], 1, BASE="main", WORST="0.01")
    compared = project.shell("dvc exp show --no-pager --only-changed --drop 'runs|data/'", COLUMNS="500")
    assert "fpr95" in compared
    assert max(map(len, compared.splitlines())) <= 120
    summary.write_text(text)
    assert "FPR95 is worse than on main: {'fpr95': " in shown


def test_dvc_artifacts_get_downloads_the_detector_of_a_clone(project: Project, tmp_path: Path) -> None:
    project.shell(
        f"dvc remote add -q -d store {tmp_path}/store && dvc push -q {DETECTOR} && git commit -qam remote && "
        f"git tag -a detector@v1.0.0 -m first && git clone -q . {tmp_path}/clone"
    )
    project.shell(f"cd {tmp_path} && dvc artifacts get clone detector")
    made = project.root / f"runs/0/{OOD}/pi-0.1/detector.safetensors"
    assert (tmp_path / "detector.safetensors").read_bytes() == made.read_bytes()


@pytest.mark.parametrize("value", ["0; touch x #", "0\ntouch x", "0'\ntouch x\n'", "$(touch x)"])
def test_values_of_params_do_not_reach_the_shell_raw(project: Project, value: str) -> None:
    project.change({"seeds": [value]})
    shown = project.shell("dvc repro -s -f split", 255)
    project.change({"seeds": [0]})
    assert f"--seed {shlex.quote(value)}" in shown
    assert "Invalid value for '--seed'" in shown
    assert "bash" not in shown
    assert not (project.root / "x").exists()


def test_nothing_has_changed_also_after_a_scratch_run(project: Project) -> None:
    project.run("salcli", "filter", "--threshold-quantile", "0.9")
    assert project.changed() == set()


@pytest.mark.parametrize(
    ("name", "before", "after", "expected"),
    [
        ("my_scores.py", "second - first", "first - second", {EVALUATE, DETECTOR}),
        ("my_losses.py", "square()", "abs()", {EVALUATE, TRAIN_RIVAL, DETECTOR}),
        ("params.yaml", "{weight: 0.1}", "{weight: 0.2}", {EVALUATE, TRAIN_RIVAL, DETECTOR}),
        # train-ood waits for the candidates
        ("params.yaml", "threshold_quantile: 0.95", "threshold_quantile: 0.9",
         {f"filter@{WILD}-sal", f"filter-only@{WILD}-sal-plus", EVALUATE, DETECTOR}),
        ("params.yaml", "pi: [0.1]", "pi: [0.1, 0.3]", {
            *(f"{stage}@{OOD}-0.3-0" for stage in ("mix-wild", "extract-wild", "evaluate", "detector")),
            *(f"{stage}@{OOD}-0.3-0-sal" for stage in ("filter", "train-ood")),
            f"filter-only@{OOD}-0.3-0-sal-plus", f"train-rival@{OOD}-0.3-0-{RIVAL}", "summary",
        }),
    ],
    ids=["score", "loss", "hyper-parameter", "quantile", "share"],
)  # fmt: skip
def test_a_change_is_one_of_the_stages_that_it_is_about(
    project: Project, name: str, before: str, after: str, expected: set[str]
) -> None:
    path = project.root / name
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    found = project.changed()
    path.write_text(text)
    assert found == expected


def test_another_k_runs_only_what_knn_is_a_part_of(project: Project) -> None:
    project.change({"methods.knn.k": 20})
    assert project.repro() == {f"filter-only@{WILD}-sal-plus", EVALUATE, DETECTOR, "summary"}


def test_a_variant_whose_filter_has_a_custom_score_runs_only_its_own_stages_and_evaluate(project: Project) -> None:
    project.change({"variants": ["sal", "sal-2"], "variant.sal-2": {"filter": {"score": SCORE}}})
    project.change({"evaluate.methods": ["sal", "sal-2", "msp"]})
    assert project.repro() == {
        EVALUATE,
        DETECTOR,
        "summary",
        *(f"{stage}@{WILD}-sal-2" for stage in ("filter", "train-ood")),
    }
    found = read_candidates(Workspace(project.root).find(EXPERIMENT.with_variant("sal-2").candidates))
    assert found.score_name == SCORE
    assert "SAL (2)" in project.run("salcli", "table", "--format", "markdown")
