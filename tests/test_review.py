"""The review loop: what a person decides is what SAL learns from, and nothing else gets through."""

from __future__ import annotations

import csv
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from conftest import OOD, SEED
from fake_data import lay_out
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from test_cli import here, salcli  # noqa: F401

from salcli.artifacts import layout
from salcli.artifacts.candidates import Candidates, read_candidates
from salcli.artifacts.checkpoint import read_header
from salcli.artifacts.images import read_file_names
from salcli.artifacts.layout import Found, Workspace
from salcli.artifacts.review import COLUMNS, ReviewRow, filter_mark, read_review, write_review
from salcli.params import load_params
from salcli.stages import prepare
from salcli.stages.reviewed import reviewed
from salcli.stages.wild_files import wild_files

if TYPE_CHECKING:
    from collections.abc import Callable

ONE = ("--ood", OOD, "--seed", str(SEED))
TRAIN = ("train-ood", "--method", "sal", *ONE, "--set", "train_ood.epochs=1")
NETWORK = layout.trained_network("sal", OOD, SEED).name


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_bytes().decode(), newline="")))


def rewrite(path: Path, rows: list[dict[str, str]], **options: str) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, **options)  # type: ignore[arg-type]
    writer.writeheader()
    writer.writerows(rows)
    path.write_bytes(text.getvalue().encode())


@pytest.fixture
def written(here: Path) -> Path:  # noqa: F811
    assert salcli("review", *ONE, "--below", "5").exit_code == 0
    return here / "review.csv"


# --- what is written


def test_the_list_holds_every_candidate_by_score_and_then_what_lies_just_below(written: Path) -> None:
    candidates = read_candidates(Workspace(written.parent).find(layout.candidates(OOD, SEED)))
    order = sorted(range(len(candidates.wild_score)), key=lambda i: -candidates.wild_score[i])
    n = int((candidates.wild_score > candidates.threshold).sum())
    rows = rows_of(written)
    assert [int(row["index"]) for row in rows] == order[: n + 5]
    assert [row["decision"] for row in rows] == ["keep"] * n + [""] * 5
    assert [float(row["score"]) for row in rows] == pytest.approx(candidates.wild_score[order[: n + 5]], rel=1e-4)
    by_index = dict(zip(candidates.index.tolist(), candidates.predicted.tolist(), strict=True))
    assert [row["predicted"] for row in rows[:n]] == [str(by_index[int(row["index"])]) for row in rows[:n]]
    assert {row["file"] for row in rows} == {""}  # of a mixture of ours, names would tell the truth


def test_all_experiments_go_into_one_list(here: Path) -> None:  # noqa: F811
    result = salcli("review", "--below", "0", "--out", "all.csv")
    assert result.exit_code == 0
    assert {(row["ood"], row["seed"]) for row in rows_of(here / "all.csv")} == {(OOD, "0"), ("photo-patches", "0")}
    assert "salcli train-ood --method sal --review all.csv" in result.stdout


def test_a_list_that_is_there_is_not_overwritten(written: Path) -> None:
    written.write_text("my work")
    result = salcli("review", *ONE)
    assert result.exit_code == 2
    assert "review.csv is there already" in result.stderr
    assert written.read_text() == "my work"
    assert salcli("review", *ONE, "--force").exit_code == 0
    assert written.read_text() != "my work"


@pytest.mark.parametrize("name", ["=cmd()", "+1", "-1", "@x", "\tx", "a\nb", 'say "hi", you', os.fsdecode(b"\xff\xfe")])
def test_names_come_back_as_text_that_no_spreadsheet_runs(name: str, tmp_path: Path) -> None:
    write_review(tmp_path / "list.csv", [ReviewRow("ood", 0, "filter-1", 3, name, 0.5, name, "drop")])
    (row,) = rows_of(tmp_path / "list.csv")
    assert row["file"][0] not in "=+-@\t\r"
    assert [decision.word for decision in read_review(tmp_path / "list.csv")] == ["drop"]


# --- what is read


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


def fake(scores: np.ndarray, threshold: float) -> Candidates:
    index = np.flatnonzero(scores > threshold)
    return Candidates(index, scores[index], index * 0, scores, scores, threshold, "sal", "n", "w")


