"""What each kind of file holds comes back as it was; a damaged, truncated or foreign file gives one error."""

import json
import pickle
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.cli import files
from helpers.compute import Watched
from helpers.fake_data import Malicious
from helpers.quick import REPOSITORY
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from salcli.data.duplicates import sample_digests
from salcli.data.sets import Samples
from salcli.errors import BadArtifactError
from salcli.models.network import Classifier
from salcli.sal.gradients import Representation
from salcli.store import formats
from salcli.store.files import Found, Header, write_tensors
from salcli.store.formats import RepresentationFile, ResumePoint

Readers = dict[str, Callable[[Found], Any]]
MADE_BY = "salcli make-it --seed 3"
NAMES = ["samples", "split", "wild", "truth", "representation", "candidates", "classifier", "ood-classifier"]
EVERY_FORMAT = pytest.mark.parametrize("name", NAMES)


def refused(read: Callable[[Found], Any], path: Path) -> str:
    with pytest.raises(BadArtifactError) as caught:
        read(Found(path, MADE_BY))
    message = str(caught.value)
    assert message.startswith(str(path))
    assert message.endswith(f"; make it again: {MADE_BY}")
    return message


# --- every format


@EVERY_FORMAT
@given(content=st.none() | st.binary(max_size=200), data=st.data())
def test_a_file_that_is_cut_short_anywhere_and_any_other_file_is_refused(
    written: Path,
    readers: Readers,
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    content: bytes | None,
    data: Any,
) -> None:
    path, whole = tmp_path_factory.getbasetemp() / "odd", (written / name).read_bytes()
    if content is None:
        length = data.draw(st.integers(0, 3000) | st.integers(0, len(whole) - 1) | st.just(len(whole) - 1))
        content = whole[: min(length, len(whole) - 1)]
    path.write_bytes(content)
    refused(readers[name], path)


def test_nothing_is_unpickled(readers: Readers, tmp_path: Path) -> None:
    path, trace = tmp_path / "file", tmp_path / "trace"
    torch.save({"config": "x", "state": Malicious(trace)}, path)
    assert ResumePoint(path, {}, Watched()).load() is None
    path.write_bytes(pickle.dumps(Malicious(trace)))
    for read in readers.values():
        refused(read, path)
    assert not trace.exists()


# CIFAR is published as pickles: tests/data/test_readers.py shows what becomes of code in them
ARRAYS_ONLY = REPOSITORY / "salcli" / "data" / "readers.py"


def test_the_source_loads_nothing_that_could_run_code() -> None:
    unsafe = r"\bpickle\b|torch\.load\b(?!\(.*\bweights_only=True\))|allow_pickle=True|joblib|(?<!\.)\b(eval|exec)\("
    for path in {*(REPOSITORY / "salcli").rglob("*.py")} - {ARRAYS_ONLY}:
        assert not re.search(unsafe, path.read_text()), path


# --- samples


@pytest.mark.parametrize(
    "samples",
    [
        Samples(np.zeros((0, 3, 4, 4), np.uint8)),
        Samples(np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32), np.arange(5)),
        # an attribute of HDF5 takes 64 kB and no more
        Samples(np.zeros((3, 1, 1, 1), np.uint8), np.arange(3), tuple(f"lange Namen {k}\udcff" for k in range(4000))),
    ],
    ids=["empty", "vectors", "many long class names"],
)  # fmt: skip
def test_samples_of_any_size_are_stored(tmp_path: Path, samples: Samples) -> None:
    formats.write_samples(tmp_path / "set.h5", samples, {})
    found = formats.read_samples(Found(tmp_path / "set.h5"))
    np.testing.assert_array_equal(found.array, samples.array, strict=True)
    assert isinstance(found.array, np.memmap) or not len(samples)
    assert found.class_names == samples.class_names
    assert formats.read_file_names(Found(tmp_path / "set.h5")) == ()
    np.testing.assert_array_equal(formats.read_digests(Found(tmp_path / "set.h5")), sample_digests(samples.array))


