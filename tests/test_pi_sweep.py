"""`sweep-pi`: the pipeline's own figures at its own π, in a place of its own, each π once."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pandas as pd
import pytest
from conftest import OOD, REPOSITORY, SEED
from test_cli import files, salcli

from salcli.artifacts import layout
from salcli.artifacts.layout import Artifact, Workspace
from salcli.errors import MissingArtifactError
from salcli.params import Params, load_params
from salcli.params_file import edited
from salcli.progress import Silent
from salcli.reporting.paper_by_pi import paper_curves, shares_of_the_paper
from salcli.reporting.sweep_figure import write_sweep_figure
from salcli.reporting.sweep_table import over_seeds
from salcli.stages import pi_sweep

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

AS_MAIN = "sweep/pi-0.1"  # the pipeline's own π
SWEEP = ["sweep-pi", "--ood", OOD, "--pi", "1", "--pi", "0.1"]


@pytest.fixture(scope="module")
def swept(built: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A workspace after a sweep of two values of π, and what the command said. Read only."""
    root = tmp_path_factory.mktemp("swept") / "workspace"
    shutil.copytree(built, root)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        result = salcli(*SWEEP)
    assert result.exit_code == 0, result.output
    return root, result.stdout


@pytest.fixture
def again(swept: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own copy of it as the current folder."""
    shutil.copytree(swept[0], tmp_path / "again")
    monkeypatch.chdir(tmp_path / "again")
    return tmp_path / "again"


@pytest.fixture
def here(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace that has not been swept."""
    monkeypatch.chdir(workspace.root)
    return workspace.root


def times(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


# --- the figures


def test_at_the_pi_of_the_pipeline_every_file_is_the_pipelines_own(built: Path, swept: tuple[Path, str]) -> None:
    """All but the evaluation, which is of one method here."""
    own = files(swept[0] / AS_MAIN)
    same = {name for name, content in own.items() if (built / name).exists() and (built / name).read_bytes() == content}
    expected = {
        place(OOD, SEED).name
        for place in (
            layout.wild_mixture, layout.wild_truth, layout.wild_gradients, layout.candidates, layout.filter_metrics,
        )
    }  # fmt: skip
    expected |= {place("sal", OOD, SEED).name for place in (layout.trained_network, layout.training_curve)}
    assert expected <= same


def test_at_the_pi_of_the_pipeline_the_figures_are_the_pipelines_own(built: Path, swept: tuple[Path, str]) -> None:
    record = json.loads((swept[0] / AS_MAIN / layout.pi_sweep_point(OOD, SEED).name).read_text())
    evaluation = json.loads((built / layout.metrics(OOD, SEED).name).read_text())["sal"]
    filtered = json.loads((built / layout.filter_metrics(OOD, SEED).name).read_text())
    assert {name: record["figures"][name] for name in evaluation} == evaluation
    for name in ("n_wild", "n_candidates", "err_in", "err_out"):
        assert record["figures"][name] == filtered[name]


def test_the_csv_has_every_figure_and_a_gap_where_there_is_no_wild_id_data(swept: tuple[Path, str]) -> None:
    table = pd.read_csv(swept[0] / "sweep" / "pi.csv")
    assert list(table["pi"]) == [0.1, 1.0]
    assert list(table["err_in"].isna()) == [False, True]
    record = json.loads((swept[0] / "sweep/pi-1.0" / layout.pi_sweep_point(OOD, SEED).name).read_text())["figures"]
    assert list(table.columns) == list(record)
    for name, value in record.items():
        if isinstance(value, float):
            assert table[name][1] == pytest.approx(value, rel=1e-5)


def test_the_table_fits_and_the_figure_is_there(swept: tuple[Path, str]) -> None:
    root, said = swept
    assert all(word in said for word in ("ERR_in", "ERR_out", "FPR95", "AUROC", OOD, "–: at π = 1"))
    assert max(map(len, said.splitlines())) <= 100
    assert (root / "sweep/pi.png").read_bytes().startswith(b"\x89PNG")
    svg = (root / "sweep/pi.svg").read_text()
    assert f"ours: {OOD}" in svg
    assert "paper, other data: CIFAR-100, WRN-40-2, textures" in svg


# --- where it writes, and what it does not do twice


def test_nothing_outside_its_folder_is_written(built: Path, swept: tuple[Path, str]) -> None:
    after = files(swept[0])
    assert {name: content for name, content in after.items() if not name.startswith("sweep/")} == files(built)
    assert not list(swept[0].rglob("*.pt"))  # of a training that came to its end nothing is kept


def test_a_second_run_does_nothing(again: Path, swept: tuple[Path, str]) -> None:
    folders = [again / "sweep" / name for name in ("pi-0.1", "pi-1.0")]
    before = [times(folder) for folder in folders]
    result = salcli(*SWEEP)
    assert result.exit_code == 0, result.output
    assert [times(folder) for folder in folders] == before
    assert "2 of 2 experiments are those of an earlier run" in result.stdout
    assert files(again) == files(swept[0])


def test_changed_params_are_run_again(again: Path) -> None:
    params = again / "params.yaml"
    params.write_text(edited(params.read_text(), {"train_ood.epochs": 1}))
    before = pd.read_csv("sweep/pi.csv")
    result = salcli("sweep-pi", "--ood", OOD, "--pi", "0.1")
    assert result.exit_code == 0, result.output
    assert "earlier run" not in result.stdout
    assert pd.read_csv("sweep/pi.csv")["auroc"][0] != before["auroc"][0]


def test_a_changed_classifier_is_noticed(again: Path) -> None:
    params = again / "params.yaml"
    params.write_text(edited(params.read_text(), {"train_id.epochs": 2, "train_ood.epochs": 1}))
    assert salcli("train-id").exit_code == 0
    result = salcli("sweep-pi", "--ood", OOD, "--pi", "0.1")
    assert result.exit_code == 2
    assert "make all gradients again: salcli extract-grads" in " ".join(result.output.split())
    assert salcli("extract-grads", "id").exit_code == 0
    result = salcli("sweep-pi", "--ood", OOD, "--pi", "0.1")
    assert result.exit_code == 0, result.output
    assert "earlier run" not in result.stdout


def test_an_override_sweeps_in_scratch(again: Path, swept: tuple[Path, str]) -> None:
    result = salcli("sweep-pi", "--ood", OOD, "--pi", "0.2", "--set", "train_ood.epochs=1")
    assert result.exit_code == 0, result.output
    own, scratch = files(again), files(again / "scratch")
    assert {name: content for name, content in own.items() if not name.startswith("scratch/")} == files(swept[0])
    assert {name.split("/")[0] for name in scratch} == {"sweep"}
    assert {"sweep/pi.csv", f"sweep/pi-0.2/{layout.pi_sweep_point(OOD, SEED).name}"} <= set(scratch)


def test_a_damaged_record_is_made_again(again: Path, swept: tuple[Path, str]) -> None:
    (again / AS_MAIN / layout.pi_sweep_point(OOD, SEED).name).write_text("{")
    result = salcli(*SWEEP)
    assert result.exit_code == 0, result.output
    assert "1 of 2 experiments" in result.stdout
    assert files(again) == files(swept[0])


class StoppedAt(Silent):
    """Stops when a task with this in its name begins; remembers all others."""

    def __init__(self, name: str) -> None:
        self.name, self.begun = name, list[str]()

    @contextmanager
    def task(self, name: str, total: int, unit: str) -> Iterator[StoppedAt]:
        if self.name in name:
            raise KeyboardInterrupt
        self.begun.append(name)
        yield self


def test_after_a_kill_it_goes_on_with_the_next_pi(
    workspace: Workspace, quick_params: Params, swept: tuple[Path, str]
) -> None:
    shutil.rmtree(workspace.root / "data/splits" / str(SEED) / OOD)  # the pipeline's own wild data are not needed
    shutil.rmtree(workspace.root / "runs" / str(SEED) / OOD)
    experiment = (workspace, quick_params, [0.1, 1.0], [(OOD, SEED)])
    with pytest.raises(KeyboardInterrupt):
        pi_sweep.run(*experiment, StoppedAt("2/2, π 1: evaluate"))
    first = times(workspace.root / AS_MAIN)
    watched = StoppedAt("never")
    done = pi_sweep.run(*experiment, watched)
    assert (done.n_known, [point.pi for point in done.points]) == (1, [0.1, 1.0])
    assert all(name.startswith("1/1, π 1: ") for name in watched.begun)
    assert times(workspace.root / AS_MAIN) == first
    for name in ("pi-0.1", "pi-1.0"):
        assert files(workspace.root / "sweep" / name) == files(swept[0] / "sweep" / name)


# --- what can go wrong


@pytest.mark.parametrize(
    ("pi", "message"),
    [
        ("0", "--pi 0: must be above 0 and at most 1"),
        ("5", "(did you mean 0.05?)"),
        ("nan", "--pi nan: must be above 0"),
        ("0.0001", "cannot be mixed in that ratio; choose a value from 0.0018 to 0.9959, or 1"),
        ("0.0017", "choose a value from 0.0018"),
        ("0.9965", "to 0.9959, or 1"),
    ],
)
def test_a_wrong_pi_is_one_message_before_anything_is_computed(here: Path, pi: str, message: str) -> None:
    result = salcli("sweep-pi", "--ood", OOD, "--pi", "0.1", "--pi", pi)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert result.stderr.count("error:") == 1
    assert not list(here.glob("sweep/**/gradients-wild.h5"))


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        (layout.prepared_ood_set(OOD), f"salcli prepare --ood {OOD}"),
        (layout.id_split(SEED), f"salcli prepare --seed {SEED}"),
        (layout.classifier(SEED), f"salcli train-id --seed {SEED}"),
        (layout.id_gradients("calibration", SEED), f"salcli extract-grads --seed {SEED}"),
    ],
    ids=["OOD set", "split", "classifier", "ID gradients"],
)
def test_a_missing_input_is_named_with_the_command_that_makes_it(here: Path, missing: Artifact, command: str) -> None:
    (here / missing.name).unlink()
    result = salcli("sweep-pi", "--ood", OOD, "--pi", "0.1")
    assert result.exit_code == 2
    assert f"{missing.name} is not there yet; make it with: {command}" in " ".join(result.output.split())
    assert not (here / "sweep").exists()


