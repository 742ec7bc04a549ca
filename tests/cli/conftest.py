"""Projects that commands run in."""

from pathlib import Path

import pytest
from helpers.quick import OOD, REPOSITORY

from salcli.params.reading import edited
from salcli.store.layout import Workspace


@pytest.fixture
def here(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A built project as the current folder."""
    monkeypatch.chdir(workspace.root)
    return workspace.root


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with nothing but a params.yaml that asks for little."""
    values = {"seeds": [4], "rivals": [], "data.ood": [OOD], "train_id.epochs": 3, "train_ood.epochs": 1}
    values |= {"evaluate.methods": ["sal", "msp", "knn"]}
    (tmp_path / "params.yaml").write_text(edited((REPOSITORY / "params.yaml").read_text(), values))
    monkeypatch.chdir(tmp_path)
    return tmp_path
