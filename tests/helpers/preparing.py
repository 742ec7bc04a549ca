"""Prepare one set in a test, or see it refused."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import files
from helpers.quick import REPOSITORY

from salcli.data.samples import Samples
from salcli.errors import DataError
from salcli.params.schema import Params, load_params
from salcli.pipeline import prepare
from salcli.store.formats import read_samples
from salcli.store.layout import Workspace, prepared_set


def set_params(
    root: Path, id_name: str = "cifar10", ood: Iterable[str] = ("svhn",), *, backbone: str = "small-cnn", **changes: Any
) -> Params:
    """With changes of data: 32 × 32 pixels where nothing else is asked for."""
    fixed = {"data.root": str(root), "data.id": id_name, "data.ood": list(ood), "model.backbone": backbone}
    shape = {"data.image_size": 32, "data.channels": 3}
    more = {f"data.{key}": value for key, value in changes.items()}
    return load_params(REPOSITORY / "params.yaml", {**fixed, **shape, **more})[0]


def prepared(tmp_path: Path, params: Params, name: str) -> Samples:
    workspace = Workspace(tmp_path / "workspace")
    prepare.prepare_set(workspace, params, name)
    return read_samples(workspace.find(prepared_set(name)))


def refused(tmp_path: Path, params: Params, name: str) -> str:
    """The message, after a check that nothing was written."""
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, params, name)
    assert not files(tmp_path / "workspace")
    return str(caught.value)
