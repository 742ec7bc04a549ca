"""Commands that show results and files: table, report, review, theory, sweep-pi, toy, methods, presets."""

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
from helpers.cli import files, refused, salcli
from helpers.quick import EXPERIMENT, OOD, SEED
from safetensors.numpy import load_file

from salcli.methods.base import built_in
from salcli.params.presets import presets
from salcli.store.files import Found, read_header
from salcli.store.formats import read_candidates
from salcli.store.layout import Workspace

ONE = ["--ood", OOD, "--seed", str(SEED)]


@pytest.fixture
def inside(built: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The built project as the current folder, for commands that write nothing there."""
    monkeypatch.chdir(built)
    return built


# --- table


def test_the_table_in_every_format_has_the_same_numbers(inside: Path) -> None:
    shown = {kind: salcli("table", "--format", kind).stdout for kind in ("rich", "markdown", "latex", "csv", "json")}
    metrics = json.loads((inside / EXPERIMENT.evaluation("metrics.json").path).read_text())
    auroc = 100 * metrics["knn"]["auroc"]
    by_csv = {(row["ood"], row["method"]): row for row in csv.DictReader(io.StringIO(shown["csv"]))}
    by_json = {(row["ood"], row["method"]): row for row in json.loads(shown["json"])}
    assert by_csv.keys() == by_json.keys()
    assert float(by_csv[OOD, "knn"]["auroc_mean"]) == pytest.approx(auroc)
    assert by_json[OOD, "knn"]["auroc_mean"] == pytest.approx(auroc)
    for kind in ("rich", "markdown", "latex"):
        (line, *_) = [line for line in shown[kind].splitlines() if "KNN" in line]
        assert f"{auroc:.1f}" in line
    assert "| --- | --- | ---: |" in shown["markdown"]
    assert r"\begin{tabular}" in shown["latex"]
    assert max(map(len, shown["rich"].splitlines())) <= 100


@pytest.mark.parametrize("option", ["--all", "--scratch"])
def test_the_paper_is_compared_with_what_params_ask_for(inside: Path, option: str) -> None:
    message = refused("table", "--paper", option, root=inside)
    assert message == f"error: --paper compares what params.yaml asks for; leave {option} out\n"


def test_results_that_the_paper_does_not_have_are_refused(inside: Path) -> None:
    message = refused("table", "--paper", root=inside)
    assert "the paper reports no FPR95 or AUROC for these params" in message
    assert "looked for: digits-0-7, small-cnn, π 0.1" in message


# --- report


@pytest.mark.slow
def test_the_report_and_its_figures_are_written_where_asked(inside: Path, tmp_path: Path) -> None:
    page, figures = tmp_path / "pages" / "mine.html", tmp_path / "figures"
    before = files(inside)
    result = salcli("report", *ONE, "--out", str(page), "--figures", str(figures), "--no-open", "--top", "5")
    assert result.exit_code == 0, result.stderr
    assert f"wrote {page}, {figures}/" in result.stdout
    assert page.read_text().startswith("<!DOCTYPE html>")
    drawn = {path.name for path in figures.iterdir()}
    assert drawn
    assert {Path(name).with_suffix(".png").name for name in drawn} <= drawn
    assert {Path(name).with_suffix(".svg").name for name in drawn} <= drawn
    assert files(inside) == before


def test_a_report_needs_a_file_to_write_and_an_experiment_that_was_run(inside: Path) -> None:
    message = refused("report", "--out", "runs", root=inside)
    assert message == "error: --out runs is a folder; name a file, for example runs/report.html\n"
    assert "runs/7/" in refused("report", "--seed", "7", root=inside)
    assert "no variant is called sall" in refused("report", "--variant", "sall", root=inside)


# --- review


def test_a_review_is_written_once_and_again_only_with_force(here: Path) -> None:
    result = salcli("review", *ONE, "--out", "lists/mine.csv", "--below", "3")
    assert result.exit_code == 0, result.stderr
    assert "wrote lists/mine.csv; " in result.stdout
    assert (
        "next: correct the column decision, then: salcli train-ood --review lists/mine.csv "
        f"--ood {OOD} --seed {SEED}\n" in result.stdout
    )
    with (here / "lists/mine.csv").open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    n = len(read_candidates(Workspace(here).find(EXPERIMENT.candidates)).index)
    assert [row["decision"] for row in rows] == ["keep"] * n + [""] * 3
    message = refused("review", *ONE, "--out", "lists/mine.csv", root=here)
    assert "lists/mine.csv exists already, perhaps with decisions; name another --out" in message
    assert salcli("review", *ONE, "--out", "lists/mine.csv", "--force", "--below", "0").exit_code == 0
    assert len((here / "lists/mine.csv").read_text().splitlines()) == n + 1


def test_an_untouched_list_trains_the_same_network_and_a_corrected_one_another(here: Path) -> None:
    salcli("review", *ONE)
    lines = (here / "review.csv").read_text(encoding="utf-8-sig").splitlines()
    corrected = [line.replace("keep", "drop") if i in (1, 2) else line for i, line in enumerate(lines)]
    (here / "corrected.csv").write_text("\n".join(corrected))
    networks, path = [], here / "scratch" / EXPERIMENT.network("sal").path
    for options in ((), ("--review", "review.csv"), ("--review", "corrected.csv")):
        result = salcli("train-ood", *ONE, "--epochs", "1", "--method", "sal", *options)
        assert result.exit_code == 0, result.stderr
        networks.append(load_file(path))
    plain, same, other = ({name: tensor.tobytes() for name, tensor in one.items()} for one in networks)
    assert plain == same
    assert plain != other
    assert "reviewed: 2 candidates dropped, 0 wild samples added" in result.stdout
    n = len(read_candidates(Workspace(here).find(EXPERIMENT.candidates)).index)
    assert read_header(Found(path)).about["n_outliers"] == n - 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "mine.csv does not exist; write it with: salcli review --out mine.csv"),
        ("ood,seed\n1,2\n", "mine.csv has no column filter, index, decision, so it is not a review list"),
    ],
)
def test_a_list_that_cannot_be_used_is_refused(here: Path, content: str | None, message: str) -> None:
    if content is not None:
        (here / "mine.csv").write_text(content)
    assert message in refused("train-ood", *ONE, "--review", "mine.csv", root=here)


# --- theory, sweep-pi, toy


def test_theory_writes_its_numbers_and_figures(here: Path) -> None:
    result = salcli("theory", *ONE)
    assert result.exit_code == 0, result.stderr
    for kind in ("json", "png", "svg"):
        assert (here / EXPERIMENT.theory(kind).path).stat().st_size > 100
    assert max(len(line) for line in result.stdout.splitlines() if not line.startswith("wrote")) <= 100


def test_a_sweep_needs_several_shares(here: Path) -> None:
    message = refused("sweep-pi", *ONE, root=here)
    assert message == (
        "error: only π 0.1 has been built; set data.pi to several shares, such as [0.05, 0.1, 0.5], and run dvc repro\n"
    )
    assert "nothing has been built" in refused("sweep-pi", "--seed", "8", root=here)
    shutil.copytree(here / f"runs/{SEED}/{OOD}/pi-0.1", here / f"runs/{SEED}/{OOD}/pi-0.5")
    result = salcli("sweep-pi", *ONE, "--out", "drawn")
    assert result.exit_code == 0, result.stderr
    assert "wrote drawn/pi.csv, drawn/pi.png, drawn/pi.svg; " in result.stdout
    with (here / "drawn/pi.csv").open() as file:
        assert [float(row["pi"]) for row in csv.DictReader(file)] == [0.1, 0.5]


@pytest.mark.slow
def test_the_toy_example_draws_its_figure(tmp_path: Path) -> None:
    result = salcli("toy", str(tmp_path), "--seeds", "1", "--first-seed", "2")
    assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["toy.png", "toy.svg"]
    assert f"wrote {tmp_path}/toy.png" in result.stdout


# --- lists


def test_every_method_is_listed() -> None:
    shown, markdown = salcli("methods").stdout, salcli("methods", "--markdown").stdout
    assert max(map(len, shown.splitlines())) <= 100
    for name in built_in():
        assert any(f" {name} " in line for line in shown.splitlines())
        assert f"`{name}`" in markdown or f"| {name} |" in markdown


def test_every_preset_is_listed_and_shown() -> None:
    shown = salcli("presets").stdout
    assert max(map(len, shown.splitlines())) <= 100
    assert all(f" {name} " in shown for name in presets())
    one = salcli("presets", "toy").stdout
    assert one.startswith("# toy: three Gaussians in a plane")
    assert "\n  id: gaussians-2d" in one
