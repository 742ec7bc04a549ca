"""Tables of stages, histograms made of characters, progress, and names that are safe to print."""

from __future__ import annotations

import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from rich.console import Console, RenderableType

from salcli.data.catalogue import DATA_SETS
from salcli.detector.detector import Predictions, Scanned
from salcli.detector.predict import row_writer
from salcli.engine.training import Epoch
from salcli.errors import BadArtifactError, as_text, printable
from salcli.params.presets import default_params, presets
from salcli.params.schema import validated
from salcli.pipeline import toy
from salcli.pipeline.filter import Filtered, IdFit, Trial
from salcli.pipeline.train_id import ClassCheck, TrainedClassifier
from salcli.pipeline.train_ood import TrainedNetwork
from salcli.report import console as console_module
from salcli.report.console import ConsoleProgress
from salcli.report.figures import write_toy_figure
from salcli.report.file_view import file_view
from salcli.report.listings import LowestScores, data_json, data_table, preset_syntax, preset_table
from salcli.report.paper import paper_err_in_of_toy
from salcli.report.tables import class_notes, filter_view, toy_table, trained_table, two_histograms
from salcli.sal.filter import SeparationErrors
from salcli.store.files import Header, write_arrays, write_tensors
from salcli.store.formats import Candidates, write_candidates
from salcli.store.layout import Experiment

EXPERIMENT = Experiment(0, "far", 0.1)
FILTER = validated(default_params(), "params.yaml").filter


