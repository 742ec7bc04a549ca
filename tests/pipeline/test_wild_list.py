"""wild.csv: every sample of the user's wild data leads from the user's files into the list and back."""

import csv
import math
from collections.abc import Callable
from pathlib import Path
from textwrap import wrap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.cli import init, refused, salcli
from helpers.custom_images import lay_out
from helpers.quick import EXPERIMENT, REPOSITORY
from helpers.stages import params_of, run_every_stage
from PIL import Image

from salcli.methods.base import Head, Known
from salcli.methods.sal import SAL_PLUS
from salcli.methods.separation import filter_scores
from salcli.params.schema import Params, load_params
from salcli.pipeline import extract, prepare, train_id
from salcli.pipeline import filter as filter_stage
from salcli.pipeline.loading import wild_holdout_samples, wild_samples
from salcli.pipeline.wild_list import COLUMNS, COPY, HELD_OUT
from salcli.sal.gradients import Representation
from salcli.store.formats import read_candidates
from salcli.store.layout import Experiment, Workspace

N_LABELED, N_WILD = 120, 50
Line = dict[str, str]
Back = Callable[[Line], np.ndarray]  # the user's own sample of a line
Given = tuple[Path, Path, Back]  # labeled data, wild data


def vectors(root: Path) -> np.ndarray:
    """Writes labeled vectors of two classes; wild ones are as they are, but for outliers and two copies of labeled."""
    rng = np.random.default_rng(0)
    label, wild_label = np.arange(N_LABELED) % 2, rng.integers(2, size=N_WILD)
    labeled, wild = (rng.normal(size=(len(y), 5)) + 4 * y[:, None] for y in (label, wild_label))
    wild[::7, 1] += 15
    wild[[3, 30]] = labeled[[8, 11]]
    np.savez(root / "labeled.npz", x=labeled.astype(np.float32), y=label)
    return wild.astype(np.float32)


def npz(root: Path) -> Given:
    np.savez(root / "pile.npz", x=vectors(root))
    return root / "labeled.npz", root / "pile.npz", lambda line: np.load(root / line["file"])["x"][int(line["row"])]


def parquet(root: Path) -> Given:
    pq.write_table(pa.table({"v": [*vectors(root)], "id": [f"=r{i}" for i in range(N_WILD)]}), root / "pile.parquet")

    def back(line: Line) -> np.ndarray:
        row = pq.read_table(root / line["file"]).slice(int(line["row"]), 1).to_pylist()[0]
        assert line["id"] == f"'{row['id']}", "no formula for a spreadsheet"
        return np.array(row["v"], np.float32)

    return root / "labeled.npz", root / "pile.parquet", back


