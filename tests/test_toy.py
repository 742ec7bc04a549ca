"""The paper's example in the plane: its data, its filter, its figure."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPOSITORY
from PIL import Image
from test_cli import salcli

from salcli.artifacts.layout import Workspace
from salcli.params import load_params
from salcli.reporting.toy_figure import write_toy_figure
from salcli.reporting.toy_table import paper_err_in
from salcli.stages import prepare, toy, train_id
from salcli.stages.toy import CALIBRATIONS, ToyRun, ToySizes

FEW = ToySizes(training=400, calibration=200, wild=300, outliers=100)


@pytest.fixture(scope="module")
def few() -> list[ToyRun]:
    return toy.run([0], FEW)


@pytest.fixture(scope="module")
def as_in_the_paper() -> list[ToyRun]:
    return toy.run(range(4))


def err(runs: list[ToyRun], scenario: str, calibration: str) -> tuple[float, float]:
    errors = [run.errors(calibration) for run in runs if run.scenario == scenario]
    return float(np.mean([one.err_in for one in errors])), float(np.mean([one.err_out for one in errors]))


def test_both_scenarios_share_their_inliers_and_have_the_papers_sizes(as_in_the_paper: list[ToyRun]) -> None:
    ring, cluster = as_in_the_paper[:2]
    assert (ring.scenario, cluster.scenario) == ("ring", "cluster")
    assert (~ring.is_ood).sum() == 9_000
    assert ring.is_ood.sum() == 1_000
    assert torch.equal(ring.wild[~ring.is_ood], cluster.wild[~cluster.is_ood])
    assert torch.equal(ring.inlier_class.bincount(), torch.tensor([3_000] * 3))


def test_no_point_is_dealt_twice() -> None:
    parts = toy._deal(toy.points.load_gaussians_2d(), ToySizes(), seed=3)
    everything = torch.cat([part.images.flatten(1) for part in parts])
    assert len(everything.unique(dim=0)) == len(everything) == 15_000


def test_held_out_calibration_gives_the_promised_err_in(as_in_the_paper: list[ToyRun]) -> None:
    for scenario in ("ring", "cluster"):
        assert err(as_in_the_paper, scenario, "holdout")[0] == pytest.approx(0.05, abs=0.015)


def test_err_in_on_training_data_is_near_the_papers(as_in_the_paper: list[ToyRun]) -> None:
    """Over ten seeds 6.4% (ring) and 6.0% (cluster); docs/theory.md says why the first is two points below 8.4%."""
    assert paper_err_in() == {"ring": 0.084, "cluster": 0.064}
    for scenario, figure in paper_err_in().items():
        assert err(as_in_the_paper, scenario, "train")[0] == pytest.approx(figure, abs=0.03)


def test_the_cluster_is_found_and_most_of_the_ring(as_in_the_paper: list[ToyRun]) -> None:
    assert err(as_in_the_paper, "cluster", "train")[1] < 0.01
    assert err(as_in_the_paper, "ring", "train")[1] < 0.5


def test_a_shuffled_score_finds_nothing(few: list[ToyRun]) -> None:
    """What the tests above measure is the score: without its order ERR_out is as large as chance makes it."""
    run = few[1]
    shuffled = run.tau[torch.randperm(len(run.tau), generator=torch.Generator().manual_seed(0))]
    assert (shuffled[run.is_ood] <= run.thresholds["train"]).double().mean() > 0.5


def test_the_plane_shows_the_score(few: list[ToyRun]) -> None:
    """The square of a gradient's place along v is its τ."""
    for run in few:
        along_v = run.plane.projection[:, 0].square()
        matched = torch.isclose(along_v[:, None], run.tau[None], rtol=1e-6).any(1)
        assert matched.all()
        assert along_v[run.plane.is_ood].mean() > along_v[~run.plane.is_ood].mean()


def test_the_same_seed_gives_the_same_run_and_another_one_another(few: list[ToyRun]) -> None:
    again, other = toy.run([0], FEW), toy.run([1], FEW)
    assert torch.equal(again[0].tau, few[0].tau)
    assert not torch.equal(other[0].tau, few[0].tau)


def test_the_figure_is_written_as_png_and_svg_with_the_same_bytes(few: list[ToyRun], tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_toy_figure(few, "train", [tmp_path / name / "toy.png", tmp_path / name / "toy.svg"])
    for kind in ("png", "svg"):
        assert (tmp_path / "one" / f"toy.{kind}").read_bytes() == (tmp_path / "two" / f"toy.{kind}").read_bytes()
    text = "".join(ElementTree.parse(tmp_path / "one" / "toy.svg").getroot().itertext())
    assert all(f"({panel})" in text for panel in "abcd")
    with Image.open(tmp_path / "one" / "toy.png") as image:
        assert len(image.convert("RGB").getcolors(1 << 24) or []) > 100  # it is not blank


def test_the_command_shows_every_calibration_and_writes_the_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = salcli("toy", "--seeds", "1", "--first-seed", "2")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in (*CALIBRATIONS, "8.4%", "6.4%"))
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert {path.name for path in (tmp_path / "toy").iterdir()} == {"toy.png", "toy.svg"}


def test_an_unknown_calibration_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = salcli("toy", "--calibration", "hold-out")
    assert result.exit_code == 2
    assert "did you mean holdout?" in result.output
    assert not (tmp_path / "toy").exists()


def test_the_preset_trains_a_classifier_that_does_not_guess(tmp_path: Path) -> None:
    """With momentum, the weight decay of the authors' code leaves one that gets a third right."""
    params = load_params(REPOSITORY / "salcli" / "presets" / "toy.yaml")[0]
    workspace = Workspace(tmp_path)
    prepare.prepare_set(workspace, params.data, params.data.id)
    prepare.prepare_split(workspace, params.data, 0)
    assert train_id.run(workspace, params, 0).test_accuracy > 0.9
