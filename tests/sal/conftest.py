"""Random gradients, in memory and in files."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from salcli.sal.gradients import Factors, Representation, last_layer_residual
from salcli.store.files import Found
from salcli.store.formats import RepresentationFile, writing_representation


@pytest.fixture(scope="session")
def random_factors() -> Callable[..., Factors]:
    """Of a random head on random features, in float64, with labels that need not be the predicted ones."""

    def make(n: int, n_classes: int, n_features: int, seed: int = 0) -> Factors:
        rng = torch.Generator().manual_seed(seed)
        logits = 2 * torch.randn(n, n_classes, generator=rng, dtype=torch.float64)
        feature = torch.randn(n, n_features, generator=rng, dtype=torch.float64)
        label = torch.randint(n_classes, (n,), generator=rng)
        return Factors(last_layer_residual(logits, label), feature, label)

    return make


@pytest.fixture(scope="session")
def random_representation() -> Callable[..., Representation]:
    """In single precision, as a file holds it."""

    def make(n: int, n_classes: int, n_features: int, seed: int = 0) -> Representation:
        rng = torch.Generator().manual_seed(seed)
        logits, feature = 2 * torch.randn(n, n_classes, generator=rng), torch.randn(n, n_features, generator=rng)
        return Representation(feature, logits, torch.randint(n_classes, (n,), generator=rng))

    return make


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Representation, int], RepresentationFile]:
    """A real file, written in two batches, that is read some rows at a time."""

    def store(x: Representation, rows_per_chunk: int) -> RepresentationFile:
        n, n_classes, n_features = len(x), x.n_classes, x.feature.shape[1]
        monkeypatch.setattr("salcli.store.formats.CHUNK_BYTES", 4 * (n_classes + n_features) * rows_per_chunk)
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.h5"
        with writing_representation(path, n, n_classes, n_features, {}) as writer:
            for rows in torch.arange(n).chunk(2):
                writer.append(x.take(rows))
        return RepresentationFile.open(Found(path))

    return store
