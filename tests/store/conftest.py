"""One small file of every format."""

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.networks import spec

from salcli.data.sets import Samples
from salcli.data.splits import IdSplit
from salcli.models.network import Classifier, OodClassifier
from salcli.sal.gradients import Representation
from salcli.store import formats
from salcli.store.files import Found


@pytest.fixture(scope="session")
def representation() -> Representation:
    generator = torch.Generator().manual_seed(0)
    feature, logits = torch.randn(50, 6, generator=generator), torch.randn(50, 4, generator=generator)
    return Representation(feature, logits, torch.randint(0, 4, (50,), generator=generator))


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory, representation: Representation) -> Path:
    """A folder with a file for every reader, under its name. Read only."""
    folder, part, rng = tmp_path_factory.mktemp("formats"), np.arange(3), np.random.default_rng(0)
    images = rng.integers(0, 256, (9, 1, 4, 4), dtype=np.uint8)
    names = tuple(f"{i}.png" for i in range(9))
    samples = Samples(images, np.arange(9) % 3, ("a", "b", "c"), np.arange(9) > 5, files=tuple(map(Path, names)))
    formats.write_samples(folder / "samples", samples, {"fit": "crop"})
    formats.write_id_split(folder / "split", IdSplit(part, part + 3, part + 6, part + 9), {})
    formats.write_index(folder / "wild", formats.WILD_SET, part, {})
    formats.write_wild_truth(folder / "truth", part > 1, {})
    with formats.writing_representation(folder / "representation", 50, 4, 6, {"n": 50}) as append:
        for start in range(0, 50, 20):
            append(representation.take(torch.arange(start, min(start + 20, 50))))
    scores = rng.normal(size=7)
    chosen = formats.Candidates(
        np.array([1, 4]), scores, np.arange(7) % 3, scores[:5], np.full(7, np.nan), np.zeros(7, np.int64), 0.25, "sal"
    )
    formats.write_candidates(folder / "candidates", chosen, {"seed": 3})
    torch.manual_seed(0)
    formats.write_network(folder / "classifier", Classifier(spec("small-cnn", 3, 1)), {"seed": 3})
    formats.write_network(folder / "ood-classifier", OodClassifier(spec("small-cnn", 3, 1)), {"seed": 3})
    return folder


@pytest.fixture(scope="session")
def readers() -> dict[str, Callable[[Found], Any]]:
    """Every reader by the name of the file that it reads."""
    return {
        "samples": formats.read_samples,
        "split": formats.read_id_split,
        "wild": lambda found: formats.read_index(found, formats.WILD_SET),
        "truth": formats.read_wild_truth,
        "representation": lambda found: list(formats.RepresentationFile.open(found).chunks()),
        "candidates": formats.read_candidates,
        "classifier": lambda found: formats.read_network(found, Classifier),
        "ood-classifier": lambda found: formats.read_network(found, OodClassifier),
    }


@pytest.fixture(scope="session")
def small_files_only() -> Callable[[int], AbstractContextManager[None]]:
    """The system refuses to write beyond so many bytes, as a full disk does, but for this process alone."""

    @contextmanager
    def limited(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited
