"""A folder that is ready for `dvc repro`: all of it, or nothing new."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import files
from shlex import quote
from string import Template
from typing import TYPE_CHECKING, Any

from salcli.artifacts.atomic import write_text
from salcli.data.root import data_root
from salcli.errors import ProjectError, StorageError
from salcli.fetching.fetch import status
from salcli.params import load_params
from salcli.params_file import edited, read_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from salcli.presets import Preset

PARAMS, PIPELINE, FINGERPRINTS = "params.yaml", "dvc.yaml", ".salcli/dvc.yaml"
DVC_CONFIG = "[core]\n    analytics = false\n    check_update = false\n"
NO_GIT = "--no-scm"
TEMPLATES = files("salcli") / "templates"  # not called dvc.yaml there: DVC would take it for a pipeline of its own


@dataclass(frozen=True)
class Project:
    """What was made where, and what it still needs. `made` and `kept` are names below the folder."""

    folder: Path
    made: list[str]
    kept: list[str]
    missing_sets: list[str]
    has_dvc: bool

    @property
    def is_in_git(self) -> bool:
        """`dvc repro` needs no repository; experiments (`dvc exp`) do."""
        return NO_GIT not in _dvc_init_options(self.folder)

    @property
    def next_commands(self) -> list[str]:
        """What to do next, inside the folder."""
        fetch = [f"salcli data fetch {' '.join(self.missing_sets)}"] if self.missing_sets else []
        initialise = [] if self.has_dvc else [" ".join(["dvc init", *_dvc_init_options(self.folder)])]
        return [*fetch, *initialise, "dvc repro"]


def create(
    folder: Path,
    preset: Preset,
    values: Mapping[str, Any] | None = None,
    *,
    force: bool = False,
    dvc: bool = True,
    made_by: str = "",
) -> Project:
    """Lay out a folder with the preset's params (`values`: dotted keys to set in them). Takes all back if a step fails.

    `force` overwrites params.yaml and dvc.yaml; every other file that is there already stays as it is.
    """
    refuse_to_overwrite(folder, force)
    params_text = edited(preset.text, values or {})
    with ExitStack() as undo:
        steps = _Steps(folder, undo)
        steps.make_folder(folder)
        steps.write(PARAMS, params_text, overwrite=True)
        if values:
            load_params(folder / PARAMS)  # what the preset holds is known to be valid; what the user sets is not
        project = Project(folder, steps.made, steps.kept, _missing_sets(folder), dvc or (folder / ".dvc").exists())
        steps.write(PIPELINE, _template("pipeline.yaml"), overwrite=True)
        steps.write(FINGERPRINTS, _template("fingerprints.yaml"), overwrite=True)
        steps.write(".gitignore", _template("gitignore"))
        steps.write("README.md", _readme(project, preset, made_by))
        steps.make_folder(folder / "data")
        if dvc:
            steps.write(".dvcignore", _template("dvcignore"))
            steps.initialise_dvc()
            for plot in sorted((TEMPLATES / "plots").iterdir(), key=lambda file: file.name):
                steps.write(f".dvc/plots/{plot.name}", plot.read_text(encoding="utf-8"))
        undo.pop_all()
    return project


class _Steps:
    """Writes below a folder; what it wrote is taken back when `undo` is closed."""

    def __init__(self, folder: Path, undo: ExitStack) -> None:
        self.folder, self.undo = folder, undo
        self.made: list[str] = []
        self.kept: list[str] = []

    def make_folder(self, path: Path) -> None:
        new = [one for one in (path, *path.absolute().parents) if not one.exists()]
        for one in reversed(new):
            try:
                one.mkdir()
            except OSError as error:
                raise StorageError(f"{one} cannot be made: {error.strerror}; choose another folder") from None
            self.undo.callback(_remove_empty, one)
        if new and path != self.folder:
            self.made.append(f"{path.relative_to(self.folder)}/")

    def write(self, name: str, text: str, *, overwrite: bool = False) -> None:
        path = self.folder / name
        if path.exists() and not overwrite:
            self.kept.append(name)
            return
        self.make_folder(path.parent)
        before = path.read_bytes() if path.exists() else None
        write_text(path, text)
        self.undo.callback(_restore, path, before)
        self.made.append(name)

    def initialise_dvc(self) -> None:
        """Without a word, and without a letter home."""
        if (self.folder / ".dvc").exists():
            self.kept.append(".dvc/")
            return
        self.undo.callback(shutil.rmtree, self.folder / ".dvc", ignore_errors=True)
        options = _dvc_init_options(self.folder)
        done = subprocess.run(
            [sys.executable, "-m", "dvc", "init", *options],
            cwd=self.folder, env={**os.environ, "DVC_NO_ANALYTICS": "1"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            reason = " ".join(done.stderr.split()).removeprefix("ERROR: ")
            raise ProjectError(
                f"dvc init failed in {self.folder}: {reason or 'no reason given'}; mend that, or go without: --no-dvc"
            )
        no_scm = "    no_scm = true\n" if NO_GIT in options else ""
        write_text(self.folder / ".dvc" / "config", DVC_CONFIG + no_scm)
        self.made.append(".dvc/")


def refuse_to_overwrite(folder: Path, force: bool) -> None:
    """Somebody's work is never lost by accident."""
    if folder.exists() and not folder.is_dir():
        raise ProjectError(f"{folder} is a file; name a folder, new or old")
    there = [name for name in (PARAMS, PIPELINE) if (folder / name).exists()]
    if there and not force:
        raise ProjectError(
            f"{folder} already holds {' and '.join(there)}; overwrite with --force, or name another folder"
        )
    not_files = [name for name in there if not (folder / name).is_file()]
    if not_files:
        raise ProjectError(f"{' and '.join(not_files)} in {folder} is no file; move it away, or name another folder")


def _dvc_init_options(folder: Path) -> list[str]:
    """DVC wants to be told whether the folder is the top of a git repository, below it, or in none."""
    here = folder.resolve()
    if (here / ".git").exists():
        return []
    return ["--subdir"] if any((parent / ".git").exists() for parent in here.parents) else [NO_GIT]


def _missing_sets(folder: Path) -> list[str]:
    """Data sets that params.yaml names and that have to be fetched."""
    data = read_yaml(folder / PARAMS)["data"]
    names = dict.fromkeys([data["id"], *data["ood"], *data["test_ood"]])
    root = data_root(params_root=data["root"], workspace=folder)
    return [name for name in names if name not in data["own"] and status(name, root) not in ("here", "own")]


def _readme(project: Project, preset: Preset, made_by: str) -> str:
    title = preset.title[0].upper() + preset.title[1:]
    return Template(_template("README.md")).substitute(
        name=project.folder.resolve().name or "salcli",
        title=f"{title} ({preset.paper} of the paper)" if preset.paper else title,
        made_by=made_by or f"salcli init --preset {quote(preset.name)}",
        commands="\n".join(
            [*project.next_commands, f"salcli table{' --paper' if preset.paper else ''}", "dvc plots show"]
        ),
    )


def _template(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _remove_empty(path: Path) -> None:
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()


def _restore(path: Path, before: bytes | None) -> None:
    if before is None:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(before)
