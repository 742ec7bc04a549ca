"""The pipeline through real `dvc repro`, in a project made by `salcli init`, with the custom methods of the docs."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from helpers.cli import process, salcli
from helpers.quick import OOD, QUICK, REPOSITORY

from salcli.params.reading import edited

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
    "evaluate.methods": ["sal", "msp", "knn", SCORE, RIVAL],
}
WILD = f"{OOD}-0.1-0"


class Project:
    """A project folder with the two files that docs/extending.md shows."""

    def __init__(self, root: Path) -> None:
        self.root = root
        assert salcli("init", str(root)).exit_code == 0
        score, rival = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "extending.md").read_text(), re.DOTALL)
        (root / "my_scores.py").write_text(score)
        (root / "my_losses.py").write_text(rival)
        self.change(VALUES)

    def change(self, values: dict[str, object]) -> None:
        path = self.root / "params.yaml"
        path.write_text(edited(path.read_text(), values))

    def run(self, *command: str) -> str:
        environment = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        done = process(sys.executable, "-m", *command, cwd=self.root, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def repro(self) -> set[str]:
        """The stages that ran, but for the one that always runs."""
        ran = re.findall(r"Running stage '(.+?)'", self.run("dvc", "repro"))
        assert ran[0] == "fingerprints"
        return set(ran[1:])

    def changed(self) -> set[str]:
        """The stages that DVC would run, after the fingerprints were written again."""
        self.run("salcli", "fingerprints")
        return {stage for stage in json.loads(self.run("dvc", "status", "--json")) if stage != "fingerprints"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(tmp_path_factory.mktemp("project"))
    ran = project.repro()
    assert len(ran) == 12, ran
    assert f"train-rival@{WILD}-{RIVAL}" in ran
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


def test_metrics_plots_and_the_graph_are_there(project: Project) -> None:
    metrics = json.loads(project.run("dvc", "metrics", "show", "--json"))[""]["data"]
    assert 0 <= metrics[f"runs/0/{OOD}/pi-0.1/evaluation/metrics.json"]["data"]["sal"]["fpr95"] <= 1
    assert "err_in" in metrics[f"runs/0/{OOD}/pi-0.1/sal/filter.json"]["data"]
    assert f"evaluate@{WILD}" in project.run("dvc", "dag")
    page = Path(project.run("dvc", "plots", "show").strip().removeprefix("file://")).read_text()
    for curve in ("roc.csv", "histogram.csv", "train-id.csv", "train-sal.csv", f"train-{RIVAL}.csv"):
        assert curve in page


def test_a_second_repro_runs_only_fingerprints_also_after_a_scratch_run(project: Project) -> None:
    project.run("salcli", "filter", "--threshold-quantile", "0.9")
    assert project.repro() == set()


def test_another_k_runs_only_evaluate(project: Project) -> None:
    project.change({"methods.knn.k": 20})
    assert project.repro() == {f"evaluate@{WILD}"}


def test_custom_code_and_hyper_parameters_are_seen(project: Project) -> None:
    """Asked of DVC, not run."""
    for name, before, after, expected in (
        ("my_scores.py", "first - second", "second - first", {f"evaluate@{WILD}"}),
        ("my_losses.py", "square()", "abs()", {f"evaluate@{WILD}", f"train-rival@{WILD}-{RIVAL}"}),
        ("params.yaml", "{weight: 0.1}", "{weight: 0.2}", {f"evaluate@{WILD}", f"train-rival@{WILD}-{RIVAL}"}),
    ):
        path = project.root / name
        text = path.read_text()
        path.write_text(text.replace(before, after))
        assert project.changed() == expected, name
        path.write_text(text)
    assert project.changed() == set()


def test_another_pi_runs_only_what_is_new_and_can_be_drawn(project: Project) -> None:
    project.change({"data.pi": [0.1, 0.3]})
    new = f"{OOD}-0.3-0"
    assert project.repro() == {
        *(f"{stage}@{new}" for stage in ("mix-wild", "extract-wild", "evaluate")),
        *(f"{stage}@{new}-sal" for stage in ("filter", "train-ood", "detector")),
        f"train-rival@{new}-{RIVAL}",
    }
    project.run("salcli", "sweep-pi")
    rows = (project.root / "sweep" / "pi.csv").read_text().splitlines()
    assert [float(line.split(",")[rows[0].split(",").index("pi")]) for line in rows[1:]] == [0.1, 0.3]
    assert all((project.root / "sweep" / f"pi.{kind}").stat().st_size for kind in ("png", "svg"))


def test_a_variant_runs_only_its_own_stages_and_evaluate(project: Project) -> None:
    project.change({"data.pi": [0.1], "variants": ["sal", "sal-2"], "variant.sal-2": {"filter": {"n_vectors": 2}}})
    project.change({"evaluate.methods": ["sal", "sal-2", "msp"]})
    assert project.repro() == {
        f"evaluate@{WILD}",
        *(f"{stage}@{WILD}-sal-2" for stage in ("filter", "train-ood", "detector")),
    }
    assert "SAL (2)" in project.run("salcli", "table", "--format", "markdown")


def test_a_changed_quantile_runs_what_comes_after_the_filter_but_no_rival(project: Project) -> None:
    project.change({"filter.threshold_quantile": 0.9})
    stages = {name.partition("@")[0] for name in project.changed()}
    assert stages == {"filter", "evaluate"}  # train-ood waits for the candidates, the detector for the network
