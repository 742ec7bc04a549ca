"""A folder for an experiment: all of it is there, or nothing is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from conftest import REPOSITORY
from test_bad_input import nobody
from test_cli import files, salcli

from salcli.params import load_params
from salcli.presets import preset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from click.testing import Result

TEMPLATES = REPOSITORY / "salcli" / "templates"
PLAIN = {"params.yaml", "dvc.yaml", ".salcli/dvc.yaml", ".gitignore", "README.md"}
OF_DVC = {".dvcignore", ".dvc/config", *(f".dvc/plots/{name}.json" for name in ("roc", "scores", "training"))}


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def dvc(*arguments: str, cwd: Path) -> str:
    return run(sys.executable, "-m", "dvc", *arguments, cwd=cwd)


def made(root: Path) -> set[str]:
    """Files but for DVC's own .gitignore and temporary ones, and git's."""
    own = {".dvc/.gitignore"}
    return {name for name in files(root) if not name.startswith((".dvc/tmp/", ".dvc/cache/", ".git/"))} - own


def refused(result: Result) -> str:
    assert result.exit_code == 2
    assert result.stdout == ""
    return str(result.stderr)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """An empty git repository."""
    run("git", "init", "-q", cwd=tmp_path)
    return tmp_path


# --- what is made


def test_an_empty_folder_gets_everything(tmp_path: Path) -> None:
    result = salcli("init", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    assert made(tmp_path) == PLAIN | OF_DVC
    assert (tmp_path / "data").is_dir()
    assert (tmp_path / "params.yaml").read_text() == preset("default").text
    assert "next: cd " in result.stdout
    assert "dvc repro" in result.stdout
    assert "fetch" not in result.stdout


def test_the_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b c"
    result = salcli("init", str(folder), "--no-dvc")
    assert made(folder) == PLAIN
    assert f"cd '{folder}' && dvc init --no-scm && dvc repro" in result.stdout


def test_without_a_name_it_is_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = salcli("init", "--no-dvc")
    assert made(tmp_path) == PLAIN
    assert "next: dvc init --no-scm && dvc repro\n" in result.stdout


@pytest.mark.parametrize(
    ("below", "no_scm"), [(None, True), ("", False), ("experiments/one", False)], ids=["no git", "git top", "below"]
)
def test_dvc_knows_whether_there_is_git(tmp_path: Path, below: str | None, no_scm: bool) -> None:
    if below is not None:
        run("git", "init", "-q", cwd=tmp_path)
    folder = tmp_path / (below or "")
    result = salcli("init", str(folder))
    assert result.exit_code == 0
    config = (folder / ".dvc" / "config").read_text()
    assert ("no_scm = true" in config) == no_scm
    assert ("for dvc exp, git init && dvc config core.no_scm false" in result.stdout) == no_scm
    assert "analytics = false" in config
    assert "check_update = false" in config
    assert dvc("root", cwd=folder).strip() == "."


@pytest.mark.slow
def test_dvc_understands_the_folder(repository: Path) -> None:
    salcli("init", str(repository))
    stages = dvc("stage", "list", "--all", "--name-only", cwd=repository).split()
    shown = dvc("dag", cwd=repository)
    assert {"evaluate@digits-8-9-1", ".salcli/dvc.yaml:fingerprints"} <= set(stages)
    assert all(stage in shown for stage in stages)
    assert dvc("config", "core.analytics", cwd=repository).strip() == "false"


def test_git_ignores_what_is_fetched_and_made(repository: Path) -> None:
    salcli("init", str(repository), "--no-dvc")
    for name in ("data/raw/x", "runs/0/x", "scratch/x", ".salcli/fingerprints.json", ".salcli/resume/x", ".x.partial"):
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).touch()
    assert set(run("git", "ls-files", "--others", "--exclude-standard", cwd=repository).split()) == PLAIN


def test_a_preset_of_the_paper_says_which_data_it_needs(tmp_path: Path) -> None:
    (tmp_path / "data" / "raw" / "svhn" / "one").mkdir(parents=True)  # is there already
    result = salcli("init", str(tmp_path), "--preset", "resnet18", "--no-dvc")
    fetch = "salcli data fetch cifar100 places365 lsun-c lsun-r textures"
    assert f"&& {fetch} && dvc init --no-scm && dvc repro" in result.stdout
    assert f"```\n{fetch}\ndvc init --no-scm\ndvc repro\nsalcli table --paper\n" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "params.yaml").read_text() == preset("resnet18").text


def test_values_are_set_and_comments_stay(tmp_path: Path) -> None:
    salcli("init", str(tmp_path), "--no-dvc", "--set", "seeds=[5]", "--set", "filter.n_vectors=3")
    params, _ = load_params(tmp_path / "params.yaml")
    assert params.seeds == (5,)
    assert params.filter.n_vectors == 3
    assert "  n_vectors: 3              # singular vectors to project on\n" in (tmp_path / "params.yaml").read_text()


def test_the_templates_are_those_of_the_repository() -> None:
    ours, packaged = ({file.name: file.read_bytes() for file in folder.iterdir()}
                      for folder in (REPOSITORY / ".dvc" / "plots", TEMPLATES / "plots"))  # fmt: skip
    assert packaged == ours


# --- what is refused, and leaves nothing behind


def test_existing_files_are_named_all_at_once_and_kept(tmp_path: Path) -> None:
    for name in ("params.yaml", "dvc.yaml"):
        (tmp_path / name).write_text("mine")
    message = refused(salcli("init", str(tmp_path)))
    assert message == (
        f"error: {tmp_path} already holds params.yaml and dvc.yaml; overwrite with --force, or name another folder\n"
    )
    assert files(tmp_path) == {"params.yaml": b"mine", "dvc.yaml": b"mine"}


def test_force_overwrites_those_two_alone(tmp_path: Path) -> None:
    for name in ("params.yaml", "README.md", ".gitignore"):
        (tmp_path / name).write_text("mine")
    result = salcli("init", str(tmp_path), "--force")
    assert "left as it was: .gitignore, README.md\n" in result.stdout
    assert (tmp_path / "params.yaml").read_text() == preset("default").text
    assert (tmp_path / "README.md").read_text() == "mine"


def test_twice_is_refused_and_with_force_keeps_dvc(tmp_path: Path) -> None:
    salcli("init", str(tmp_path))
    (tmp_path / ".dvc" / "config").write_text("[core]\n    no_scm = true\n    autostage = true\n")
    before = files(tmp_path)
    assert "already holds params.yaml and dvc.yaml" in refused(salcli("init", str(tmp_path)))
    assert salcli("init", str(tmp_path), "--force").exit_code == 0
    assert files(tmp_path) == before


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "here").write_text("mine")
    assert "here is a file; name a folder" in refused(salcli("init", str(tmp_path / "here")))
    assert "cannot be made: Not a directory" in refused(salcli("init", str(tmp_path / "here" / "below")))
    assert files(tmp_path) == {"here": b"mine"}


def test_a_folder_in_the_place_of_a_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").mkdir()
    assert "params.yaml in" in refused(salcli("init", str(tmp_path), "--force"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "toyy"], "did you mean toy?"),
        (["--set", "seedz=1"], "seedz  no such key (did you mean seeds?)"),
        (["--set", "data.pi=2"], "data.pi"),
        (["--set", "data.pi"], "must be KEY=VALUE"),
    ],
)
def test_a_mistake_leaves_no_folder_behind(tmp_path: Path, options: list[str], message: str) -> None:
    assert message in refused(salcli("init", str(tmp_path / "a" / "b"), *options))
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_with_force_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("mine")
    refused(salcli("init", str(tmp_path), "--force", "--set", "seedz=1"))
    assert files(tmp_path) == {"params.yaml": b"mine"}


def test_what_dvc_refuses_is_said_and_taken_back(repository: Path) -> None:
    (repository / ".gitignore").write_text(".dvc\n")
    message = refused(salcli("init", str(repository)))
    assert "dvc init failed" in message
    assert "ignored by your SCM tool" in message
    assert "--no-dvc" in message
    assert made(repository) == {".gitignore"}
    assert not (repository / "data").exists()


@pytest.fixture
def read_only() -> Iterator[Path]:
    """A folder that nobody may write to, but everybody may enter."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        yield Path(folder)
        Path(folder).chmod(0o755)


def test_a_read_only_folder_is_named(read_only: Path) -> None:
    salcli("init", os.devnull)  # everything is imported: nobody may be unable to
    with nobody():
        into, below = salcli("init", str(read_only)), salcli("init", str(read_only / "new"))
    assert f"error: {read_only}/params.yaml cannot be written: Permission denied" in refused(into)
    assert f"error: {read_only}/new cannot be made: Permission denied" in refused(below)
    assert list(read_only.iterdir()) == []
