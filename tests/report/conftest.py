"""A small workspace with one evaluated experiment."""

import shutil
from pathlib import Path

import pytest
from helpers.evaluated import write_evaluated

from salcli.store.layout import Workspace


@pytest.fixture(scope="session")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only: see `workspace`."""
    root = tmp_path_factory.mktemp("evaluated")
    write_evaluated(root)
    return root


@pytest.fixture
def workspace(evaluated: Path, tmp_path: Path) -> Workspace:
    """A copy, free to be changed."""
    shutil.copytree(evaluated, tmp_path / "workspace")
    return Workspace(tmp_path / "workspace")
