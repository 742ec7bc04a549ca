"""Tables and pictures: the figures are those of numpy, the best are bold, and everything fits its width."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from conftest import OOD, SEED
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from rich.console import Console
from test_cli import salcli

import salcli.reporting.progress as progress_module
from salcli.artifacts import layout
from salcli.errors import BadArtifactError, MissingArtifactError
from salcli.metrics_convention import FPR95_CONVENTION
from salcli.params import load_params
from salcli.reporting.filter_view import filter_view
from salcli.reporting.histogram import two_histograms
from salcli.reporting.results import LOWER_IS_BETTER, METRICS, Results
from salcli.reporting.results_table import LABELS, latex, markdown, rich_table
from salcli.stages import filter as filter_stage

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from rich.console import RenderableType

    from salcli.artifacts.layout import Workspace
    from salcli.stages.filter import Filtered

SETS, SEEDS, METHODS = ("far", "near_one"), (0, 3, 11), ("sal", "msp", "knn")


def write_runs(root: Path, figures: NDArray[np.floating], sets: tuple[str, ...] = SETS) -> Path:
    """metrics.json and filter.json of every run; figures: set × seed × method × metric, between 0 and 1."""
    for i, ood in enumerate(sets):
        for j in range(figures.shape[1]):
            folder = root / "runs" / str(SEEDS[j]) / ood
            folder.mkdir(parents=True)
            content: dict[str, object] = {
                METHODS[m]: dict(zip(METRICS, map(float, figures[i, j, m]), strict=True))
                for m in range(figures.shape[2])
            }
            (folder / "metrics.json").write_text(json.dumps({**content, "samples": {"id_test": 288, "ood_test": 106}}))
            counts = {"n_id_train": 462, "n_calibration": 115, "n_wild": 1642, "n_candidates": 70 + j}
            (folder / "filter.json").write_text(json.dumps(counts))
    return root / "runs"


@pytest.fixture
def figures() -> NDArray[np.floating]:
    return np.random.default_rng(0).uniform(size=(len(SETS), len(SEEDS), len(METHODS), len(METRICS)))


def shown(renderable: RenderableType, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def table(root: Path, *options: str) -> str:
    result = salcli("table", "--all", "--params", str(root / "params.yaml"), *options)
    assert result.exit_code == 0
    return str(result.stdout)


# --- the figures


@pytest.mark.parametrize("form", ["csv", "json"])
def test_means_and_deviations_are_those_of_numpy(tmp_path: Path, figures: NDArray[np.floating], form: str) -> None:
    write_runs(tmp_path, figures)
    text = table(tmp_path, "--format", form)
    lines = json.loads(text) if form == "json" else list(csv.DictReader(io.StringIO(text)))
    assert len(lines) == (len(SETS) + 1) * len(METHODS)
    percent = 100 * figures
    truth = {**dict(zip(SETS, percent, strict=True)), "average": percent.mean(axis=0)}
    for line in lines:
        own = truth[line["ood"]][:, METHODS.index(line["method"])]  # seed × metric
        assert int(line["n_seeds"]) == len(SEEDS)
        for i, metric in enumerate(METRICS):
            assert float(line[f"{metric}_mean"]) == pytest.approx(np.mean(own[:, i]))
            assert float(line[f"{metric}_std"]) == pytest.approx(np.std(own[:, i], ddof=1))


def test_the_best_average_fpr95_comes_first_everywhere(tmp_path: Path, figures: NDArray[np.floating]) -> None:
    write_runs(tmp_path, figures)
    fpr95 = figures[..., list(METRICS).index("fpr95")].mean(axis=(0, 1))
    ranking = [METHODS[place] for place in np.argsort(fpr95)]
    rows = json.loads(table(tmp_path, "--format", "json"))
    assert [row["method"] for row in rows] == ranking * (len(SETS) + 1)


def test_a_single_seed_has_no_deviation(tmp_path: Path, figures: NDArray[np.floating]) -> None:
    write_runs(tmp_path, figures[:1, :1], SETS[:1])
    (row, *_) = json.loads(table(tmp_path, "--format", "json"))
    assert row["fpr95_std"] is None
    (line, *_) = csv.DictReader(io.StringIO(table(tmp_path, "--format", "csv")))
    assert line["fpr95_std"] == ""
    for form in ("rich", "markdown", "latex"):
        text = table(tmp_path, "--format", form)
        assert "±" not in text
        assert r"\pm" not in text
        assert "average" not in text


def test_a_method_that_is_missing_in_a_run_is_left_out_of_it(tmp_path: Path, figures: NDArray[np.floating]) -> None:
    folder = write_runs(tmp_path, figures)
    path = folder / "0" / "far" / "metrics.json"
    content = json.loads(path.read_text())
    del content["sal"]
    path.write_text(json.dumps(content))
    rows = {(row["ood"], row["method"]): row for row in json.loads(table(tmp_path, "--format", "json"))}
    assert rows["far", "sal"]["n_seeds"] == 2
    assert rows["far", "sal"]["auroc_mean"] == pytest.approx(100 * figures[0, 1:, 0, 1].mean())


# --- the best are bold

# close to each other, and halfway between what one decimal can show: 34.95% may become 34.9 or 35.0
CLOSE = st.integers(0, 8).map(lambda step: (3490 + 5 * step) / 10_000) | st.floats(0, 1)


@given(st.data())
def test_bold_is_what_no_other_figure_on_the_page_beats(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """As printed: two figures that look the same are both bold, or neither."""
    values = data.draw(st.lists(CLOSE, min_size=15, max_size=15))
    figures = np.array(values).reshape(1, 1, len(METHODS), len(METRICS))
    root = tmp_path_factory.mktemp("bold")
    results = Results.from_folder(write_runs(root, figures, SETS[:1]))
    shutil.rmtree(root)
    lines = [line for line in markdown(results).splitlines() if line.startswith("| far ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")][2:] for line in lines]
    assert len(cells) == len(METHODS)
    for i, metric in enumerate(METRICS):
        column = [float(row[i].strip("*")) for row in cells]
        best = min(column) if metric in LOWER_IS_BETTER else max(column)
        assert [row[i].startswith("**") for row in cells] == [value == best for value in column]


def test_every_format_has_the_same_bold_figures(tmp_path: Path, figures: NDArray[np.floating]) -> None:
    results = Results.from_folder(write_runs(tmp_path, figures))
    console = Console(width=100, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(rich_table(results))
    assert isinstance(console.file, io.StringIO)
    figure = r"[\d.]+ ± [\d.]+"
    in_rich = re.findall(rf"\x1b\[1m({figure})\x1b\[0m", console.file.getvalue())
    in_markdown = re.findall(rf"\*\*({figure})\*\*", markdown(results))
    in_latex = re.findall(rf"\\textbf{{({figure})}}", latex(results).replace(r"$\pm$", "±"))
    assert in_rich == in_markdown == in_latex
    assert len(in_rich) >= (len(SETS) + 1) * len(METRICS)


# --- the formats


def test_the_table_for_people_fits_100_columns(tmp_path: Path, figures: NDArray[np.floating]) -> None:
    """Also with the widest figures that there are."""
    figures[0, 0], figures[0, 1:] = 1, 0
    write_runs(tmp_path, figures)
    text = table(tmp_path)
    assert max(map(len, text.splitlines())) <= 100
    assert re.search(r"33\.3 ± 57\.7", text)
    assert all(LABELS[method] in text for method in METHODS)
    assert " ".join(FPR95_CONVENTION.split()) in " ".join(text.split())


def test_markdown_is_one_table_with_equally_many_cells_in_every_row(
    tmp_path: Path, figures: NDArray[np.floating]
) -> None:
    write_runs(tmp_path, figures)
    lines = table(tmp_path, "--format", "markdown").splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in rows} == {len(METRICS) + 3}
    assert len(rows) == 2 + (len(SETS) + 1) * len(METHODS)
    assert set(rows[1]) <= set("|-: ")
    assert FPR95_CONVENTION in lines


def test_latex_has_complete_rows_and_no_raw_symbols(tmp_path: Path, figures: NDArray[np.floating]) -> None:
    write_runs(tmp_path, figures)
    lines = table(tmp_path, "--format", "latex").splitlines()
    body = [line for line in lines if not line.startswith("%")]
    assert body[0] == r"\begin{tabular}{llrrrrr}"
    assert body[-1] == r"\end{tabular}"
    rows = [line for line in body if line.endswith(r"\\")]
    assert {line.count("&") for line in rows} == {len(METRICS) + 1}
    assert len(rows) == 1 + (len(SETS) + 1) * len(METHODS)
    assert r"near\_one" in "\n".join(body)
    assert not re.search(r"[±↓↑]|(?<!\\)_", "\n".join(body))
    assert "\n".join(body).count("{") == "\n".join(body).count("}")


def test_the_notes_count_the_samples(tmp_path: Path, figures: NDArray[np.floating]) -> None:
    write_runs(tmp_path, figures)
    text = table(tmp_path, "--format", "markdown")
    assert "Mean ± std over 3 seeds (average: over the OOD sets); best in bold; sorted by average FPR95." in text
    assert (
        "Samples: ID train 462, ID calibration 115, wild 1,642, ID test 288, far test 106, far candidates 70–72, "
        "near_one test 106, near_one candidates 70–72." in text
    )


# --- the folder


def test_a_folder_that_is_no_run_is_passed_over(tmp_path: Path, figures: NDArray[np.floating]) -> None:
    folder = write_runs(tmp_path, figures)
    before = table(tmp_path)
    shutil.copytree(folder / "0", folder / "backup of 0")
    assert table(tmp_path) == before


def test_runs_without_a_filter_are_shown_without_its_counts(tmp_path: Path, figures: NDArray[np.floating]) -> None:
    for path in write_runs(tmp_path, figures).rglob("filter.json"):
        path.unlink()
    assert "Samples: ID test 288, far test 106, near_one test 106." in table(tmp_path, "--format", "markdown")


@pytest.mark.parametrize("content", ["[]", "{}", '{"samples": 3}', '{"samples": {"id_test": 1}}', "3", "null",
    '{"sal": {"fpr95": 0.1}, "samples": {"id_test": 1, "ood_test": 1}}',
    '{"sal": 1, "samples": {"id_test": 1, "ood_test": 1}}',
    '{"sal": {"fpr95": "low", "auroc": 1, "aupr_in": 1, "aupr_out": 1, "id_accuracy": 1}, '
    '"samples": {"id_test": 1, "ood_test": 1}}',
])  # fmt: skip
def test_foreign_figures_are_refused_with_the_command_that_makes_them(
    tmp_path: Path, figures: NDArray[np.floating], content: str
) -> None:
    folder = write_runs(tmp_path, figures)
    (folder / "3" / "far" / "metrics.json").write_text(content)
    with pytest.raises(BadArtifactError, match=r"metrics.json is damaged .*again: salcli evaluate --ood far --seed 3$"):
        Results.from_folder(folder)


def test_an_empty_folder_says_how_to_fill_it(tmp_path: Path) -> None:
    with pytest.raises(MissingArtifactError, match="make one with: dvc repro, or salcli evaluate"):
        Results.from_folder(tmp_path)


# --- the histogram

SCORES = arrays(np.float64, st.integers(1, 50), elements=st.floats(-1e6, 1e6) | st.floats(0, 1e-12) | st.just(0.0))


@given(SCORES, SCORES, st.floats(-1e6, 1e6) | st.just(0.0))
def test_a_histogram_shows_every_sample_once_and_fits(
    left: NDArray[np.floating], right: NDArray[np.floating], threshold: float
) -> None:
    lines = two_histograms(left, right, ("wild", "calibration (holdout)"), threshold).plain.rstrip("\n").splitlines()
    shares = np.array([[float(share) for share in re.findall(r"([\d.]+)%", line)] for line in lines[1:]])
    assert shares.shape[1] == 2
    assert shares.sum(axis=0) == pytest.approx([100, 100], abs=1)
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith("T ") for line in lines) <= 1


def test_no_bar_crosses_the_threshold() -> None:
    scores = np.arange(100.0)
    text = two_histograms(scores, scores, ("wild", "calibration"), 89.0).plain
    _, at, above = text.partition("\nT ")
    assert at
    shares = [float(share) for share in re.findall(r"([\d.]+)%", above)][::2]
    assert sum(shares) == pytest.approx(11, abs=0.5)  # 89 itself begins the bin; candidates are those above


# --- what the filter says


@pytest.fixture
def filtered(workspace: Workspace) -> Filtered:
    params, _ = load_params(workspace.root / "params.yaml")
    return filter_stage.run(workspace, params, OOD, SEED)


def view(workspace: Workspace, *results: Filtered) -> str:
    params, _ = load_params(workspace.root / "params.yaml")
    return shown(filter_view(results, params.filter))


def test_the_filter_shows_its_errors_where_the_truth_is_known(workspace: Workspace, filtered: Filtered) -> None:
    assert filtered.errors
    text = view(workspace, filtered)
    assert f"{filtered.errors.err_in:.1%}" in text
    assert f"{filtered.errors.err_out:.1%}" in text
    (workspace.root / layout.wild_truth(OOD, SEED).name).unlink()
    params, _ = load_params(workspace.root / "params.yaml")
    assert view(workspace, filter_stage.run(workspace, params, OOD, SEED)).count("unknown") == 2


def test_the_filter_warns_where_the_theory_promises_little(workspace: Workspace, filtered: Filtered) -> None:
    good = replace(filtered, fit=replace(filtered.fit, train_accuracy=0.99, calibration_accuracy=0.95), n_unscored=0)
    poor = replace(good, fit=replace(good.fit, calibration_accuracy=0.89))
    assert "warning" not in view(workspace, good)
    said = " ".join(view(workspace, poor).split())
    assert f"warning: {OOD}, seed {SEED}: the classifier gets 99.0% of ID training and 89.0% of calibration" in said
    assert "3 calibration samples are predicted as classes" in view(workspace, replace(good, n_unscored=3))


# --- progress


def test_progress_is_lines_where_nobody_watches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_module, "SECONDS_BETWEEN_LINES", 0)
    with progress_module.ConsoleProgress().task("train-id, seed 0", 8, "images") as task:
        task.advance(2, epoch=1, loss=0.25)
        task.advance(6, epoch=2, loss=0.125)
    first, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"train-id, seed 0: 25%, [\d,]+ images/s, \d+ s left epoch 1 loss 0.25", first)
    assert re.fullmatch(r"train-id, seed 0: 100%, [\d,]+ images/s, 0 s left epoch 2 loss 0.125", last)


def test_progress_lines_are_rare(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_module.ConsoleProgress().task("quick", 1000, "images") as task:
        for _ in range(1000):
            task.advance(1)
    assert capsys.readouterr().out == ""


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(progress_module, "console", terminal)
    with progress_module.ConsoleProgress().task("extract-grads", 4, "images") as task:
        task.advance(4, loss=0.5)
    assert isinstance(terminal.file, io.StringIO)
    text = terminal.file.getvalue()
    assert "extract-grads" in text
    assert "100%" in text
    assert "images/s" in text
    assert "loss 0.5" in text


def test_a_narrow_terminal_gets_the_means_uncut(tmp_path: Path, figures: NDArray[np.floating]) -> None:
    results = Results.from_folder(write_runs(tmp_path, figures))
    text = shown(rich_table(results, width=80), width=80)
    assert "±" not in text.replace("± std", "")
    for row in results.rows():
        assert all(f"{value:.1f}" in text for value in row.mean.values())
    assert all(ood in text for ood in SETS)


def test_evaluations_that_are_not_asked_for_are_left_out_and_counted(
    tmp_path: Path, figures: NDArray[np.floating]
) -> None:
    folder = write_runs(tmp_path, figures)
    asked_for = {(SETS[0], SETS[0], SEEDS[0])}
    results = Results.from_folder(folder, asked_for)
    assert set(zip(results.runs["ood"], results.runs["test_set"], results.runs["seed"], strict=True)) == asked_for
    n_left_out = len(SETS) * len(SEEDS) - 1
    assert f"Left out: {n_left_out} evaluations" in shown(rich_table(results))