def test_a_pi_at_which_the_filter_fails_is_a_gap_among_the_others(here: Path) -> None:
    low = ["--set", "filter.threshold_quantile=0.01", "--set", "train_ood.epochs=1"]  # below every wild OOD sample
    result = salcli("sweep-pi", "--ood", OOD, "--pi", "0.1", "--pi", "1", *low)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert f"π 1, {OOD}, seed {SEED} is left out: filter.threshold_quantile 0.01 leaves nothing but candidate" in said
    assert list(pd.read_csv(here / "scratch/sweep/pi.csv")["pi"]) == [0.1]
    alone = salcli("sweep-pi", "--ood", OOD, "--pi", "1", *low)
    assert alone.exit_code == 2
    assert "the filter worked for no π" in alone.output


# --- the paper's points


def test_the_default_are_the_values_of_the_paper() -> None:
    assert shares_of_the_paper() == [0.05, 0.1, 0.2, 0.5, 0.7, 0.9, 1.0]


def test_the_papers_own_data_get_the_papers_own_points() -> None:
    params, _ = load_params(REPOSITORY / "salcli/presets/main-cifar100.yaml")
    curves = {(one.metric, one.ood): one.by_pi for one in paper_curves(params, ["svhn", "textures"])}
    assert set(curves) == {("err_in", "textures"), ("err_out", "textures"), ("fpr95", "svhn"), ("fpr95", "textures")}
    assert list(curves["err_out", "textures"].values()) == [0.37, 0.30, 0.22, 0.20, 0.23, 0.26, 0.29]
    assert curves["err_in", "textures"][0.05] == 0.031
    assert curves["fpr95", "textures"][1.0] == pytest.approx(0.0592)
    assert curves["fpr95", "svhn"] == pytest.approx({0.05: 0.0017, 0.1: 0.0007, 0.2: 0.0008, 0.5: 0.0002, 0.9: 0.0003})


