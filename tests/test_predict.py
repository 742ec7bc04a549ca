"""`salcli predict` as people and scripts meet it."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from conftest import OOD, SEED
from detectors import calibration_images, stored_scores, write_pngs, write_random_detector
from PIL import Image
from test_bad_input import refused
from test_cli import CONSOLE_SCRIPT, files, process
from typer.testing import CliRunner

from salcli import Detector
from salcli.artifacts import layout
from salcli.cli import app
from salcli.data import decoding
from salcli.detector import file_pass
from salcli.detector.prefetch import one_ahead

if TYPE_CHECKING:
    from collections.abc import Generator

    from click.testing import Result

COLUMNS = ["path", "class", "probability", "score", "is_ood", "p_value", "error"]


@pytest.fixture
def folder(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with nothing but a detector and some images in new/."""
    shutil.copy(built / layout.detector(OOD, SEED).name, tmp_path / "detector.safetensors")
    write_pngs(tmp_path / "new", calibration_images(built)[:12])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def predict(*arguments: str, stdin: bytes = b"", code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["predict", *arguments], prog_name="salcli", input=stdin, catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def table(text: str | bytes) -> list[dict[str, str]]:
    rows = list(csv.DictReader(io.StringIO(text.decode() if isinstance(text, bytes) else text, newline="")))
    assert not rows or list(rows[0]) == COLUMNS
    return rows


def paths(text: str | bytes) -> list[str]:
    return [row["path"] for row in table(text)]


# --- what it writes


def test_each_file_has_a_row_with_what_the_detector_says(folder: Path) -> None:
    result = predict("new")
    found = Detector.load("detector.safetensors")(sorted((folder / "new").iterdir()))
    rows = table(result.stdout)
    assert [row["path"] for row in rows] == [f"new/{i:04}.png" for i in range(12)]
    assert [row["class"] for row in rows] == list(found.classes)
    assert [np.float32(row["score"]) for row in rows] == list(found.scores)
    assert [np.float32(row["probability"]) for row in rows] == list(found.probabilities)
    assert [row["is_ood"] for row in rows] == ["true" if one else "false" for one in found.is_ood]
    assert [float(row["p_value"]) for row in rows] == list(found.p_values)
    assert {row["error"] for row in rows} == {""}
    assert f"12 images, {found.is_ood.sum()} OOD" in result.stderr


def test_calibration_files_have_the_stored_scores(built: Path, folder: Path) -> None:
    write_pngs(folder / "all", calibration_images(built))
    predict("all", "--out", "scores.csv")
    scores = np.sort([float(row["score"]) for row in table((folder / "scores.csv").read_bytes())])
    np.testing.assert_allclose(scores, stored_scores(folder / "detector.safetensors"), rtol=1e-5, atol=1e-5)


def test_json_lines_and_csv_say_the_same(folder: Path) -> None:
    (folder / "new" / "0003.png").write_text("no image")
    rows = table(predict("new").stdout)
    lines = [json.loads(line) for line in predict("new", "--format", "jsonl").stdout.splitlines()]
    assert [list(line) for line in lines] == [COLUMNS] * 12

    def as_text(value: object) -> str:
        return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

    assert [{key: as_text(value) for key, value in line.items()} for line in lines] == rows
    assert lines[3] == {**dict.fromkeys(COLUMNS), "path": "new/0003.png", "error": "it is no image of a known format"}


@pytest.mark.parametrize(("name", "output_format"), [("a.csv", "csv"), ("a.jsonl", "jsonl"), ("a.txt", "jsonl")])
def test_a_file_has_what_standard_output_has(folder: Path, name: str, output_format: str) -> None:
    expected = predict("new", "--format", output_format).stdout
    (folder / "deep").mkdir()
    (folder / "deep" / name).write_text("from before")
    option = [] if Path(name).suffix == f".{output_format}" else ["--format", output_format]
    result = predict("new", "--out", f"deep/{name}", *option)
    assert result.stdout == ""
    assert f"wrote deep/{name}" in result.stderr
    assert (folder / "deep" / name).read_text() == expected
    predict("new", "--out", f"not/yet/there/{name}", *option)
    assert (folder / "not/yet/there" / name).read_text() == expected


def test_a_table_for_people_has_the_least_id_like_first_and_takes_no_name_for_markup(built: Path, folder: Path) -> None:
    write_pngs(folder / "all", calibration_images(built))
    lowest = min(table(predict("all").stdout), key=lambda row: float(row["score"]))["path"]
    Path(lowest).rename("all/[red]x[bold]\n\x1b[31m.png")
    shown = predict("all", "--format", "table").stdout
    first = shown.splitlines()[4]
    assert first.split()[0] == "all/[red]x[bold]��[31m.png"
    assert "OOD" in first
    assert "The 40 least ID-like of 115 images" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_long_paths_are_cut_in_the_table_alone(folder: Path) -> None:
    deep = folder / "/".join(["a long name for a folder"] * 6)
    deep.mkdir(parents=True)
    (folder / "new" / "0000.png").rename(deep / "x.png")
    shown = predict(str(deep), "--format", "table").stdout
    assert max(map(len, shown.splitlines())) <= 100
    assert "…" in shown
    assert paths(predict(str(deep)).stdout) == [str(deep / "x.png")]


# --- where images come from


def test_files_folders_patterns_and_lists_come_in_the_order_of_the_arguments(folder: Path) -> None:
    deep = folder / "new" / "deep" / "er"
    deep.mkdir(parents=True)
    shutil.copy("new/0000.png", deep / "b.PNG")
    shutil.copy("new/0000.png", deep / "[1].dat")
    (folder / "new" / "notes.txt").write_text("no image")
    stdin = b"new/0002.png\r\n\nnew/deep\nnew/0001.png"
    result = predict("new/deep/er/[1].dat", "-", "new/**/*.PNG", "new/000[67].png", "new/deep", stdin=stdin)
    assert paths(result.stdout) == [
        "new/deep/er/[1].dat", "new/0002.png", "new/deep/er/b.PNG", "new/0001.png", "new/deep/er/b.PNG",
        "new/0006.png", "new/0007.png", "new/deep/er/b.PNG",
    ]  # fmt: skip
    assert len(paths(predict(str(folder / "new" / "**")).stdout)) == 13
    assert len(paths(predict("new").stdout)) == 13


def test_a_pattern_follows_links_but_not_in_circles(folder: Path) -> None:
    (folder / "new" / "loop").symlink_to("..")
    (folder / "more").mkdir()
    shutil.copy("new/0000.png", "more/x.png")
    (folder / "new" / "link").symlink_to("../more")
    found = paths(predict("new/**/*.png").stdout)
    assert len(found) == len(set(map(os.path.realpath, found)))
    assert "new/link/x.png" in found
    assert paths(predict("new/000*.png").stdout) == [path for path in found if path.startswith("new/000")]


def test_a_pipe_in_a_folder_has_a_row_with_an_error_and_nobody_waits_for_it(folder: Path) -> None:
    os.mkfifo("new/pipe.png")
    row = table(predict("new").stdout)[-1]
    assert (row["path"], row["error"]) == ("new/pipe.png", "it is no regular file")


def test_a_list_may_end_names_with_nul_and_one_missing_file_does_not_stop_the_rest(folder: Path) -> None:
    (folder / "new" / "0000.png").rename("new/a\nb.png")
    result = predict("-", "--null", stdin=b"new/a\nb.png\0new/gone.png\0new/0001.png\0" + b"x" * 5000)
    rows = table(result.stdout)
    assert [row["path"] for row in rows] == ["new/a\nb.png", "new/gone.png", "new/0001.png", "x" * 5000]
    assert [row["error"] for row in rows] == ["", "no such file or directory", "", "file name too long"]
    assert "cannot be read: new/gone.png: no such file or directory" in result.stderr
    assert "2 images, 0 OOD (0.0%), 2 could not be read" in result.stderr


NAMES = [
    b"a b.png",
    b"\"q\" 'q'.png",
    b"a,b;c.png",
    b"new\nline.png",
    "ünï\u202e日本.png".encode(),
    b"\xff\xfe.png",
    b"=1+1.png",
    b"-.png",
]


@pytest.mark.parametrize("output_format", ["csv", "jsonl"])
def test_names_of_any_kind_leave_the_output_valid(folder: Path, output_format: str) -> None:
    os.makedirs(b"odd")  # noqa: PTH103
    for name in NAMES:
        shutil.copy("new/0000.png", os.path.join(b"odd", name))  # noqa: PTH118
    result = predict("odd", "--format", output_format)
    text = result.stdout_bytes.decode()  # UTF-8
    rows = table(text) if output_format == "csv" else [json.loads(line) for line in text.split("\n")[:-1]]
    expected = {f"odd/{name.decode(errors='backslashreplace')}" for name in NAMES}
    assert {row["path"] for row in rows} == expected
    assert len({row["class"] for row in rows}) == 1


def test_what_cannot_be_read_is_reported_and_does_not_stop_the_rest(folder: Path) -> None:
    (folder / "new" / "0001.png").write_bytes(b"")
    (folder / "new" / "0004.png").write_bytes((folder / "new" / "0002.png").read_bytes()[:40])
    Image.new("F", (8, 8)).save(folder / "new" / "0005.tif")
    result = predict("new", "--fail-on-ood", "--id-quantile", "0.999")
    rows = table(result.stdout)
    assert [row["path"] for row in rows if row["error"]] == ["new/0001.png", "new/0004.png", "new/0005.tif"]
    assert {row["score"] == "" for row in rows if row["error"]} == {True}
    assert result.stderr.count("cannot be read: ") == 3
    assert "new/0001.png: it is empty" in result.stderr
    assert "3 could not be read" in result.stderr


@pytest.mark.parametrize("batch_size", ["1", "3", "4", "100"])
def test_many_small_blocks_and_batches_give_what_one_gives(
    folder: Path, batch_size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With files that cannot be read at the edges of blocks, in a row, and as a whole block."""
    for bad in (0, 2, 3, 7, 8, 9, 11):
        (folder / "new" / f"{bad:04}.png").write_text("bad")
    expected = table(predict("new").stdout)
    for block, at_once in ((1, 1), (4, 1), (5, 5), (2, 7), (1000, 3)):
        monkeypatch.setattr(decoding, "MOST_IN_BLOCK", block)
        monkeypatch.setattr(file_pass, "FEWEST_AT_ONCE", at_once)
        found = table(predict("new", "--batch-size", batch_size).stdout)
        for key in ("path", "class", "is_ood", "error"):
            assert [row[key] for row in found] == [row[key] for row in expected]
        scores = [[float(row["score"] or "nan") for row in rows] for rows in (found, expected)]
        np.testing.assert_allclose(*scores, rtol=1e-4)


# --- decisions


def test_the_exit_code_tells_whether_something_is_ood(folder: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (30, 1, 8, 8), dtype=np.uint8)
    write_pngs(folder / "noise", noise)
    rows = table(predict("noise", "--fail-on-ood", code=3).stdout)
    assert "true" in {row["is_ood"] for row in rows}
    predict("noise")
    good = next(row["path"] for row in table(predict("new").stdout) if row["is_ood"] == "false")
    predict(good, "--fail-on-ood")


def test_another_quantile_moves_the_threshold_and_nothing_else(built: Path, folder: Path) -> None:
    write_pngs(folder / "all", calibration_images(built))
    by_quantile = {q: table(predict("all", "--id-quantile", str(q)).stdout) for q in (0.5, 0.9, 0.95, 0.99)}
    for q, rows in by_quantile.items():
        n_ood = sum(row["is_ood"] == "true" for row in rows)
        assert n_ood == 115 - int(np.ceil(q * 115))
        assert [row["score"] for row in rows] == [row["score"] for row in by_quantile[0.5]]


# --- which detector


def test_the_detector_of_the_runs_is_found_and_named(folder: Path) -> None:
    for seed in (10, 2):
        place = folder / "runs" / str(seed) / "wild" / "detector.safetensors"
        place.parent.mkdir(parents=True)
        shutil.copy("detector.safetensors", place)
    assert "detector:" not in predict("new").stderr
    (folder / "detector.safetensors").unlink()
    assert "detector: runs/2/wild/detector.safetensors, the first of 2 seeds\n" in predict("new").stderr
    shutil.rmtree(folder / "runs" / "2")
    assert "detector: runs/10/wild/detector.safetensors\n" in predict("new").stderr
    shutil.copytree(folder / "runs" / "10" / "wild", folder / "runs" / "10" / "other")
    message = refused("predict", "new", root=folder)
    assert "there are 2 detectors; choose one:\n" in message
    for name in ("wild", "other"):
        assert f"  --detector runs/10/{name}/detector.safetensors\n" in message
    predict("new", "--detector", "runs/10/other/detector.safetensors")


def test_a_detector_needs_nothing_but_itself(folder: Path) -> None:
    """A process of its own, with a pipe at its end, somewhere where there is no project."""
    assert sorted(path.name for path in folder.iterdir()) == ["detector.safetensors", "new"]
    done = process(CONSOLE_SCRIPT, "predict", "new", cwd=folder, LC_ALL="C")
    assert (done.returncode, len(table(done.stdout))) == (0, 12)
    assert done.stderr.startswith("12 images, ")
    assert sorted(path.name for path in folder.iterdir()) == ["detector.safetensors", "new"]


def test_classes_of_any_name_are_written(folder: Path) -> None:
    write_random_detector(folder / "detector.safetensors")
    assert {row["class"] for row in table(predict("new").stdout_bytes)} <= {"ä", "b", "c"}


# --- bad input


def bad_inputs(folder: Path) -> dict[str, str]:
    (folder / "empty").mkdir()
    (folder / "text.txt").write_text("no image")
    (folder / "broken.safetensors").write_bytes((folder / "detector.safetensors").read_bytes()[:5000])
    return {
        "nowhere.png": "nowhere.png is not there",
        "empty": "empty holds no images: no file with .png",
        "nowhere/*.png": "no image matches nowhere/*.png",
        "*.txt": "no image matches *.txt: a pattern finds files with .png",
        "text.txt": "no image could be read, of 1 files; the lines above say why",
        "new --detector nowhere": "nowhere is not there; make a detector with: salcli detector",
        "new --detector broken.safetensors": "broken.safetensors is damaged",
        "new --detector new": "it should be a file that you may read",
        "new --id-quantile 0": "greater than 0 and less than 1, got 0",
        "new --id-quantile 95": "greater than 0 and less than 1, got 95",
        "new --id-quantile nan": "greater than 0 and less than 1, got nan",
        "new --batch-size 0": "the batch size must be at least 1, got 0",
        "new --device cuda:7": "device cuda:7",
        "new --device gpu": "device gpu",
        "new --out scores": "--out scores: name it .csv or .jsonl, or say which with --format",
        "new --out empty --format csv": "empty is a folder; name a file in it",
        "new --out text.txt/scores.csv": "text.txt/scores.csv cannot be written",
        "new --out scores.csv --format table": "--format table is for people",
        "text.txt --out scores.csv": "no image could be read",
        "-": "there are no paths on standard input",
    }


def test_mistakes_are_told_in_one_message_and_leave_nothing_behind(folder: Path) -> None:
    for arguments, message in bad_inputs(folder).items():
        before = files(folder)
        stderr = predict(*arguments.split(), code=2).stderr
        assert message in stderr, arguments
        assert stderr.count("error: ") == 1, stderr
        assert "Traceback" not in stderr
        assert files(folder) == before


def test_a_network_is_no_detector(built: Path, folder: Path) -> None:
    network = str(built / layout.trained_network("sal", OOD, SEED).name)
    assert "holds a ood-classifier, not a detector; make it again: salcli detector" in refused(
        "predict", "new", "--detector", network, root=folder
    )


def test_without_any_detector_it_says_how_to_make_one(folder: Path) -> None:
    (folder / "detector.safetensors").unlink()
    message = refused("predict", "new", root=folder)
    assert message.startswith("error: there is no detector.safetensors here and none below runs/; make one with: ")


# --- working ahead


def test_one_item_is_made_ahead_and_in_one_thread_at_a_time() -> None:
    made: list[int] = []
    asked = threading.Event()

    def items() -> Generator[int]:
        for i in range(5):
            made.append(i)
            if i == 1:
                asked.set()
            yield i

    ahead = one_ahead(items())
    assert next(ahead) == 0
    assert asked.wait(5)  # while the caller has item 0
    assert list(ahead) == [1, 2, 3, 4]
    assert made == [0, 1, 2, 3, 4]


def test_a_failure_comes_through_and_the_source_is_closed_whatever_happens() -> None:
    closed = []

    def items(n: int) -> Generator[int]:
        try:
            yield from range(n)
            raise ValueError("broken")
        finally:
            closed.append(n)

    with pytest.raises(ValueError, match="broken"):
        list(one_ahead(items(2)))
    early = one_ahead(items(7))
    next(early)
    early.close()
    assert closed == [2, 7]
