"""Create a project folder that is ready for `dvc repro`. If a step fails, everything it wrote is undone."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from salcli.data.catalogue import custom_paths, data_root
from salcli.data.fetching import status
from salcli.data.vectors import TABLES
from salcli.errors import ProjectError, StorageError
from salcli.params.presets import AND, Preset, text
from salcli.params.reading import read_yaml
from salcli.store.files import write_text

PARAMS, PIPELINE = "params.yaml", "dvc.yaml"
DVC_CONFIG = "[core]\n    analytics = false\n    check_update = false\n"
NO_GIT = "--no-scm"
HERE = files("salcli") / "project"
WORKFLOWS = {"github": ".github/workflows/salcli.yml"}
CUSTOM_COMMAND = "salcli init --id … --wild …"
CUSTOM_TITLE = "A detector of outliers for custom data"


@dataclass(frozen=True)
class Project:
    """What was created, and what it still needs. `created` and `kept` are paths below the folder."""

    folder: Path
    created: list[str]
    kept: list[str]
    missing_sets: list[str]
    has_dvc: bool
    notes: list[str]

    @property
    def is_in_git(self) -> bool:
        """`dvc repro` needs no repository, but experiments (`dvc exp`) do."""
        return NO_GIT not in _dvc_init_options(self.folder)

    @property
    def next_commands(self) -> list[str]:
        """What to run next, inside the folder."""
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
    custom: bool = False,
    ci: str = "",
) -> Project:
    """Create a project with the preset's params, and `values` (by dotted key) over them.

    `force` overwrites params.yaml and dvc.yaml; any other file that exists is kept. `custom`: for custom data.
    `ci`: also a workflow for this service.
    """
    refuse_to_overwrite(folder, force)
    if ci and "--subdir" in _dvc_init_options(folder):
        raise ProjectError(
            f"--ci {ci}: GitHub reads workflows at the top of a repository, and {folder} is below; run "
            "`salcli init . …` at the top, or leave out --ci"
        )
    with ExitStack() as undo:
        steps = _Steps(folder, undo)
        steps.make_folder(folder)
        steps.write(PARAMS, text(preset, values), overwrite=True)
        if values:  # a preset is known to be valid; what the user sets is not
            from salcli.params.schema import load_params  # takes seconds: it imports torch

            load_params(folder / PARAMS)
        project = Project(
            folder, steps.created, steps.kept, _missing_sets(folder), dvc or (folder / ".dvc").exists(),
            _ci_notes(folder) if ci else [],
        )  # fmt: skip
        steps.write(PIPELINE, (HERE / "pipeline.yaml").read_text(encoding="utf-8"), overwrite=True)
        steps.write(".gitignore", _template("gitignore"))
        steps.write("README.md", _readme(project, preset, custom=custom))
        if ci:
            steps.write(WORKFLOWS[ci], _template(f"{ci}.yml").replace("'salcli'", f"'{_requirement(folder)}'"))
        steps.make_folder(folder / "data")
        if dvc:
            steps.write(".dvcignore", _template("dvcignore"))
            steps.initialise_dvc()
            for plot in sorted((HERE / "templates" / "plots").iterdir(), key=lambda file: file.name):
                steps.write(f".dvc/plots/{plot.name}", plot.read_text(encoding="utf-8"))
        undo.pop_all()
    return project


def refuse_to_overwrite(folder: Path, force: bool) -> None:
    """Raise an error if the folder cannot be used, or holds a project already and `force` is false."""
    if folder.exists() and not folder.is_dir():
        raise ProjectError(f"{folder} is a file; name a folder, new or existing")
    existing = [name for name in (PARAMS, PIPELINE) if (folder / name).exists()]
    if existing and not force:
        raise ProjectError(
            f"{folder} already holds {' and '.join(existing)}; overwrite with --force, or name another folder"
        )


class _Steps:
    """Writes below a folder, and undoes that when `undo` is closed."""

    def __init__(self, folder: Path, undo: ExitStack) -> None:
        self.folder, self.undo = folder, undo
        self.created: list[str] = []
        self.kept: list[str] = []

    def make_folder(self, path: Path) -> None:
        new = [one for one in (path, *path.absolute().parents) if not one.exists()]
        for one in reversed(new):
            try:
                one.mkdir()
            except OSError as error:
                raise StorageError(f"{one} cannot be created: {error.strerror}; choose another folder") from None
            self.undo.callback(_remove_empty, one)
        if new and path != self.folder:
            self.created.append(f"{path.relative_to(self.folder)}/")

    def write(self, name: str, content: str, *, overwrite: bool = False) -> None:
        path = self.folder / name
        if path.exists() and not overwrite:
            self.kept.append(name)
            return
        self.make_folder(path.parent)
        before = path.read_bytes() if path.exists() else None
        write_text(path, content)
        self.undo.callback(_restore, path, before)
        self.created.append(name)

    def initialise_dvc(self) -> None:
        """Run `dvc init` quietly, with analytics off."""
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
                f"dvc init failed in {self.folder}: {reason or 'no reason given'}; fix that, or skip it: --no-dvc"
            )
        no_scm = "    no_scm = true\n" if NO_GIT in options else ""
        write_text(self.folder / ".dvc" / "config", DVC_CONFIG + no_scm)
        self.created.append(".dvc/")


def _dvc_init_options(folder: Path) -> list[str]:
    """DVC must be told whether the folder is the top of a git repository, below it, or in none."""
    here = folder.resolve()
    if (here / ".git").exists():
        return []
    return ["--subdir"] if any((parent / ".git").exists() for parent in here.parents) else [NO_GIT]


def _missing_sets(folder: Path) -> list[str]:
    """Data sets of params.yaml that have to be fetched."""
    data = read_yaml(folder / PARAMS)["data"]
    names = dict.fromkeys([data["id"], *data["ood"], *data["test_ood"]])
    root = data_root(params_root=data["root"], workspace=folder)
    return [name for name in names if name not in data["custom"] and status(name, root) not in ("here", "custom")]


def _custom_paths(folder: Path) -> list[Path]:
    """All paths of data.custom, as params.yaml has them."""
    sets = read_yaml(folder / PARAMS)["data"]["custom"].values()
    return [path for value in sets for path in custom_paths(value, Path())]


def _requirement(folder: Path) -> str:
    """What pip has to install for the project: salcli, with the extras that its params need."""
    extras = ["parquet"] if any(path.suffix.lower() in TABLES for path in _custom_paths(folder)) else []
    extras += ["timm"] if read_yaml(folder / PARAMS)["model"]["backbone"].startswith("timm:") else []
    return f"salcli[{','.join(extras)}]" if extras else "salcli"


def _ci_notes(folder: Path) -> list[str]:
    paths = [Path(os.path.normpath(path)) for path in _custom_paths(folder)]
    away = [str(path) for path in paths if path.is_absolute() or path.parts[:1] == ("..",)]
    if not away:
        return []
    return [
        f"a CI runner will not have {', '.join(away)}: absolute, or outside the project; put the data inside, tracked "
        "by git or DVC, and name them by relative paths"
    ]


def _readme(project: Project, preset: Preset, *, custom: bool) -> str:
    title = CUSTOM_TITLE if custom else preset.title[0].upper() + preset.title[1:]
    table = f"salcli table{' --paper' if preset.paper else ''}"
    return Template(_template("README.md")).substitute(
        name=project.folder.resolve().name or "salcli",
        title=f"{title} ({preset.paper} of the paper)" if preset.paper else title,
        made_by=" --preset ".join(["salcli init", *preset.name.split(AND)]) if not custom else CUSTOM_COMMAND,
        commands="\n".join([*project.next_commands, table, "dvc plots show"]),
    )


def _template(name: str) -> str:
    return (HERE / "templates" / name).read_text(encoding="utf-8")


def _remove_empty(path: Path) -> None:
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()


def _restore(path: Path, before: bytes | None) -> None:
    if before is None:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(before)
