"""`salcli predict` and `salcli export` as people and scripts use them."""

import csv
import io
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from helpers.cli import CONSOLE_SCRIPT, process, refused, salcli
from helpers.detectors import EXPERIMENT, id_images, random_detector, write_pngs
from PIL import Image

from salcli import Detector

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


def test_a_table_for_people_takes_no_name_for_markup(folder: Path) -> None:
    Path("new/0000.png").rename("new/[red]x[bold]\n\x1b[31m.png")
    shown = predict("new", "--format", "table").stdout
    assert "new/[red]x[bold]��[31m.png " in shown
    assert max(map(len, shown.splitlines())) <= 100


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
    for argument in (str(folder / "new" / "**"), "new"):  # links are followed, but not in circles
        assert len(paths(predict(argument).stdout)) == 13


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
    result = predict("-", "--null", "new", stdin=b"new/a\nb.png\0new/gone.png\0" + b"x" * 5000)
    rows = table(result.stdout)
    assert [row["path"] for row in rows[:3]] == ["new/a\nb.png", "new/gone.png", "x" * 5000]
    bad = {row["path"]: row["error"] for row in rows if row["error"]}
    assert [*bad][2:] == ["new/0001.png", "new/0004.png", "new/0005.tif", "new/pipe.png"]
    assert [*bad.values()][:3] == ["no such file or directory", "file name too long", "it is empty"]
    assert bad["new/pipe.png"] == "it is not a regular file"
    assert "cannot be read: new/gone.png: no such file or directory" in result.stderr
    assert ("11 images, " in result.stderr, "6 could not be read" in result.stderr) == (True, True)


def test_the_quantile_moves_the_threshold_and_the_exit_code_tells_whether_something_is_ood(
    built: Path, folder: Path
) -> None:
    write_pngs(folder / "all", id_images(built, "calibration"))
    result = predict("all", "--id-quantile", "0.5", "--fail-on-ood", "--out", "not/yet/there.csv", code=3)
    assert (result.stdout, "wrote not/yet/there.csv" in result.stderr) == ("", True)
    rows = table(Path("not/yet/there.csv").read_text())
    assert all((row["is_ood"] == "true") == (float(row["p_value"]) <= 0.5) for row in rows)
    assert "too few" in predict("new", "--id-quantile", "0.999").stderr
    predict(next(row["path"] for row in rows if row["is_ood"] == "false"), "--fail-on-ood")


def test_the_detector_of_the_runs_is_found_and_named(folder: Path) -> None:
    for seed in (10, 2):
        path = folder / "runs" / str(seed) / "wild" / "detector.safetensors"
        path.parent.mkdir(parents=True)
        shutil.copy("detector.safetensors", path)
    assert "detector:" not in predict("new").stderr
    (folder / "detector.safetensors").unlink()
    assert "detector: runs/2/wild/detector.safetensors, the first of 2 seeds\n" in predict("new").stderr
    shutil.rmtree(folder / "runs" / "2")
    shutil.copytree(folder / "runs" / "10" / "wild", folder / "runs" / "10" / "other")
    message = refused("predict", "new", root=folder)
    assert "there are 2 detectors; choose one:\n" in message
    assert "  --detector runs/10/other/detector.safetensors\n" in message


def test_a_detector_needs_nothing_but_itself(folder: Path) -> None:
    """A process of its own, with a pipe at its end, somewhere where there is no project."""
    done = process(CONSOLE_SCRIPT, "predict", "new", cwd=folder, LC_ALL="C")
    assert (done.returncode, len(table(done.stdout))) == (0, 12)
    assert done.stderr.startswith("12 images, ")
    assert sorted(path.name for path in folder.iterdir()) == ["detector.safetensors", "new"]


def test_mistakes_give_one_message_and_leave_nothing_behind(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "text.txt").write_text("no image")
    (folder / "broken.safetensors").write_bytes((folder / "detector.safetensors").read_bytes()[:5000])
    for arguments, message in {
        "nowhere.png": "nowhere.png is not there",
        "empty": "empty holds no images: no file with .png",
        "text.txt": "no image could be read, of 1 files; the lines above say why",
        "new --detector broken.safetensors": "broken.safetensors is damaged",
        "new --id-quantile 0": "greater than 0 and less than 1, got 0",
        "new --out empty --format csv": "empty is a folder; name a file in it",
        "-": "there are no paths on standard input",
    }.items():
        assert message in refused("predict", *arguments.split(), root=folder), arguments
    assert predict("text.txt", code=2).stdout == ""  # not even the header
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