@given(data=st.data())
def test_decisions_are_set_arithmetic(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The slow truth: sets of indices."""
    folder = tmp_path_factory.mktemp("decisions")
    candidates = fake(np.arange(8.0), 4.5)
    above, below = {5, 6, 7}, {0, 1, 2, 3, 4}
    dropped = data.draw(st.sets(st.sampled_from(sorted(above)), max_size=2))
    added = data.draw(st.sets(st.sampled_from(sorted(below))))
    listed = dropped | added | data.draw(st.sets(st.sampled_from(sorted(above | below)), min_size=1))
    (folder / "candidates.h5").write_bytes(b"x")
    found = Found(folder / "candidates.h5")
    words = {i: "drop" if i in dropped else "add" if i in added else "keep" if i in above else "" for i in listed}
    rows = [ReviewRow("x", 1, filter_mark(found), i, "", 0.0, "", word) for i, word in words.items()]
    write_review(folder / "list.csv", rows)
    outcome = reviewed(folder / "list.csv", candidates, found, "x", 1)
    assert outcome
    assert set(np.flatnonzero(outcome.is_candidate)) == (above - dropped) | added
    assert (outcome.n_dropped, outcome.n_added, outcome.n_unseen) == (len(dropped), len(added), len(above - listed))


def edit(field: str, value: str, line: int = 0) -> Callable[[list[dict[str, str]]], None]:
    return lambda rows: rows[line].__setitem__(field, value)


BAD = {
    "unknown word": (edit("decision", "kep"), "must be keep, drop, add or nothing, got kep (did you mean keep?)"),
    "not a number": (edit("index", "seven"), "line 2: index must be"),
    "no such sample": (edit("index", "99999"), "wild sample 99999 does not exist; there are 642"),
    "keep what is none": (edit("decision", "keep", -1), "is no candidate, so there is nothing to keep; write add"),
    "add a candidate": (edit("decision", "add"), "is a candidate already; write keep or drop"),
    "another filter run": (edit("filter", "filter-0123"), "line 2 is about another run of the filter (filter-0123)"),
    "two opinions": (lambda rows: rows.append({**rows[0], "decision": "drop"}), "has another decision than in line 2"),
    "nothing left": (lambda rows: [row.update(decision="drop") for row in rows[:-5]], "drops every candidate"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_list_that_cannot_be_used_is_one_clear_message(case: str, written: Path) -> None:
    change, message = BAD[case]
    rows = rows_of(written)
    change(rows)
    rewrite(written, rows)
    result = salcli(*TRAIN, "--review", "review.csv")
    assert result.exit_code == 2
    assert message in result.stderr
    assert not list((written.parent / "scratch").rglob("*.safetensors"))


@pytest.mark.parametrize(("content", "message"), [
    (None, "does not exist; write it with: salcli review"),
    (b"", "has no column ood, seed, filter, index, decision"),
    (b"index,decision\n1,keep\n", "has no column ood, seed, filter"),
    (b"\x89PNG\x00\x00", "has no column"),
    (b'ood,seed,filter,index,decision\n"a,0,f,1,keep\n', "line 2: unexpected end of data"),
])  # fmt: skip
def test_other_files_are_refused(content: bytes | None, message: str, here: Path) -> None:  # noqa: F811
    if content is not None:
        (here / "my.csv").write_bytes(content)
    result = salcli(*TRAIN, "--review", "my.csv")
    assert result.exit_code == 2
    assert message in result.stderr


# --- what it changes


def test_an_untouched_list_trains_the_same_network_and_a_corrected_one_another(written: Path) -> None:
    root = written.parent
    networks = []
    n = len(read_candidates(Workspace(root).find(layout.candidates(OOD, SEED))).index)
    rows = rows_of(written)
    rows[0]["decision"] = rows[1]["decision"] = "drop"
    rows[-1]["decision"] = "add"
    rewrite(root / "corrected.csv", rows)
    for options in ((), ("--review", "review.csv"), ("--review", "corrected.csv")):
        result = salcli(*TRAIN, *options)
        assert result.exit_code == 0, result.stderr
        networks.append(load_file(root / "scratch" / NETWORK))
    plain, same, corrected = networks
    assert all(np.array_equal(plain[name], same[name]) for name in plain)
    assert not all(np.array_equal(plain[name], corrected[name]) for name in plain)
    assert "reviewed: 2 candidates dropped, 1 wild samples added" in " ".join(result.stdout.split())
    about = read_header(Found(root / "scratch" / NETWORK)).about
    assert about["n_outliers"] == n - 1
    assert (about["review"]["dropped"], about["review"]["added"]) == (2, 1)
    assert "corrected.csv" not in json.dumps(about)  # where a list lies changes no byte


def test_an_experiment_that_the_list_does_not_name_keeps_its_candidates(written: Path) -> None:
    n = len(read_candidates(Workspace(written.parent).find(layout.candidates("photo-patches", SEED))).index)
    arguments = [*TRAIN, "--review", "review.csv"]
    arguments[arguments.index(OOD)] = "photo-patches"
    result = salcli(*arguments)
    assert result.exit_code == 0
    assert "not in review.csv, so its candidates stay as they are" in " ".join(result.stdout.split())
    place = layout.trained_network("sal", "photo-patches", SEED).name
    assert read_header(Found(written.parent / "scratch" / place)).about["n_outliers"] == n


def test_the_pipeline_notices_a_changed_list(written: Path) -> None:
    params = written.parent / "params.yaml"
    params.write_text(
        params.read_text().replace("review: null", "review: review.csv").replace("review:\n", "review: review.csv\n")
    )
    marks = []
    for _ in range(2):
        assert salcli("fingerprints").exit_code == 0
        marks.append(json.loads((written.parent / ".salcli" / "fingerprints.json").read_text())["review"])
        written.write_text(written.read_text().replace("keep", "drop", 1))
    assert marks[0]
    assert marks[0] != marks[1]


def test_before_and_after_stand_side_by_side(here: Path) -> None:  # noqa: F811
    place = layout.metrics(OOD, SEED).name
    before = json.loads((here / place).read_text())
    after = {**before, "sal": {**before["sal"], "fpr95": 0.987, "auroc": 0.123}}
    (here / "scratch" / place).parent.mkdir(parents=True)
    (here / "scratch" / place).write_text(json.dumps(after))
    result = salcli("table", "--compare")
    assert result.exit_code == 0
    (line,) = [line for line in result.stdout.splitlines() if "→" in line and "Before" not in line]
    assert f"{100 * before['sal']['fpr95']:.1f} → 98.7" in line
    assert "SAL" in line
    assert "98.7" in line
    assert f"{len(before) - 2} rows with the same figures are left out" in result.stdout


@pytest.mark.parametrize("options", [("--paper",), ("--format", "csv")])
def test_comparing_is_for_the_terminal(options: tuple[str, ...], here: Path) -> None:  # noqa: F811
    result = salcli("table", "--compare", *options)
    assert result.exit_code == 2
    assert f"leave {' '.join(options)} out" in result.stderr


# --- names of files


def test_images_know_their_files_and_wild_data_that_we_mixed_do_not_tell(built: Path, tmp_path: Path) -> None:
    lay_out(tmp_path / "data" / "raw", ["lsun-r"], n_per_class=4)
    overrides = {"data.ood": ["lsun-r"], "data.pi": 1.0}
    params, _ = load_params(built / "params.yaml", overrides)
    workspace = Workspace(tmp_path)
    for name in (params.data.id, "lsun-r"):
        prepare.prepare_set(workspace, params.data, name)
    pictures = sorted(path.name for path in (tmp_path / "data" / "raw").rglob("*.png"))
    found = workspace.find(layout.prepared_set("lsun-r"))
    assert [Path(name).name for name in read_file_names(found)] == pictures
    assert read_file_names(workspace.find(layout.prepared_set(params.data.id))) == ()
    prepare.prepare_split(workspace, params.data, SEED)
    prepare.prepare_wild(workspace, params.data, "lsun-r", SEED)
    assert all(wild_files(workspace, params.data.id, "lsun-r", SEED, np.array([0, 3])))  # nothing but these
    prepare.prepare_wild(workspace, params.data.model_copy(update={"pi": 0.5}), "lsun-r", SEED)
    assert wild_files(workspace, params.data.id, "lsun-r", SEED, np.array([0, 3])) == ["", ""]
