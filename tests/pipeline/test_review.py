"""The review loop: what a person decides is what SAL learns from, and nothing else gets through."""

import csv
import io
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from salcli.data.samples import Samples
from salcli.errors import ReviewError
from salcli.pipeline.review import (
    COLUMNS,
    Reviewed,
    ReviewRow,
    filter_mark,
    read_review,
    reviewed,
    rows_for_review,
    write_review,
)
from salcli.store.files import Found, Header, write_arrays, write_tensors
from salcli.store.formats import Candidates, WildSet, write_candidates, write_samples, write_wild_set
from salcli.store.layout import Experiment, Workspace, prepared_set

X = Experiment(1, "x", 0.1)
SCORES = np.array([3.0, 9.0, 1.0, 7.0, 5.0, 8.0, 2.0, 4.0])
CANDIDATES = {1, 3, 5}  # above 6


def candidates_of(scores: np.ndarray, threshold: float) -> Candidates:
    return Candidates(np.flatnonzero(scores > threshold), scores, np.arange(len(scores)) % 2, scores, threshold, "sal")


@pytest.fixture
def found(tmp_path: Path) -> Found:
    (tmp_path / "candidates.h5").write_bytes(b"one run of the filter")
    return Found(tmp_path / "candidates.h5")


def row(found: Found, index: int, decision: str, experiment: Experiment = X) -> ReviewRow:
    return ReviewRow(experiment.ood, experiment.seed, filter_mark(found, experiment), index, "", 0.5, "cat", decision)


def review(found: Found, rows: Iterable[ReviewRow], experiment: Experiment = X) -> Reviewed | None:
    path = found.path.with_name("review.csv")
    write_review(path, rows)
    return reviewed(path, candidates_of(SCORES, 6), found, experiment)


# --- what is listed


@pytest.mark.parametrize("has_id_data", [False, True])
def test_a_row_shows_file_and_class_but_no_file_of_wild_data_that_we_mixed(tmp_path: Path, has_id_data: bool) -> None:
    workspace = Workspace(tmp_path)
    images = np.zeros((8, 1, 1, 1), np.uint8)
    names = tuple(f"{i}.png" for i in range(8))
    id_set = Samples(images, np.arange(8) % 2, ("cat", "dog"))
    write_samples(workspace.target(prepared_set("labeled")), id_set, "labeled")
    write_samples(workspace.target(prepared_set("x")), Samples(images), "x", names=names)
    write_arrays(workspace.target(X.split), "id-split", {}, workspace.about(X.split))
    write_tensors(workspace.target(X.classifier), Header("classifier", workspace.about(X.classifier)), {})
    source = np.arange(8) if has_id_data else np.arange(8, 16)  # the index counts through the ID set first
    write_wild_set(workspace.target(X.wild), WildSet(source, np.arange(0)), workspace.about(X.wild))
    write_candidates(workspace.target(X.candidates), candidates_of(SCORES, 6), workspace.about(X.candidates))
    params: Any = SimpleNamespace(data=SimpleNamespace(id="labeled"))
    rows = rows_for_review(workspace, params, X, n_below=1)
    assert [(one.index, one.score, one.predicted, one.decision) for one in rows] == [
        (1, 9.0, "dog", "keep"), (5, 8.0, "dog", "keep"), (3, 7.0, "dog", "keep"), (4, 5.0, "cat", ""),
    ]  # fmt: skip
    assert [one.file for one in rows] == [""] * 4 if has_id_data else ["1.png", "5.png", "3.png", "4.png"]
    write_review(tmp_path / "review.csv", rows)
    outcome = reviewed(tmp_path / "review.csv", candidates_of(SCORES, 6), workspace.find(X.candidates), X)
    assert outcome is not None
    assert set(np.flatnonzero(outcome.is_candidate)) == CANDIDATES


# --- the file


@pytest.mark.parametrize("name", ["=cmd()", "\tx", 'a\nb, "hi"', os.fsdecode(b"\xff\xfe")])
def test_names_come_back_as_text_that_no_spreadsheet_runs(name: str, tmp_path: Path) -> None:
    path = tmp_path / "list.csv"
    write_review(path, [ReviewRow("ood", 0, "filter-1", 3, name, 0.5, name, "drop")])
    (written,) = csv.DictReader(io.StringIO(path.read_bytes().decode(), newline=""))
    assert tuple(written) == COLUMNS
    assert written["file"][0] not in "=+-@\t\r"
    assert [decision.word for decision in read_review(path)] == ["drop"]