def shown(renderable: RenderableType, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    return text


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


# --- filter


@pytest.fixture
def filtered() -> Filtered:
    wild = np.random.default_rng(0).exponential(1, 300)
    index = np.flatnonzero(wild > 2)
    candidates = Candidates(index, wild, np.zeros(300, np.int64), wild[:50], 2.0, "sal")
    fit = IdFit(train_risk=0.02, train_accuracy=0.99, calibration_accuracy=0.95)
    return Filtered(EXPERIMENT, candidates, SeparationErrors(0.031, 0.42), fit, 0, 462, [], [])


def view(*results: Filtered) -> str:
    return shown(filter_view(results, FILTER))


def test_the_filter_shows_its_errors_where_the_truth_is_known(filtered: Filtered) -> None:
    assert {"3.1%", "42.0%"} <= set(view(filtered).split())
    assert view(replace(filtered, errors=None)).count("unknown") == 2


def test_the_filter_warns_where_the_theory_promises_little(filtered: Filtered) -> None:
    poor = replace(filtered, fit=replace(filtered.fit, calibration_accuracy=0.89))
    assert "warning" not in view(filtered)
    said = " ".join(view(poor).split())
    assert f"warning: {EXPERIMENT}: the classifier gets 99.0% of ID training and 89.0% of calibration" in said
    assert "3 calibration samples are predicted as classes" in view(replace(filtered, n_unscored=3))


def test_only_what_varies_between_experiments_is_a_column(filtered: Filtered) -> None:
    assert "π" not in view(filtered).partition("Candidate outliers")[2]
    other = replace(filtered, experiment=Experiment(0, "far", 0.5, "sal-paper"))
    columns = next(line.split() for line in view(filtered, other).splitlines() if "ERR_in" in line)
    assert columns[:5] == ["wild", "OOD", "π", "variant", "seed"]


def test_auto_marks_the_chosen_score_and_sorts_the_others(filtered: Filtered) -> None:
    trials = [Trial("sal", 2.0, 50, 0.1, 0.01, 0.5), Trial("msp", 1.0, 9, 0.02, 0.01, 0.0)]
    trials.append(Trial("energy", 1.0, 90, 0.2, 0.01, 1.0, SeparationErrors(0.05, 0.1), 0.9))
    chosen = replace(filtered, trials=trials, candidates=replace(filtered.candidates, score_name="energy"))
    lines = view(chosen).splitlines()
    rows = [line.split()[0] for line in lines if re.match(r"\s*(τ|−MSP|−Energy)\s.*\d", line)]
    assert rows[:3] == ["τ", "−Energy", "−MSP"]
    assert any("−Energy ◀" in line and "90.0%" in line for line in lines)


# --- training and toy


def test_phases_of_a_training_are_joined() -> None:
    phases = {"features": Epoch(20, 1.25, float("nan")), "head": Epoch(5, 0.5, float("nan"))}
    encoder = TrainedNetwork("knn-plus", "KNN+", Experiment(0), None, phases, 0.97, 0.91, [])
    assert "KNN+ 20 + 5 1.2500, 0.5000 97.00% 91.00%" in " ".join(shown(trained_table([encoder])).split())
    check = ClassCheck(0.5, 500, ("cat", "dog\n"), ("dog\n", "cat"), 0.52)
    notes = class_notes([TrainedClassifier(0, None, 0.1, 0.1, [], check)])
    assert any("no better than a guess" in note for note, _ in notes)


def test_the_toy_table_and_figure_show_both_scenarios(tmp_path: Path) -> None:
    runs = toy.run(range(1), toy.ToySizes(training=40, calibration=40, wild=40, outliers=20))
    text = shown(toy_table(runs))
    assert f"{paper_err_in_of_toy()['ring']:.1%}" in text
    assert text.count("the authors' code") == 2
    write_toy_figure(runs, "train", [tmp_path / "toy.png"])
    assert (tmp_path / "toy.png").read_bytes().startswith(b"\x89PNG")


# --- presets and data sets


def test_presets_and_data_sets_fit_and_say_what_has_to_be_fetched() -> None:
    text = shown(preset_table(presets().values()))
    assert all(name in text for name in presets())
    assert "digits-0-7°" in text
    assert "backbone: wrn-40-2" in shown(preset_syntax(presets()["main-cifar100"]), width=120)
    found = dict.fromkeys(DATA_SETS.values(), "missing")
    for width in (100, 80, 60):
        assert all(name in shown(data_table(found, width), max(width, 79)) for name in DATA_SETS)
    listed = json.loads(data_json(found, {"mine": Path("/no/such/path")}))
    assert [one["name"] for one in listed] == [*DATA_SETS, "mine"]
    assert listed[-1]["status"] == "missing"


# --- predictions


@given(st.binary(min_size=1, max_size=20))
def test_any_file_name_is_safe_to_print(raw: bytes) -> None:
    name = os.fsdecode(raw)
    assert printable(name).isprintable()
    as_text(name).encode()
    assert printable("café, 猫") == as_text("café, 猫") == "café, 猫"


def test_a_score_of_nan_is_the_least_id_like_and_no_number_in_json() -> None:
    values = np.array([0.1, np.nan], np.float32)
    predictions = Predictions(("cat", "dog"), values, values, np.array([True, False]), np.array([0.01, 0.5]))
    part = Scanned((Path("a.png"), Path("bad.png"), Path("c.png")), predictions, {1: "truncated"})
    lines, lowest = io.StringIO(), LowestScores(1)
    row_writer(lines, "jsonl")(part)
    lowest.write(part)
    assert [json.loads(line)["score"] for line in lines.getvalue().splitlines()] == [0.1, None, None]
    assert "c.png" in shown(lowest.table(100))


# --- inspect


def test_inspect_shows_every_kind_of_file(tmp_path: Path, filtered: Filtered) -> None:
    import torch

    write_candidates(tmp_path / "candidates.h5", filtered.candidates, {"seed": 0})
    best = int(filtered.candidates.wild_score.argmax())
    text = shown(file_view(tmp_path / "candidates.h5", top=3))
    assert "Top 3 candidates" in text
    assert re.search(rf"^ *{best} +{filtered.candidates.wild_score[best]:.4g} +0", text, re.MULTILINE)
    write_arrays(tmp_path / "empty.h5", "other", {"none": np.empty((0, 3))}, {})
    write_tensors(tmp_path / "net.safetensors", Header("classifier"), {"weight": torch.zeros(3, 2)})
    (tmp_path / "table.csv").write_text("[bold]a,b\n1,2\n")
    (tmp_path / "facts.json").write_text('{"a": 1}')
    parts = {"empty.h5": "0 × 3", "net.safetensors": "3 × 2", "table.csv": "[bold]a", "facts.json": "'a'"}
    for name, part in parts.items():
        assert part in shown(file_view(tmp_path / name, top=3))


@pytest.mark.parametrize("name", ["a.h5", "a.safetensors", "a.json", "a.txt"])
def test_inspect_refuses_what_it_cannot_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x89HDF\r\n\x1a\nnot really")
    with pytest.raises(BadArtifactError):
        file_view(tmp_path / name, top=3)


# --- progress


def test_progress_is_rare_lines_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ConsoleProgress().task("quick", 1000, "images") as task:
        for _ in range(1000):
            task.advance(1)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(console_module, "SECONDS_BETWEEN_LINES", 0)
    with ConsoleProgress().task("train-id, seed 0", 8, "images") as task:
        task.advance(2, epoch=1, loss=0.25)
        task.advance(6, epoch=2, loss=0.125)
    first, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"train-id, seed 0: 25%, [\d,]+ images/s, \d+ s left epoch 1 loss 0.25", first)
    assert re.fullmatch(r"train-id, seed 0: 100%, [\d,]+ images/s, 0 s left epoch 2 loss 0.125", last)
