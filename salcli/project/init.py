"""Create a project folder that is ready for `dvc repro`. What may fail comes first, so nothing is left behind."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from salcli.data.catalogue import custom_paths, data_root
from salcli.data.fetching import status
from salcli.data.vectors import TABLES
from salcli.errors import SalError
from salcli.params.presets import AND, Preset, text
from salcli.params.reading import parsed
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
        raise SalError(
            f"--ci {ci}: GitHub reads workflows at the top of a repository, and {folder} is below; run "
            "`salcli init . …` at the top, or leave out --ci"
        )
    written = text(preset, values)
    params = parsed(written, PARAMS)
    if values:  # a preset is known to be valid; what the user sets is not
        from salcli.params.schema import validated  # takes seconds: it imports torch

        validated(params, PARAMS, folder)
    had_dvc, had_ignore, had_data = ((folder / name).exists() for name in (".dvc", ".dvcignore", "data"))
    new = next((one for one in reversed((folder, *folder.absolute().parents)) if not one.exists()), None)
    try:
        (folder / "data").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SalError(f"{folder} cannot be created: {error.strerror}; choose another folder") from None
    if dvc and not had_dvc:
        try:
            _initialise_dvc(folder)
        except SalError:  # undo what is there so far
            shutil.rmtree(folder / ".dvc", ignore_errors=True)
            if new or not had_data:
                shutil.rmtree(new or folder / "data")
            raise
    created: list[str] = []
    kept: list[str] = []

    def write(name: str, content: str, *, overwrite: bool = False) -> None:
        if (folder / name).exists() and not overwrite:
            kept.append(name)
        else:
            write_text(folder / name, content)
            created.append(name)

    notes = _ci_notes(params) if ci else []
    project = Project(folder, created, kept, _missing_sets(params, folder), dvc or had_dvc, notes)
    write(PARAMS, written, overwrite=True)
    write(PIPELINE, (HERE / "pipeline.yaml").read_text(encoding="utf-8"), overwrite=True)
    write(".gitignore", _template("gitignore"))
    write("README.md", _readme(project, preset, custom=custom))
    if ci:
        write(WORKFLOWS[ci], _template(f"{ci}.yml").replace("'salcli'", f"'{_requirement(params)}'"))
    created += [] if had_data else ["data/"]
    if dvc:
        write(".dvcignore", _template("dvcignore"), overwrite=not had_ignore)
        (kept if had_dvc else created).append(".dvc/")
        for plot in sorted((HERE / "templates" / "plots").iterdir(), key=lambda file: file.name):
            write(f".dvc/plots/{plot.name}", plot.read_text(encoding="utf-8"))
    return project


def refuse_to_overwrite(folder: Path, force: bool) -> None:
    """Raise an error if the folder cannot be used, or holds a project already and `force` is false."""
    if folder.exists() and not folder.is_dir():
        raise SalError(f"{folder} is a file; name a folder, new or existing")
    existing = [name for name in (PARAMS, PIPELINE) if (folder / name).exists()]
    if existing and not force:
        raise SalError(
            f"{folder} already holds {' and '.join(existing)}; overwrite with --force, or name another folder"
        )


def _initialise_dvc(folder: Path) -> None:
    """Run `dvc init` quietly, with analytics off."""
    options = _dvc_init_options(folder)
    done = subprocess.run(
        [sys.executable, "-m", "dvc", "init", *options],
        cwd=folder, env={**os.environ, "DVC_NO_ANALYTICS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        reason = " ".join(done.stderr.split()).removeprefix("ERROR: ")
        raise SalError(f"dvc init failed in {folder}: {reason or 'no reason given'}; fix that, or skip it: --no-dvc")
    no_scm = "    no_scm = true\n" if NO_GIT in options else ""
    write_text(folder / ".dvc" / "config", DVC_CONFIG + no_scm)


def _dvc_init_options(folder: Path) -> list[str]:
    """DVC must be told whether the folder is the top of a git repository, below it, or in none."""
    here = folder.resolve()
    if (here / ".git").exists():
        return []
    return ["--subdir"] if any((parent / ".git").exists() for parent in here.parents) else [NO_GIT]


def _missing_sets(params: Mapping[str, Any], folder: Path) -> list[str]:
    """Data sets of params.yaml that have to be fetched."""
    data = params["data"]
    names = dict.fromkeys([data["id"], *data["ood"], *data["test_ood"]])
    root = data_root(params_root=data["root"], workspace=folder)
    return [name for name in names if name not in data["custom"] and status(name, root) not in ("here", "custom")]


def _custom_paths(params: Mapping[str, Any]) -> list[Path]:
    """All paths of data.custom, as params.yaml has them."""
    return [path for value in params["data"]["custom"].values() for path in custom_paths(value, Path())]


def _requirement(params: Mapping[str, Any]) -> str:
    """What pip has to install for the project: salcli, with the extras that its params need."""
    extras = ["parquet"] if any(path.suffix.lower() in TABLES for path in _custom_paths(params)) else []
    extras += ["timm"] if params["model"]["backbone"].startswith("timm:") else []
    return f"salcli[{','.join(extras)}]" if extras else "salcli"


def _ci_notes(params: Mapping[str, Any]) -> list[str]:
    paths = [Path(os.path.normpath(path)) for path in _custom_paths(params)]
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