def test_other_data_get_points_that_say_whose_they_are(quick_params: Params) -> None:
    curves = paper_curves(quick_params, quick_params.data.ood)
    assert all(one.ood is None and "other data: CIFAR-100, WRN-40-2" in one.name for one in curves)
    (of_five,) = [one for one in curves if "mean of five" in one.name]
    assert of_five.by_pi[0.05] == pytest.approx((0.17 + 6.21 + 0.94 + 0.84 + 5.77) / 500)


# --- seeds, and the folder


def test_mean_and_std_are_over_the_seeds_that_have_a_figure(tmp_path: Path) -> None:
    figures = {"fpr95": 0.1, "auroc": 1.0, "aupr_in": 1.0, "aupr_out": 1.0, "id_accuracy": 1.0, "zeta": 1.0}
    point = pi_sweep.SweepPoint(OOD, 0.5, 0, 10, 5, 0.2, None, **figures, zeta_without_noise=0.0)
    points = [point, replace(point, seed=1, err_in=0.4), replace(point, seed=2, err_in=None)]
    assert over_seeds(points, "err_in") == pytest.approx((0.3, 0.1 * 2**0.5))
    assert all(value != value for value in over_seeds(points, "err_out"))
    write_sweep_figure(points, [], "any data", [tmp_path / "figure.svg"])
    assert "3 seeds" in (tmp_path / "figure.svg").read_text()


def test_a_run_within_a_folder_looks_there_first_and_writes_there_alone(tmp_path: Path) -> None:
    below, above = Artifact("a", "make a"), Artifact("b", "make b")
    for name in ("a", "b", "own/b", "scratch/own/a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    whole = Workspace(tmp_path)
    run = whole.within(Artifact("own", "sweep"))
    assert [run.find(one).path.read_text() for one in (below, above)] == ["a", "own/b"]
    assert [run.find(one).made_by for one in (below, above)] == ["make a", "sweep"]
    assert run.target(below) == tmp_path / "own/a"
    assert whole.target(below) == tmp_path / "a"
    scratch = replace(whole, write_to_scratch=True).within(Artifact("own", "sweep"))
    assert [scratch.find(one).path.read_text() for one in (below, above)] == ["scratch/own/a", "b"]
    assert scratch.how_to_make(below) == "sweep --scratch"
    with pytest.raises(MissingArtifactError, match="c is not there yet; make it with: make c"):
        run.find(Artifact("c", "make c"))
