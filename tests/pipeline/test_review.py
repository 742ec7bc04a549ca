"""The review loop: what a person decides is what SAL learns from, and nothing else gets through."""

import csv
import io
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from salcli.errors import SalError
from salcli.project.review import COLUMNS, ReviewRow, write_review
from salcli.store.files import Found
from salcli.store.formats import Candidates, Origin
from salcli.store.layout import Experiment
from salcli.store.review import Reviewed, filter_mark, read_review, reviewed

X = Experiment(1, "x", 0.1)
SCORES = np.array([3.0, 9.0, 1.0, 7.0, 5.0, 8.0, 2.0, 4.0])
CANDIDATES = {1, 3, 5}  # above 6


def candidates_of(scores: np.ndarray, threshold: float) -> Candidates:
    index, classes = np.flatnonzero(scores > threshold), np.arange(len(scores)) % 2
    return Candidates(index, scores, classes, scores, scores * np.nan, classes, threshold, "sal")


@pytest.fixture
def found(tmp_path: Path) -> Found:
    (tmp_path / "candidates.h5").write_bytes(b"one run of the filter")
    return Found(tmp_path / "candidates.h5")


def row(found: Found, index: int, decision: str, experiment: Experiment = X) -> ReviewRow:
    return ReviewRow(
        experiment.ood, experiment.seed, filter_mark(found, experiment), index, "", None, "", 0.5, 0, "cat", decision
    )


def review(found: Found, rows: Iterable[ReviewRow], experiment: Experiment = X) -> Reviewed | None:
    path = found.path.with_name("review.csv")
    write_review(path, rows)
    return reviewed(path, candidates_of(SCORES, 6), found, experiment)


# --- the file


@pytest.mark.parametrize("name", ["=cmd()", "\tx", 'a\nb, "hi"', os.fsdecode(b"\xff\xfe")])
def test_names_come_back_as_text_that_no_spreadsheet_runs(name: str, tmp_path: Path) -> None:
    path = tmp_path / "list.csv"
    write_review(path, [ReviewRow("ood", 0, "filter-1", 3, name, 3, name, 0.5, 0, name, "drop")])
    (written,) = csv.DictReader(io.StringIO(path.read_bytes().decode(), newline=""))
    assert tuple(written) == COLUMNS
    assert written["file"][0] not in "=+-@\t\r"
    assert [decision.word for decision in read_review(path)] == ["drop"]


def test_an_image_in_an_array_has_no_file_of_its_own() -> None:
    rows = [
        ("day/1.png", None, ""),
        ("day/1.png", 7, "day/1.png"),
        ("wild.npz", 7, ""),
        ("v.npz", 7, "r7"),
        ("", None, ""),
    ]
    found = [Origin(*origin).is_image_file for origin in rows]
    assert found == [True, True, False, False, False]


@pytest.mark.parametrize("change", [
    lambda text: "\ufeff" + text,
    lambda text: text.replace(",", ";"),
    lambda text: text.replace(",", "\t").replace("\n", "\r\n"),
    lambda text: text.replace("keep", " KEEP "),
    lambda text: text + "\n,,,,,,,,,\n",
])  # fmt: skip
def test_spreadsheets_may_write_it_in_their_way(change: Callable[[str], str], tmp_path: Path) -> None:
    path = tmp_path / "list.csv"
    write_review(path, [ReviewRow("x", 0, "filter-1", i, "", None, "", 0.5, 0, "cat", "keep") for i in range(3)])
    before = read_review(path)
    path.write_bytes(change(path.read_text()).encode())
    assert [replace(one, line=0) for one in read_review(path)] == [replace(one, line=0) for one in before]


@pytest.mark.parametrize(("content", "message"), [
    (None, "does not exist; write it with: salcli review"),
    (b"", "has no column ood, seed, filter, index, decision"),
    (b"ood,seed,filter,index,decision\na,0,f,1,kep\n", r"keep, drop, add or empty, got kep \(did you mean keep\?\)"),

])  # fmt: skip
def test_other_files_are_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "my.csv").write_bytes(content)
    with pytest.raises(SalError, match=message):
        read_review(tmp_path / "my.csv")


# --- what it changes


@settings(max_examples=30)
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
        ([(0, "keep")], "is not a candidate, so there is nothing to keep; write add"),
        ([(1, "keep"), (1, "drop")], "has another decision than in line 2"),
        ([(1, "drop"), (3, "drop"), (5, "drop")], "drops every candidate of x, π 0.1, seed 1"),
    ],
)
def test_decisions_that_cannot_be_used_are_refused(
    decisions: list[tuple[int, str]], message: str, found: Found
) -> None:
    with pytest.raises(SalError, match=message):
        review(found, [row(found, index, word) for index, word in decisions])


def test_a_list_about_another_run_of_the_filter_is_refused(found: Found) -> None:
    with pytest.raises(SalError, match=r"line 2 is about another run of the filter .* salcli review --variant sal"):
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
