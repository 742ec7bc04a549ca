"""Where data sets lie on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from salcli.errors import ParamsError
from salcli.params_file import lookup, read_yaml

VARIABLE = "SALCLI_DATA"
DEFAULT = Path("data", "raw")


def data_root(option: Path | None = None, params_root: str | None = None, workspace: Path = Path()) -> Path:
    """The first of: --root, the environment variable SALCLI_DATA, data.root of params.yaml, data/raw.

    The last two count from the workspace, the folder of params.yaml; `~` is the home folder everywhere.
    """
    from_environment = os.environ.get(VARIABLE)
    if option is not None:
        return option.expanduser()
    if from_environment:
        return Path(from_environment).expanduser()
    return workspace / (Path(params_root).expanduser() if params_root else DEFAULT)


def own_place(value: str, workspace: Path) -> Path:
    """Where a set of data.own lies; a relative place counts from the workspace."""
    return workspace / Path(value).expanduser()


def params_data_root(params_file: Path) -> str | None:
    """data.root of a params file, None where there is no such file or key."""
    if not params_file.exists():
        return None
    root = lookup(read_yaml(params_file), "data.root")
    if root is not None and not (isinstance(root, str) and root.strip()):
        raise ParamsError(f"{params_file}: data.root must be a folder, got {root!r:.60}")
    return root
