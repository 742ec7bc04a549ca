"""Prepare one set in a test, or see it refused."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REPOSITORY
from test_cli import files

from salcli.artifacts.images import read_image_set
from salcli.artifacts.layout import Workspace, prepared_set
from salcli.data.image_set import ImageSet
from salcli.errors import DataError
from salcli.params import DataParams, load_params
from salcli.stages import prepare


def data_params(root: Path, id_name: str = "cifar10", ood: Iterable[str] = ("svhn",), **changes: Any) -> DataParams:
    fixed = {"data.root": str(root), "data.id": id_name, "data.ood": list(ood)}
    shape = {"data.image_size": 32, "data.channels": 3}
    more = {f"data.{key}": value for key, value in changes.items()}
    return load_params(REPOSITORY / "params.yaml", {**fixed, **shape, **more})[0].data


def prepared(tmp_path: Path, params: DataParams, name: str) -> ImageSet:
    workspace = Workspace(tmp_path / "workspace")
    prepare.prepare_set(workspace, params, name)
    return read_image_set(workspace.find(prepared_set(name)))


def refused(tmp_path: Path, params: DataParams, name: str) -> str:
    """The message, once it is sure that nothing was written."""
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, params, name)
    assert not files(tmp_path / "workspace")
    return str(caught.value)


def random_images(n: int, size: int = 32, seed: int = 0) -> np.ndarray:
    """n, H, W, C."""
    return np.random.default_rng(seed).integers(0, 256, (n, size, size, 3), dtype=np.uint8)


class Malicious:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.trace,)