def folder(root: Path) -> Given:
    photos = lay_out(root, n_labeled=N_LABELED // 2, n_wild=N_WILD - 2)
    for i in range(2):
        (photos / "unlabeled" / f"copy {i}.png").write_bytes((photos / "labeled" / "a" / f"{i}.png").read_bytes())

    def back(line: Line) -> np.ndarray:
        return np.asarray(Image.open(photos / "unlabeled" / line["file"]))[None]

    return photos / "labeled", photos / "unlabeled", back


def listed(root: Path) -> Given:
    """The list is beside the photos, so its files are not below its own folder."""
    labeled, unlabeled, _ = folder(root)
    files = [f"../{path.relative_to(root)}" for path in sorted(unlabeled.rglob("*.png"), reverse=True)]
    (root / "lists").mkdir()
    (root / "lists" / "pile.csv").write_text("\n".join(["path", *files]))

    def back(line: Line) -> np.ndarray:
        assert files[int(line["row"])] == line["file"]
        return np.asarray(Image.open(root / "lists" / line["file"]))[None]

    return labeled, root / "lists" / "pile.csv", back


def planned(root: Path, given: Given, *settings: str) -> tuple[Workspace, Params, Experiment]:
    changes = [word for text in ("train_id.epochs=3", *settings) for word in ("--set", text)]
    _, params = init(root / "p", "--id", str(given[0]), "--wild", str(given[1]), "--no-dvc", *changes)
    return Workspace(root / "p"), params, Experiment(0, params.data.ood[0], variant=SAL_PLUS)


def filtered(workspace: Workspace, params: Params, experiment: Experiment) -> list[Line]:
    for name in (params.data.id, experiment.ood):
        prepare.prepare_set(workspace, params, name)
    prepare.prepare_split(workspace, params.data, experiment)
    prepare.prepare_wild(workspace, params.data, experiment)
    train_id.run(workspace, params, experiment)
    extract.run_id(workspace, params, experiment)
    extract.run_wild(workspace, params, experiment)
    filter_stage.run(workspace, params, experiment)
    with workspace.find(experiment.wild_list).path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("write", [npz, parquet, folder, listed])
def test_a_sample_is_found_in_the_list_and_by_the_list(write: Callable[[Path], Given], tmp_path: Path) -> None:
    given = write(tmp_path)
    workspace, params, experiment = planned(tmp_path, given)
    lines = filtered(workspace, params, experiment)
    assert tuple(lines[0]) == COLUMNS
    assert len(lines) == N_WILD
    if lines[0]["row"]:
        assert [int(line["row"]) for line in lines] == [*range(N_WILD)], "the user's order"
    line_of = {given[2](line).tobytes(): line for line in lines}
    assert len(line_of) == N_WILD
    candidates = read_candidates(workspace.find(experiment.candidates))
    wild, held_out = (read(workspace, params, experiment) for read in (wild_samples, wild_holdout_samples))
    for i, sample in enumerate(wild.read(slice(None)).numpy()):
        line = line_of.pop(sample.tobytes())
        assert float(line["p_outlier"]) == pytest.approx(1 / (1 + math.exp(-candidates.wild_score[i])), rel=1e-4)
        assert float(line["p_value"]) == pytest.approx(candidates.p_value[i], rel=1e-4)
        assert (line["flagged"] == "1") == candidates.is_candidate[i] == (float(line["p_outlier"]) > 0.5)
        assert not line["note"]
    for sample in held_out.read(slice(None)).numpy():
        line = line_of.pop(sample.tobytes())
        assert line["note"] == HELD_OUT
        assert (line["flagged"] == "1") == (float(line["p_outlier"]) > 0.5)
        assert 0 < float(line["p_value"]) <= 1
    assert len(held_out) > 5
    copies = sorted(line_of.values(), key=lambda line: int(line["row"] or 0))
    judged = [[line[name] for name in ("note", "p_outlier", "p_value", "flagged")] for line in copies]
    assert judged == [[COPY, "", "", "0"]] * 2
    assert [line["class"] for line in copies] == (["a", "a"] if given[0].is_dir() else ["0", "1"])


def test_calibration_and_held_out_samples_are_treated_alike_so_their_p_values_are_exact() -> None:
    """Exchanged, they exchange their scores; and the filter finds the same whatever is held out."""
    rng = np.random.default_rng(0)
    head = Head(torch.from_numpy(rng.normal(size=(2, 4))), torch.zeros(2, dtype=torch.float64))

    def drawn(n: int) -> Representation:
        feature = torch.from_numpy(rng.normal(size=(n, 4))).float()
        logits = head.logits(feature).float()
        return Representation(feature, logits, logits.argmax(1))

    train, calibration, wild, held_out, other = map(drawn, (80, 30, 40, 30, 7))
    params = load_params(REPOSITORY / "params.yaml")[0].for_variant(SAL_PLUS)
    found = []
    for known, new in ((calibration, held_out), (held_out, calibration), (calibration, other)):
        own = Known(head, train, wild=wild, calibration=known, is_frozen=True)
        found.append(filter_scores(params.filter_score(), own, params.filter, new))
    pairs = [one.exact_held_out for one in found if one.exact_held_out is not None]
    torch.testing.assert_close(pairs[0], pairs[1][::-1])
    torch.testing.assert_close(found[0].wild, found[2].wild)
    torch.testing.assert_close(found[0].exact, found[2].exact)


@pytest.mark.parametrize("write", [folder, listed])
def test_select_copies_or_links_the_flagged_files_below_its_folder(
    write: Callable[[Path], Given], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = write(tmp_path)
    flagged = [line for line in filtered(*planned(tmp_path, given)) if line["flagged"] == "1"]
    monkeypatch.chdir(tmp_path / "p")
    top, there = given[1] if given[1].is_dir() else given[1].parent, {*tmp_path.rglob("*.png")}
    for out, options in (("copies", []), ("links", ["--link"])):
        done = salcli("select", "--out", out, *options)
        assert done.exit_code == 0, done.output
        files = {path.read_bytes(): path for path in Path(out).rglob("*.png")}
        assert files.keys() == {(top / line["file"]).read_bytes() for line in flagged} != set()
        assert all(path.is_symlink() == bool(options) for path in files.values())
    assert {path for path in tmp_path.rglob("*.png") if not path.is_relative_to(tmp_path / "p")} == there
    assert "name a new or an empty folder" in refused("select", "--out", "copies", root=tmp_path)


def test_select_writes_the_rows_of_flagged_vectors(tmp_path: Path) -> None:
    lines = filtered(*planned(tmp_path, npz(tmp_path)))
    salcli("select", "--params", str(tmp_path / "p/params.yaml"), "--out", str(tmp_path / "rows"))
    with (tmp_path / "rows/wild.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [line for line in lines if line["flagged"] == "1"] != []


def test_wild_data_that_salcli_mixed_have_no_lines_which_would_tell_the_truth(workspace: Workspace) -> None:
    filter_stage.run(workspace, params_of(workspace), EXPERIMENT)
    assert workspace.find(EXPERIMENT.wild_list).path.read_text() == ",".join(COLUMNS) + "\n"
    assert "no file of yours" in refused(
        "select",
        "--params",
        str(workspace.root / "params.yaml"),
        "--variant",
        "sal",
        "--out",
        str(workspace.root / "out"),
        root=workspace.root,
    )


@pytest.mark.slow
def test_the_last_word_has_at_most_12_lines_and_a_table_begins_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = npz(tmp_path)
    np.savez(given[1], x=np.load(given[1])["x"] * 0.2 + 4)  # all of one class
    few = "train_ood.epochs=1", "rivals=[]", "evaluate.methods=[sal-plus, msp]"
    workspace, params, experiment = planned(tmp_path, given, *few)
    run_every_stage(workspace, params)
    monkeypatch.chdir(tmp_path / "p")
    summary, table = salcli("summary").stdout, salcli("table").stdout
    assert table.startswith(summary)
    assert sum(len(wrap(line, 100)) for line in summary.splitlines()) <= 12
    first, *others = summary.splitlines()
    assert first.startswith("pile: ")
    assert f"list: {experiment.wild_list.path}" in summary
    assert "\nnote: The wild data have other shares of classes" in summary
    assert "\ndetector: " in summary
    assert len(others) == 4
    assert others[-1] == "next: salcli report, salcli select --out outliers, salcli predict PATH"
    monkeypatch.setenv("DVC_STAGE", "split@0")
    assert len(salcli("prepare", "split").stdout.splitlines()) == 1
