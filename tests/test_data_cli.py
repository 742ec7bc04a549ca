"""`salcli data` as people meet it."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from typer.testing import CliRunner
from web import Web, serving

from salcli.cli import app
from salcli.data.root import data_root, params_data_root
from salcli.errors import ParamsError
from salcli.fetching import registry
from salcli.fetching.data_source import DataSource, RemoteFile
from salcli.fetching.registry import SOURCES
from salcli.reporting import progress as progress_module
from salcli.reporting.data_table import data_table
from salcli.reporting.progress import ConsoleProgress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from click.testing import Result


def process(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key != "SALCLI_DATA"}
    command = [sys.executable, "-m", "salcli", "data", *arguments]
    return subprocess.run(
        command, cwd=cwd, env={**clean, **environment}, capture_output=True, text=True, check=False, timeout=60
    )


def salcli(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["data", *arguments], prog_name="salcli", catch_exceptions=False)


# --- the list


def test_the_list_shows_what_is_here_and_fits_100_columns(tmp_path: Path) -> None:
    (tmp_path / "data" / "raw" / "svhn").mkdir(parents=True)
    (tmp_path / "data" / "raw" / "svhn" / "1.png").write_bytes(b"image")
    (tmp_path / "data" / "raw" / "val_256.tar.part").write_bytes(b"beginning")
    run = process("list", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert max(map(len, run.stdout.splitlines())) <= 100
    assert "…" not in run.stdout
    rows = {line.split()[0]: line.split() for line in run.stdout.splitlines() if line.strip()}
    assert set(SOURCES) <= set(rows)
    assert {name: rows[name][-1] for name in ("digits-0-7", "cifar10", "svhn", "places365")} == {
        "digits-0-7": "✓",
        "cifar10": "–",
        "svhn": "own",
        "places365": "partial",
    }
    assert "inside scikit-learn" in " ".join(rows["photo-patches"])
    assert "a folder of images NAME/ or an array file NAME.npz there stands in for the set" in run.stdout
    assert str(Path("data", "raw")) in run.stdout


@pytest.mark.parametrize("width", [200, 100, 99, 80, 79, 78, 65])
@pytest.mark.parametrize("state", ["here", "partial"])
def test_no_cell_of_the_list_is_cut_off_on_a_narrow_terminal(width: int, state: str) -> None:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    with console.file:
        console.print(data_table(dict.fromkeys(SOURCES.values(), state), width))
    assert "…" not in console.export_text()


def test_the_list_is_there_for_programs_too(tmp_path: Path) -> None:
    found = {
        entry["name"]: entry for entry in json.loads(salcli("list", "--root", str(tmp_path), "--format", "json").stdout)
    }
    assert list(found) == list(SOURCES)
    assert found["cifar10"]["status"] == "missing"
    assert found["cifar10"]["files"][0]["url"] == "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
    assert found["digits-0-7"]["status"] == "here"
    assert found["digits-0-7"]["embedded"] is True


def test_the_list_does_not_load_torch(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from salcli.cli import app\n"
        "app(['data', 'list'], standalone_mode=False)\n"
        "print(sorted({'torch', 'torchvision', 'numpy', 'pandas', 'sklearn'} & set(sys.modules)))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.stdout.splitlines()[-1] == "[]", run.stderr


# --- fetching


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    """A server with one small set, `small`, and one that rots, `rotten`."""
    content = gzip.compress(b"content")
    with serving(Web({"small.gz": content})) as running:
        md5 = f"md5:{hashlib.md5(content).hexdigest()}"
        facts = ("ood", 1, "1×1", "MIT", "https://example.org")
        sets = [
            DataSource(
                name, name, *facts, (RemoteFile(running.url(f"{name}.gz"), f"{name}.gz", md5),), provides=(name,)
            )
            for name in ("small", "rotten")
        ]
        monkeypatch.setattr(
            registry, "SOURCES", {"digits-8-9": SOURCES["digits-8-9"]} | {one.name: one for one in sets}
        )
        yield running


def test_fetch_says_one_line_for_each_set(web: Web, tmp_path: Path) -> None:
    root = tmp_path / "root"
    first = salcli("fetch", "small", "digits-8-9", "--root", str(root))
    assert first.exit_code == 0
    assert first.stdout.splitlines() == [
        f"small: fetched: {root / 'small'}",
        "digits-8-9: comes with salcli, nothing to fetch",
    ]
    assert (root / "small").read_bytes() == b"content"
    assert salcli("fetch", "small", "--root", str(root)).stdout == f"small: here already: {root / 'small'}\n"
    assert len(web.asked) == 1


def test_fetch_gets_what_it_can_and_ends_with_the_cure(web: Web, tmp_path: Path) -> None:
    run = salcli("fetch", "rotten", "small", "--root", str(tmp_path))
    assert run.exit_code == 2
    assert run.stdout.startswith("small: fetched")
    assert run.stderr.startswith("error: rotten: rotten.gz cannot be fetched\n")
    assert f"{web.url('rotten.gz')}: the server answered 404" in run.stderr
    assert f"put it at {tmp_path / 'rotten.gz'}" in run.stderr
    assert f"salcli data fetch rotten --root {tmp_path}" in run.stderr


def test_an_unknown_set_names_the_nearest(tmp_path: Path) -> None:
    run = process("fetch", "cifar-10", cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith("error: no data set is called cifar-10 (did you mean cifar10?); known: ")
    assert list(tmp_path.iterdir()) == []


def test_without_a_network_the_message_is_the_whole_message(tmp_path: Path) -> None:
    """A proxy that nobody runs stands for a machine without the web."""
    nowhere = {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    run = process("fetch", "svhn", "--root", "in here", cwd=tmp_path, **nowhere)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    assert "http://ufldl.stanford.edu/housenumbers/train_32x32.mat: " in run.stderr
    assert f"put it at {Path('in here', 'train_32x32.mat')} (md5 e26dedcc434d2e4c54c9b2d4a06d8373)" in run.stderr
    assert "then run: salcli data fetch svhn --root 'in here'" in run.stderr


def test_ctrl_c_says_that_the_beginning_is_kept(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr("salcli.fetching.fetch.download", interrupted)
    run = salcli("fetch", "small", "--root", str(tmp_path))
    assert run.exit_code == 130
    assert "what has arrived is kept: the same command goes on from there" in run.stdout


def test_fetch_without_names_is_a_mistake() -> None:
    run = salcli("fetch")
    assert run.exit_code == 2
    assert "NAME" in run.stderr


# --- where the data lie


def test_the_root_is_the_option_then_the_environment_then_params_then_a_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SALCLI_DATA", "~/environment")
    assert data_root(Path("~/option"), "params") == tmp_path / "option"
    assert data_root(None, "params") == tmp_path / "environment"
    monkeypatch.delenv("SALCLI_DATA")
    assert data_root(None, "params", tmp_path) == tmp_path / "params"
    assert data_root(None, "~/params", Path("workspace")) == tmp_path / "params"
    assert data_root(None, "/params", Path("workspace")) == Path("/params")
    assert data_root(None, None, tmp_path) == tmp_path / "data" / "raw"


def test_the_root_of_params_yaml_is_read_where_there_is_one(tmp_path: Path) -> None:
    params = tmp_path / "params.yaml"
    assert params_data_root(params) is None
    params.write_text("data: {id: cifar10}")
    assert params_data_root(params) is None
    params.write_text("data: {root: pictures}")
    assert params_data_root(params) == "pictures"
    params.write_text("data: {root: [pictures]}")
    with pytest.raises(ParamsError, match=r"data\.root must be a folder, got \['pictures'\]"):
        params_data_root(params)


def test_commands_use_the_root_of_params_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SALCLI_DATA", raising=False)
    Path("params.yaml").write_text("data: {root: pictures}")
    Path("pictures/svhn").mkdir(parents=True)
    Path("pictures/svhn/1.png").write_bytes(b"image")
    found = {entry["name"]: entry["status"] for entry in json.loads(salcli("list", "--format", "json").stdout)}
    assert found["svhn"] == "own"


# --- progress


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Console:
    """What goes to a pipe, a line for each step."""
    console = Console(width=100, record=True, force_terminal=False)
    monkeypatch.setattr(progress_module, "console", console)
    monkeypatch.setattr(progress_module, "SECONDS_BETWEEN_LINES", 0.0)
    return console


@pytest.mark.parametrize(
    ("total", "unit", "expected"),
    [
        (20_000_000, "bytes", r"x: 25%, [\d,.]+ MB/s, \d+ s left"),
        (0, "bytes", r"x: 5\.0 MB, [\d,.]+ MB/s"),  # a server that tells no size
        (1_000_000, "bytes", r"x: 100%, [\d,.]+ MB/s, 0 s left"),  # the size was a guess
        (20_000_000, "images", r"x: 25%, [\d,]+ images/s, \d+ s left"),
    ],
)
def test_bytes_are_shown_in_megabytes(lines: Console, total: int, unit: str, expected: str) -> None:
    with ConsoleProgress().task("x", total, unit) as task:
        task.advance(5_000_000)
    assert re.fullmatch(expected, lines.export_text().strip())


@pytest.mark.parametrize("total", [20_000_000, 0])
def test_a_terminal_shows_a_bar_with_rate(monkeypatch: pytest.MonkeyPatch, total: int) -> None:
    console = Console(width=100, record=True, force_terminal=True)
    monkeypatch.setattr(progress_module, "console", console)
    with ConsoleProgress().task("x.tar.gz", total, "bytes") as task:
        task.advance(5_000_000)
    shown = console.export_text()
    assert "x.tar.gz" in shown
    assert "MB/s" in shown
    assert ("25%" if total else "5.0 MB") in shown