@settings(max_examples=30)
@given(st.lists(st.integers(0, 4), max_size=6), st.integers(0, 5))
def test_a_stream_with_fewer_rows_gives_the_same_bytes_as_those_rows_at_once(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], n_missing: int
) -> None:
    """Rows that could not be decoded are missing at the end; no draft is left."""
    folder = tmp_path_factory.mktemp("stream")
    total = sum(sizes)
    array = np.arange(total * 4, dtype=np.uint8).reshape(total, 1, 2, 2)
    ends = np.cumsum([0, *sizes])
    pieces = (array[start:end] for start, end in pairwise(ends))
    samples = Samples(array, np.arange(total))
    rest = samples, sample_digests(array), {"fit": "crop"}
    formats.write_streamed_samples(folder / "streamed", (total + n_missing, 1, 2, 2), array.dtype, pieces, lambda: rest)
    formats.write_samples(folder / "at once", samples, {"fit": "crop"})
    content = files(folder)
    assert content["streamed"] == content["at once"]
    assert len(content) == 2


# --- representations


def assert_same(ours: Representation, expected: Representation) -> None:
    assert ours.feature.equal(expected.feature)
    assert ours.logits.equal(expected.logits)
    assert ours.label.equal(expected.label)


def joined(source: RepresentationFile | Representation) -> Representation:
    parts = [vars(chunk).values() for chunk in source.chunks()]
    return Representation(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


@settings(max_examples=30)
@given(st.sets(st.integers(0, 49)), st.integers(1, 60), st.integers(1, 5))
def test_taking_rows_of_a_file_is_taking_them_in_memory(
    written: Path, representation: Representation, chosen: set[int], rows_per_chunk: int, step: int
) -> None:
    """All of them, some, rows of rows; whether the file then streams or is in memory."""
    rows = torch.tensor(sorted(chosen), dtype=torch.int64)
    of_rows = torch.arange(0, len(rows), step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "CHUNK_BYTES", rows_per_chunk * 4 * (6 + 4))
        file = RepresentationFile.open(Found(written / "representation"))
        assert (len(file), file.n_classes, file.n_features, file.about) == (50, 4, 6, {"n": 50})
        assert all(len(chunk) <= rows_per_chunk for chunk in file.chunks())
        assert_same(joined(file), representation)
        assert_same(file.whole(), representation)
        taken = file.take(rows)
        expected = representation.take(rows)
        assert isinstance(taken, Representation) == (0 < len(rows) <= rows_per_chunk)
        for ours, truth in ((taken, expected), (taken.take(of_rows), expected.take(of_rows))):
            assert len(ours) == len(truth)
            assert ours.predicted.equal(truth.predicted)
            if len(truth):
                assert_same(joined(ours), truth)
            else:
                assert not list(ours.chunks()) or isinstance(ours, Representation)


# --- networks


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "does not fit its own description"),  # but there is one tensor more
        ({"mean": 3}, "does not fit its own description"),
        ({"backbone": "small-cn"}, "no backbone is called small-cn (did you mean small-cnn?); known: "),
    ],
)
def test_a_network_that_does_not_fit_its_description_is_refused(
    written: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with safe_open(written / "classifier", framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = json.loads(file.metadata()["salcli"])
    described = {**header, "spec": header["spec"] | changes}
    write_tensors(tmp_path / "net", Header(**described), weights | {"extra": torch.zeros(1)})
    assert reason in refused(lambda found: formats.read_network(found, Classifier), tmp_path / "net")


# --- the state of an unfinished training


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda path: None, None),
        (lambda path: ResumePoint(path, {"lr": 0.2}, Watched()).save({}), "params or inputs have changed"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "the state of the stopped run cannot be read"),
        (lambda path: torch.save([1, 2], path), "the state of the stopped run cannot be read"),
    ],
    ids=["its own", "other settings", "cut short", "other content"],
)
def test_a_state_is_loaded_and_noted_if_it_cannot_be_used(
    tmp_path: Path, change: Callable[[Path], object], note: str | None
) -> None:
    watched, path = Watched(), tmp_path / "deep" / "state.pt"
    point = ResumePoint(path, {"lr": 0.1, "split": "x"}, watched)
    assert point.load() is None
    point.save({"epoch": 3})
    change(path)
    loaded = ResumePoint(path, {"split": "x", "lr": 0.1}, watched).load()
    assert loaded == (None if note else {"epoch": 3})
    assert [text.partition(": ")[2].startswith(str(note)) for text in watched.notes] == ([True] if note else [])
