"""`salcli predict` and `salcli export` as people and scripts use them."""

import csv
import io
import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from helpers.cli import CONSOLE_SCRIPT, process, refused, salcli
from helpers.detectors import EXPERIMENT, id_images, random_detector, write_pngs
from PIL import Image

from salcli import Detector
from salcli.data import decoding
from salcli.detector import export as export_module
from salcli.detector import images

COLUMNS = ["path", "class", "probability", "score", "is_ood", "p_value", "error"]


@pytest.fixture
def folder(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with nothing but a detector and some images in new/."""
    shutil.copy(built / EXPERIMENT.detector.path, tmp_path / "detector.safetensors")
    write_pngs(tmp_path / "new", id_images(built, "calibration")[:12])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def predict(*arguments: str, stdin: bytes = b"", code: int = 0) -> Result:
    result = salcli("predict", *arguments, stdin=stdin)
    assert result.exit_code == code, result.output
    return result


def table(text: str | bytes) -> list[dict[str, str]]:
    rows = list(csv.DictReader(io.StringIO(text.decode() if isinstance(text, bytes) else text, newline="")))
    assert not rows or list(rows[0]) == COLUMNS
    return rows


def paths(text: str | bytes) -> list[str]:
    return [row["path"] for row in table(text)]


def test_each_file_has_a_row_with_what_the_detector_says(folder: Path) -> None:
    result = predict("new")
    found = Detector.load("detector.safetensors")(sorted((folder / "new").iterdir()))
    rows = table(result.stdout)
    columns = {key: [row[key] for row in rows] for key in COLUMNS}
    assert columns["path"] == [f"new/{i:04}.png" for i in range(12)]
    assert columns["class"] == list(found.classes)
    assert [np.float32(text) for text in columns["score"]] == list(found.scores)
    assert [np.float32(text) for text in columns["probability"]] == list(found.probabilities)
    assert columns["is_ood"] == [str(one).lower() for one in found.is_ood]
    assert [float(text) for text in columns["p_value"]] == list(found.p_values)
    assert {*columns["error"]} == {""}
    assert f"12 images, {found.is_ood.sum()} OOD" in result.stderr


def test_a_file_has_what_standard_output_has_and_a_pipe_is_not_replaced(folder: Path) -> None:
    for name, *options in (["deep/a.csv"], ["not/yet/there.jsonl"], ["a.txt", "--format", "jsonl"]):
        expected = predict("new", "--format", "csv" if name.endswith("csv") else "jsonl").stdout
        result = predict("new", "--out", name, *options)
        predict("new", "--out", name, *options)
        assert (result.stdout, f"wrote {name}" in result.stderr) == ("", True)
        assert (folder / name).read_text() == expected
    os.mkfifo("pipe.csv")
    with ThreadPoolExecutor() as pool:
        read = pool.submit(Path("pipe.csv").read_text)
        predict("new", "--out", "pipe.csv")
        assert len(table(read.result(10))) == 12
    assert Path("pipe.csv").is_fifo()


def test_a_table_for_people_has_the_least_id_like_first_and_takes_no_name_for_markup(built: Path, folder: Path) -> None:
    write_pngs(folder / "all", id_images(built, "calibration"))
    lowest = min(table(predict("all").stdout), key=lambda row: float(row["score"]))["path"]
    Path(lowest).rename("all/[red]x[bold]\n\x1b[31m.png")
    shown = predict("all", "--format", "table").stdout
    first = shown.splitlines()[4]
    assert first.split()[0] == "all/[red]x[bold]��[31m.png"
    assert "OOD" in first
    assert "The 40 least ID-like of 115 images" in shown
    assert max(map(len, shown.splitlines())) <= 100
    long = Path("/".join(["a long name for a folder"] * 6), "x.png")
    write_pngs(long.parent, id_images(built, "calibration")[:1])[0].rename(long)
    shown = predict(str(long), "--format", "table").stdout
    assert max(map(len, shown.splitlines())) <= 100
    assert "…" in shown
    assert paths(predict(str(long)).stdout) == [str(long)]


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
    (folder / "new" / "loop").symlink_to("..")
    (folder / "more").mkdir()
    shutil.copy("new/0000.png", "more/x.png")
    (folder / "new" / "link").symlink_to("../more")
    for argument in (str(folder / "new" / "**"), "new"):  # links are followed, but not in circles
        found = paths(predict(argument).stdout)
        assert len(found) == len(set(map(os.path.realpath, found))) == 14
        assert found[-5].endswith("new/0011.png") or found[-1].endswith("new/link/x.png")


NAMES = [b"a b.png", b"\"q\" 'q'.png", b"a,b;c.png", b"new\nline.png", "ünï\u202e日本.png".encode(), b"\xff\xfe.png",
         b"=1+1.png", b"-.png"]  # fmt: skip


def test_names_of_any_kind_leave_the_output_valid(folder: Path) -> None:
    os.makedirs(b"odd")  # noqa: PTH103
    for name in NAMES:
        shutil.copy("new/0000.png", os.path.join(b"odd", name))  # noqa: PTH118
    lines = predict("odd", "--format", "jsonl").stdout_bytes.decode().split("\n")[:-1]  # UTF-8
    for rows in (table(predict("odd").stdout_bytes), [json.loads(line) for line in lines]):
        assert {row["path"] for row in rows} == {f"odd/{name.decode(errors='backslashreplace')}" for name in NAMES}


def test_a_list_may_end_names_with_nul_and_unreadable_files_do_not_stop_the_rest(folder: Path) -> None:
    (folder / "new" / "0000.png").rename("new/a\nb.png")
    (folder / "new" / "0001.png").write_bytes(b"")
    (folder / "new" / "0004.png").write_bytes((folder / "new" / "0002.png").read_bytes()[:40])
    Image.new("F", (8, 8)).save(folder / "new" / "0005.tif")
    os.mkfifo("new/pipe.png")  # nobody waits for it
    arguments = "-", "--null", "new"
    stdin = b"new/a\nb.png\0new/gone.png\0" + b"x" * 5000
    result = predict(*arguments, stdin=stdin)
    rows = table(result.stdout)
    assert [row["path"] for row in rows[:3]] == ["new/a\nb.png", "new/gone.png", "x" * 5000]
    bad = {row["path"]: row["error"] for row in rows if row["error"]}
    assert [*bad][2:] == ["new/0001.png", "new/0004.png", "new/0005.tif", "new/pipe.png"]
    assert [*bad.values()][:3] == ["no such file or directory", "file name too long", "it is empty"]
    assert bad["new/pipe.png"] == "it is not a regular file"
    assert "cannot be read: new/gone.png: no such file or directory" in result.stderr
    assert ("11 images, " in result.stderr, "6 could not be read" in result.stderr) == (True, True)
    lines = predict(*arguments, "--format", "jsonl", stdin=stdin).stdout.splitlines()
    texts = {None: "", True: "true", False: "false"}
    found = [json.loads(line) for line in lines]
    assert [{key: texts[one] if one in texts else str(one) for key, one in line.items()} for line in found] == rows


def test_many_small_blocks_and_batches_give_what_one_gives(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With files that cannot be read at the edges of blocks, in a row, and as a whole block."""
    for bad in (0, 2, 3, 7, 8, 9, 11):
        (folder / "new" / f"{bad:04}.png").write_text("bad")
    expected = table(predict("new").stdout)
    blocks = ((1, 1), (4, 1), (5, 5), (2, 7), (1000, 3))
    for (block, at_once), batch_size in product(blocks, ("1", "3", "4", "100")):
        monkeypatch.setattr(decoding, "MOST_IN_BLOCK", block)
        monkeypatch.setattr(images, "FEWEST_AT_ONCE", at_once)
        found = table(predict("new", "--batch-size", batch_size).stdout)
        for key in ("path", "class", "is_ood", "error"):
            assert [row[key] for row in found] == [row[key] for row in expected]
        scores = [[float(row["score"] or "nan") for row in rows] for rows in (found, expected)]
        np.testing.assert_allclose(*scores, rtol=1e-4)


def test_the_quantile_moves_the_threshold_and_the_exit_code_tells_whether_something_is_ood(
    built: Path, folder: Path
) -> None:
    write_pngs(folder / "all", id_images(built, "calibration"))
    by_quantile = {q: table(predict("all", "--id-quantile", str(q)).stdout) for q in (0.5, 0.9, 0.95, 0.99)}
    for q, rows in by_quantile.items():
        assert sum(row["is_ood"] == "true" for row in rows) == 115 - int(np.ceil(q * 115))
        assert [row["score"] for row in rows] == [row["score"] for row in by_quantile[0.5]]
    assert "true" in {row["is_ood"] for row in table(predict("all", "--fail-on-ood", code=3).stdout)}
    good = next(row["path"] for row in by_quantile[0.95] if row["is_ood"] == "false")
    predict(good, "--fail-on-ood")


def test_the_detector_of_the_runs_is_found_and_named(folder: Path) -> None:
    for seed in (10, 2):
        path = folder / "runs" / str(seed) / "wild" / "sal" / "detector.safetensors"
        path.parent.mkdir(parents=True)
        shutil.copy("detector.safetensors", path)
    assert "detector:" not in predict("new").stderr
    (folder / "detector.safetensors").unlink()
    assert "detector: runs/2/wild/sal/detector.safetensors, the first of 2 seeds\n" in predict("new").stderr
    shutil.rmtree(folder / "runs" / "2")
    assert "detector: runs/10/wild/sal/detector.safetensors\n" in predict("new").stderr
    shutil.copytree(folder / "runs" / "10" / "wild", folder / "runs" / "10" / "other")
    message = refused("predict", "new", root=folder)
    assert "there are 2 detectors; choose one:\n" in message
    for name in ("wild", "other"):
        assert f"  --detector runs/10/{name}/sal/detector.safetensors\n" in message
    predict("new", "--detector", "runs/10/other/sal/detector.safetensors")


def test_a_detector_needs_nothing_but_itself(folder: Path) -> None:
    """A process of its own, with a pipe at its end, somewhere where there is no project."""
    done = process(CONSOLE_SCRIPT, "predict", "new", cwd=folder, LC_ALL="C")
    assert (done.returncode, len(table(done.stdout))) == (0, 12)
    assert done.stderr.startswith("12 images, ")
    assert sorted(path.name for path in folder.iterdir()) == ["detector.safetensors", "new"]


def test_mistakes_give_one_message_and_leave_nothing_behind(built: Path, folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "text.txt").write_text("no image")
    (folder / "broken.safetensors").write_bytes((folder / "detector.safetensors").read_bytes()[:5000])
    for arguments, message in {
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
    }.items():
        assert message in refused("predict", *arguments.split(), root=folder), arguments
    network = str(built / EXPERIMENT.network("sal").path)
    message = refused("predict", "new", "--detector", network, root=folder)
    assert "is a file of kind ood-classifier, not detector; make it again: salcli detector" in message
    (folder / "detector.safetensors").unlink()
    message = refused("predict", "new", root=folder)
    assert message.startswith("error: there is no detector.safetensors here and none below runs/; make one with: ")


# --- custom networks

CUSTOM_NETWORK = """
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body, self.head = nn.Linear(64, 5), nn.Linear(5, num_classes)
    def forward(self, x):
        return self.head(self.body(x.flatten(1)).relu()).log_softmax(1)
"""


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with images in new/, a custom network in code/, and a detector with that network in runs/."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "nets_for_detectors.py").write_text(CUSTOM_NETWORK)
    write_pngs(tmp_path / "new", np.random.default_rng(0).integers(0, 256, (3, 1, 8, 8), dtype=np.uint8))
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path / "code")
        random_detector("nets_for_detectors:Net", 1, head="head").save(tmp_path / "runs/0/wild/detector.safetensors")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "nets_for_detectors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_custom_network_is_imported_if_that_is_allowed_or_params_yaml_names_it(custom: Path) -> None:
    """The stages of a project have imported its network already; but not another one that a file names."""
    made, params = custom / "runs/0/wild/detector.safetensors", custom / "params.yaml"
    params.write_text("model: {backbone: 'others:Net', code: code}")
    assert "nets_for_detectors:Net would be imported" in predict("new", code=2).stderr
    params.write_text("model: {backbone: 'nets_for_detectors:Net', code: code}")
    made.rename("detector.safetensors")  # it may come from anywhere
    assert "would be imported" in refused("predict", "new", root=custom)
    assert "nets_for_detectors" not in sys.modules
    (custom / "detector.safetensors").rename(made)
    assert len(table(predict("new").stdout)) == 3
    params.unlink()
    assert len(table(predict("new", "--allow-import").stdout)) == 3
    result = salcli("export", "--to", "onnx", "graph", "--allow-import")
    assert result.exit_code == 0, result.stderr


def test_mistakes_of_export_give_one_message(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, message in {
        "--to onnx . ": "is a folder; name a file in it",
        "--to onnx a.onnx --id-quantile 1.5": "greater than 0 and less than 1",
        "--to onnx a.onnx --detector nowhere": "nowhere is not there; make a detector with",
        "--to torch-export detector.safetensors/a.pt2": "cannot be written",
    }.items():
        assert message in refused("export", *arguments.split(), root=folder)
    monkeypatch.setattr(export_module, "find_spec", lambda name: None if name == "onnxscript" else object())
    message = refused("export", "--to", "onnx", "a.onnx", root=folder)
    assert message == "error: ONNX needs onnxscript; install it with: pip install 'salcli[onnx]'\n"
