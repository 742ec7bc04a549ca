"""Tables of stages, histograms made of characters, progress, and names that are safe to print."""

from __future__ import annotations

import io
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

from salcli.errors import BadArtifactError, as_text, printable
from salcli.params.presets import default_params
from salcli.params.schema import validated
from salcli.pipeline.filter import Filtered, IdFit
from salcli.report import console as console_module
from salcli.report.console import ConsoleProgress
from salcli.report.file_view import file_view
from salcli.report.tables import filter_view, two_histograms
from salcli.sal.filter import SeparationErrors
from salcli.store.formats import Candidates
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


def test_the_filter_shows_its_errors_and_warns_where_the_theory_promises_little(filtered: Filtered) -> None:
    assert {"3.1%", "42.0%"} <= set(view(filtered).split())
    assert "warning" not in view(filtered)
    poor = replace(filtered, errors=None, n_unscored=3, fit=replace(filtered.fit, calibration_accuracy=0.89))
    said = " ".join(view(poor).split())
    assert said.count("unknown") == 3
    assert f"warning: {EXPERIMENT}: the classifier gets 99.0% of ID training and 89.0% of calibration" in said
    assert "3 calibration samples are predicted as classes" in said


# --- training


# --- predictions


@given(st.binary(min_size=1, max_size=20))
def test_any_file_name_is_safe_to_print(raw: bytes) -> None:
    name = os.fsdecode(raw)
    assert printable(name).isprintable()
    as_text(name).encode()
    assert printable("café, 猫") == as_text("café, 猫") == "café, 猫"


# --- inspect


@pytest.mark.parametrize("name", ["a.h5", "a.safetensors", "a.json", "a.txt"])
def test_inspect_refuses_what_it_cannot_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x89HDF\r\n\x1a\nnot really")
    with pytest.raises(BadArtifactError):
        file_view(tmp_path / name, top=3)


# --- progress


def test_progress_is_rare_lines_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for seconds, n_lines in ((10, 0), (0, 2)):
        monkeypatch.setattr(console_module, "SECONDS_BETWEEN_LINES", seconds)
        with ConsoleProgress().task("train-id, seed 0", 8, "images") as task:
            task.advance(2, epoch=1, loss=0.25)
            task.advance(6, epoch=2, loss=0.125)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == n_lines
    assert re.fullmatch(r"train-id, seed 0: 25%, [\d,]+ images/s, \d+ s left epoch 1 loss 0.25", lines[0])
