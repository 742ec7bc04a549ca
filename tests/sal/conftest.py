"""Gradients in files."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from salcli.sal.gradients import Representation
from salcli.store.files import Found
from salcli.store.formats import RepresentationFile, writing_representation


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Representation, int], RepresentationFile]:
    """A real file, written in two batches, that is read some rows at a time."""

    def store(x: Representation, rows_per_chunk: int) -> RepresentationFile:
        n, n_classes, n_features = len(x), x.n_classes, x.feature.shape[1]
        monkeypatch.setattr("salcli.store.formats.CHUNK_BYTES", 4 * (n_classes + n_features) * rows_per_chunk)
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.h5"
        with writing_representation(path, n, n_classes, n_features, {}) as append:
            for rows in torch.arange(n).chunk(2):
                append(x.take(rows))
        return RepresentationFile.open(Found(path))

    return store
