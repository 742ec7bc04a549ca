"""Tables of stages, histograms made of characters, and names that are safe to print."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import numpy as np
import pytest
from helpers.cli import shown
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from salcli.errors import as_text, printable
from salcli.params.presets import default_params
from salcli.params.schema import validated
from salcli.pipeline.filter import Filtered, IdFit
from salcli.report.stage_tables import filter_view, two_histograms
from salcli.sal.tau import SeparationErrors
from salcli.store.formats import Candidates
from salcli.store.layout import Experiment

EXPERIMENT = Experiment(0, "far", 0.1)
FILTER = validated(default_params(), "params.yaml").filter


# --- the histogram

SCORES = arrays(np.float64, st.integers(1, 50), elements=st.floats(-1e6, 1e6) | st.floats(0, 1e-12) | st.just(0.0))


@settings(max_examples=40)
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


def candidates_of(n_outliers: int) -> Candidates:
    rng = np.random.default_rng(0)
    wild, calibration = rng.exponential(1, 300), rng.exponential(1, 100)
    wild[:n_outliers] += 3
    return Candidates(np.flatnonzero(wild > 3), wild, np.zeros(300, np.int64), calibration, 3.0, "sal")


@pytest.fixture
def filtered() -> Filtered:
    fit = IdFit(train_risk=0.02, train_accuracy=0.99, calibration_accuracy=0.75)
    return Filtered(EXPERIMENT, candidates_of(60), SeparationErrors(0.031, 0.42), fit, 0, 462, [], [])


def view(*results: Filtered) -> str:
    return shown(filter_view(results, FILTER))


def test_the_filter_shows_its_errors_and_warns_where_it_finds_nothing(filtered: Filtered) -> None:
    assert {"3.1%", "42.0%"} <= set(view(filtered).split())
    assert "warning" not in view(filtered), "75% right is no reason: with many classes τ may separate well"
    nothing = replace(filtered, errors=None, n_unscored=3, candidates=candidates_of(0))
    said = " ".join(view(nothing).split())
    assert "unknown" not in said
    assert "ERR_out" not in said, "columns of what nobody knows are left out"
    assert f"warning: {EXPERIMENT}: τ finds no more than ID data alone would give" in said
    assert "the classifier gets 99.0% of ID training and 75.0% of calibration data right" in said
    assert "3 calibration samples are predicted as classes" in said


# --- names


@given(st.binary(min_size=1, max_size=20))
def test_any_file_name_is_safe_to_print(raw: bytes) -> None:
    name = os.fsdecode(raw)
    assert printable(name).isprintable()
    as_text(name).encode()
    assert printable("café, 猫") == as_text("café, 猫") == "café, 猫"
