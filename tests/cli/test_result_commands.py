"""Commands that show results and files: table, report, review, theory, toy, methods, presets."""

import csv
import io
import json
import re
from pathlib import Path

import pytest
from helpers.cli import files, refused, salcli
from helpers.quick import EXPERIMENT, OOD, REPOSITORY, SEED
from PIL import Image

from salcli.data.catalogue import DATA_SETS
from salcli.methods.base import built_in
from salcli.params.presets import presets
from salcli.pipeline import toy
from salcli.report.paper import paper_err_in_of_toy
from salcli.report.results import METRICS

ONE = ["--ood", OOD, "--seed", str(SEED)]


@pytest.fixture
def inside(built: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The built project as the current folder, for commands that write nothing there."""
    monkeypatch.chdir(built)
    return built


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
    bold = re.findall(r"\*\*([\d.]+)\*\*", shown["markdown"])
    assert bold == re.findall(r"\\textbf{([\d.]+)}", shown["latex"])
    assert len(bold) >= 3 * len(METRICS), "two sets and their average"
    assert max(map(len, shown["rich"].splitlines())) <= 100


def test_the_table_has_intervals_openoods_fpr95_and_sorted_sections(inside: Path) -> None:
    options = ("--intervals", "--fpr95", "ood-positive", "--sort", "auroc")
    assert "FPR95: OOD is positive, as in OpenOOD" in salcli("table", *options).stdout
    rows = json.loads(salcli("table", *options, "--format", "json").stdout)
    own = [row["auroc_mean"] for row in rows if row["ood"] == OOD]
    assert own == sorted(own, reverse=True)
    assert all(row["auroc_low"] <= row["auroc_mean"] <= row["auroc_high"] for row in rows)
    assert "leave --intervals out" in refused("table", "--paper", "--intervals", root=inside)
    assert "leave --intervals and --fpr95 out" in refused("table", "--estimates", "--intervals", root=inside)


def test_the_report_and_its_figures_are_written_where_asked(
    evaluated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every chart of the page is also a PNG and an SVG."""
    monkeypatch.chdir(evaluated)
    before, page, figures = files(evaluated), tmp_path / "pages" / "mine.html", tmp_path / "figures"
    result = salcli("report", *ONE, "--out", str(page), "--figures", str(figures), "--no-open", "--top", "5")
    assert result.exit_code == 0, result.stderr
    assert f"wrote {page}, {figures}/" in result.stdout
    drawn = {path.name for path in figures.iterdir()}
    assert len(drawn) == 2 * page.read_text().count('role="img"')
    assert {"filter-scores.png", "filter-scores.svg", "roc-sal.png", "scores-msp.svg"} <= drawn
    with Image.open(figures / "roc-sal.png") as picture:
        assert len(picture.convert("L").getcolors(256) or []) > 3  # not blank
    assert files(evaluated) == before


def test_a_list_for_review_is_overwritten_only_with_force_and_train_ood_takes_it(here: Path) -> None:
    result = salcli("review", *ONE, "--out", "mine.csv", "--below", "3")
    assert f"then: salcli train-ood --review mine.csv --ood {OOD} --seed {SEED}\n" in result.stdout
    (here / "mine.csv").write_text((here / "mine.csv").read_text(encoding="utf-8-sig").replace("keep", "drop", 2))
    assert "mine.csv exists already, perhaps with decisions" in refused("review", *ONE, "--out", "mine.csv", root=here)
    result = salcli("train-ood", *ONE, "--epochs", "1", "--method", "sal", "--review", "mine.csv")
    assert "reviewed: 2 candidates dropped, 0 wild samples added" in result.stdout
    assert (here / "scratch" / EXPERIMENT.network("sal").path).is_file()
    assert salcli("review", *ONE, "--out", "mine.csv", "--force", "--below", "0").exit_code == 0
    assert "mine.csv does not exist" in refused("train-ood", *ONE, "--review", "lost/mine.csv", root=here)


def test_theory_writes_its_numbers_and_figures(here: Path) -> None:
    result = salcli("theory", *ONE)
    assert max(len(line) for line in result.stdout.splitlines() if not line.startswith("wrote")) <= 100
    assert all((here / EXPERIMENT.theory(kind).path).stat().st_size > 100 for kind in ("json", "png", "svg"))


def test_the_toy_example_prints_its_table_and_draws_its_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fewer points; tests/pipeline/test_toy.py has the paper's number of them."""
    few = toy.ToySizes(training=400, calibration=200, wild=300, outliers=100)
    monkeypatch.setattr(toy, "ToySizes", lambda: few)
    result = salcli("toy", str(tmp_path), "--seeds", "1", "--first-seed", "2")
    assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["toy.png", "toy.svg"]
    assert f"{paper_err_in_of_toy()['ring']:.1%}" in result.stdout
    assert result.stdout.count("the authors' code") == 2


def test_every_method_preset_and_data_set_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for command, names in (("methods", built_in()), ("presets", presets()), ("data list", DATA_SETS)):
        shown = salcli(*command.split()).stdout
        assert max(map(len, shown.splitlines())) <= 100
        assert [name for name in names if f"{name} " not in shown.replace("°", " ")] == []
    rivals = (REPOSITORY / "docs" / "rivals.md").read_text(encoding="utf-8")
    markdown = salcli("methods", "--markdown").stdout.partition("\n\n")[2]
    assert markdown in rivals, "write it again: salcli methods --markdown"
    assert salcli("presets", "toy").stdout.startswith("# toy: three Gaussians in a plane")