@pytest.mark.parametrize("change", [
    lambda text: "\ufeff" + text,
    lambda text: text.replace(",", ";"),
    lambda text: text.replace(",", "\t").replace("\n", "\r\n"),
    lambda text: text.replace("keep", " KEEP "),
    lambda text: text + "\n,,,,,,,\n",
])  # fmt: skip
def test_spreadsheets_may_write_it_in_their_way(change: Callable[[str], str], tmp_path: Path) -> None:
    path = tmp_path / "list.csv"
    write_review(path, [ReviewRow("x", 0, "filter-1", i, "", 0.5, "cat", "keep") for i in range(3)])
    before = read_review(path)
    path.write_bytes(change(path.read_text()).encode())
    assert [replace(one, line=0) for one in read_review(path)] == [replace(one, line=0) for one in before]


@pytest.mark.parametrize(("content", "message"), [
    (None, "does not exist; write it with: salcli review"),
    (b"", "has no column ood, seed, filter, index, decision"),
    (b'ood,seed,filter,index,decision\n"a,0,f,1,keep\n', "line 2: unexpected end of data"),
    (b"ood,seed,filter,index,decision\na,0,f,1,kep\n", r"keep, drop, add or empty, got kep \(did you mean keep\?\)"),

])  # fmt: skip
def test_other_files_are_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "my.csv").write_bytes(content)
    with pytest.raises(ReviewError, match=message):
        read_review(tmp_path / "my.csv")


# --- what it changes


@given(data=st.data())
def test_decisions_are_set_arithmetic(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The slow truth: sets of indices."""
    folder = tmp_path_factory.mktemp("decisions")
    below = {*range(8)} - CANDIDATES
    dropped = data.draw(st.sets(st.sampled_from(sorted(CANDIDATES)), max_size=2))
    added = data.draw(st.sets(st.sampled_from(sorted(below))))
    listed = dropped | added | data.draw(st.sets(st.integers(0, 7), min_size=1))
    (folder / "candidates.h5").write_bytes(b"x")
    found = Found(folder / "candidates.h5")
    words = {i: "drop" if i in dropped else "add" if i in added else "keep" if i in CANDIDATES else "" for i in listed}
    outcome = review(found, [row(found, i, word) for i, word in words.items()])
    assert outcome
    assert set(np.flatnonzero(outcome.is_candidate)) == (CANDIDATES - dropped) | added
    assert (outcome.n_dropped, outcome.n_added, outcome.n_unseen) == (
        len(dropped), len(added), len(CANDIDATES - listed),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("decisions", "message"),
    [
        ([(99, "keep")], "wild sample 99 does not exist; there are 8"),
        ([(0, "keep")], "is not a candidate, so there is nothing to keep; write add"),
        ([(1, "add")], "is already a candidate; write keep or drop"),
        ([(1, "keep"), (1, "drop")], "has another decision than in line 2"),
        ([(1, "drop"), (3, "drop"), (5, "drop")], "drops every candidate of x, π 0.1, seed 1"),
    ],
)
def test_decisions_that_cannot_be_used_are_refused(
    decisions: list[tuple[int, str]], message: str, found: Found
) -> None:
    with pytest.raises(ReviewError, match=message):
        review(found, [row(found, index, word) for index, word in decisions])


def test_a_list_about_another_run_of_the_filter_is_refused(found: Found) -> None:
    with pytest.raises(ReviewError, match=r"line 2 is about another run of the filter .* salcli review --variant sal"):
        review(found, [replace(row(found, 1, "drop"), filter="filter-sal-pi-0.1-0123456789abcdef")])


@pytest.mark.parametrize(
    "other",
    [Experiment(2, "x", 0.1), Experiment(1, "y", 0.1), Experiment(1, "x", 0.5), Experiment(1, "x", 0.1, "sal-2")],
)
def test_a_list_about_another_experiment_changes_nothing(other: Experiment, found: Found) -> None:
    assert review(found, [row(found, 1, "drop", other)]) is None
    both = review(found, [row(found, 1, "drop", other), row(found, 3, "drop")])
    assert both
    assert set(np.flatnonzero(both.is_candidate)) == {1, 5}
