"""What each kind of file holds comes back as it was; a damaged, truncated or foreign file gives one error."""

import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from helpers.cli import files
from helpers.compute import Watched
from helpers.networks import random_images, spec
from helpers.quick import REPOSITORY
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from salcli.data.duplicates import sample_digests
from salcli.data.samples import Samples
from salcli.errors import BadArtifactError
from salcli.models.network import Classifier
from salcli.sal.gradients import Representation
from salcli.store import formats
from salcli.store.files import Found, read_header
from salcli.store.formats import Candidates, Description, RepresentationFile, ResumePoint

Readers = dict[str, Callable[[Found], Any]]
MADE_BY = "salcli make-it --seed 3"
HDF5 = ["samples", "split", "wild", "truth", "representation", "candidates"]
NAMES = [*HDF5, "classifier", "ood-classifier"]
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


@EVERY_FORMAT
def test_a_file_of_another_kind_is_refused_with_both_names(written: Path, readers: Readers, name: str) -> None:
    own = read_header(Found(written / name)).kind
    for other in set(NAMES) - {name}:
        message = refused(readers[name], written / other)
        if (name in HDF5) == (other in HDF5):
            assert f"is a file of kind {read_header(Found(written / other)).kind}, not {own}" in message


@pytest.mark.parametrize("name", sorted(set(HDF5) - {"truth"}))
def test_a_file_without_its_arrays_is_refused(written: Path, readers: Readers, tmp_path: Path, name: str) -> None:
    """Of the truth no array means that it is not known. What is optional for samples must fit the images."""
    with h5py.File(written / name) as file:
        arrays = set(file) - {"class_names", "names"}
    for array in arrays:
        shutil.copy(written / name, tmp_path / name)
        with h5py.File(tmp_path / name, "r+") as file:
            del file[array]
            if array in ("labels", "is_test"):
                file[array] = np.zeros(8, int)
        refused(readers[name], tmp_path / name)


class Malicious:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.trace,)


def test_nothing_is_unpickled(readers: Readers, tmp_path: Path) -> None:
    path, trace = tmp_path / "file", tmp_path / "trace"
    torch.save({"config": "x", "state": Malicious(trace)}, path)
    assert ResumePoint(path, {}, Watched()).load() is None
    for content in (path.read_bytes(), pickle.dumps(Malicious(trace))):
        path.write_bytes(content)
        for read in readers.values():
            refused(read, path)
    assert not trace.exists()
    pickle.loads(path.read_bytes())
    assert trace.exists()  # the trap works


# CIFAR is published as pickles: tests/data/test_readers.py shows what becomes of code in them
ARRAYS_ONLY = REPOSITORY / "salcli" / "data" / "readers.py"


def test_the_source_loads_nothing_that_could_run_code() -> None:
    unsafe = r"\bpickle\b|torch\.load\b(?!\(.*\bweights_only=True\))|allow_pickle=True|joblib|(?<!\.)\b(eval|exec)\("
    for path in {*(REPOSITORY / "salcli").rglob("*.py")} - {ARRAYS_ONLY}:
        assert not re.search(unsafe, path.read_text()), path


# --- samples


def test_samples_are_read_as_a_map_of_the_file(written: Path) -> None:
    found = formats.read_samples(Found(written / "samples"))
    assert isinstance(found.array, np.memmap)
    with h5py.File(written / "samples") as file:
        np.testing.assert_array_equal(found.array, file["images"])
    assert found.class_names == ("a", "b", "c")
    assert found.labels is not None
    assert found.is_test is not None
    assert found.labels.tolist() == [0, 1, 2] * 3
    assert found.is_test.sum() == 3
    assert formats.read_file_names(Found(written / "samples"))[4] == "4.png"
    assert read_header(Found(written / "samples")).about == {"fit": "crop", "name": "some"}


@pytest.mark.parametrize(
    "samples",
    [
        Samples(np.zeros((0, 3, 4, 4), np.uint8)),
        Samples(np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32), np.arange(5)),
        # an attribute of HDF5 takes 64 kB and no more
        Samples(np.zeros((3, 1, 1, 1)), np.arange(3), tuple(f"langer Name für {k}\udcff" for k in range(4000))),
    ],
    ids=["empty", "vectors", "many long class names"],
)  # fmt: skip
def test_samples_of_any_size_are_stored(tmp_path: Path, samples: Samples) -> None:
    formats.write_samples(tmp_path / "set.h5", samples, "some")
    found = formats.read_samples(Found(tmp_path / "set.h5"))
    np.testing.assert_array_equal(found.array, samples.array, strict=True)
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
    rest = Description("some", np.arange(total), about={"fit": "crop"}, digests=sample_digests(array))
    formats.write_streamed_samples(
        folder / "streamed", (total + n_missing, 1, 2, 2), array.dtype, pieces, lambda: rest, may_be_fewer=True
    )
    formats.write_samples(folder / "at once", Samples(array, np.arange(total)), "some", {"fit": "crop"})
    content = files(folder)
    assert content["streamed"] == content["at once"]
    assert len(content) == 2


@pytest.mark.parametrize("may_be_fewer", [True, False])
def test_a_stream_that_fails_leaves_nothing(tmp_path: Path, may_be_fewer: bool) -> None:
    def pieces() -> Iterator[np.ndarray]:
        yield np.zeros((2, 1, 2, 2), np.uint8)
        raise KeyboardInterrupt

    shape, dtype = (4, 1, 2, 2), np.dtype(np.uint8)
    with pytest.raises(KeyboardInterrupt):
        formats.write_streamed_samples(
            tmp_path / "set.h5", shape, dtype, pieces(), lambda: Description("x"), may_be_fewer=may_be_fewer
        )
    assert not files(tmp_path)


# --- splits, the wild set, candidates


def test_splits_wild_sets_and_the_truth_come_back_as_they_were(written: Path, tmp_path: Path) -> None:
    parts = vars(formats.read_id_split(Found(written / "split"))).values()
    wild, truth = formats.read_wild_set(Found(written / "wild")), formats.read_wild_truth(Found(written / "truth"))
    assert [part.tolist() for part in parts] == np.arange(12).reshape(4, 3).tolist()
    assert (wild.source.tolist(), wild.ood_test.tolist()) == ([0, 1, 2], [3, 4, 5])
    assert truth is not None
    assert truth.tolist() == [False, False, True]
    formats.write_wild_truth(tmp_path / "truth", None, {})
    assert formats.read_wild_truth(Found(tmp_path / "truth")) is None


@settings(max_examples=30)
@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=20), st.floats(allow_nan=False, allow_infinity=False))
def test_candidates_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, scores: list[float], threshold: float
) -> None:
    path, score = tmp_path_factory.getbasetemp() / "candidates", np.array(scores)
    is_candidate = score > threshold
    chosen = Candidates(np.flatnonzero(is_candidate), score, np.arange(len(score)), -score, threshold, "gradnorm")
    formats.write_candidates(path, chosen, {"seed": 3})
    found = formats.read_candidates(Found(path))
    assert (found.threshold, found.score_name) == (threshold, "gradnorm")
    for name in ("index", "wild_score", "predicted", "calibration_score"):
        np.testing.assert_array_equal(getattr(found, name), getattr(chosen, name), strict=True)
    np.testing.assert_array_equal(found.is_candidate, is_candidate)
    np.testing.assert_array_equal(found.score, score[is_candidate])
    assert read_header(Found(path)).about["seed"] == 3


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


def test_a_network_comes_back_ready_for_inference(written: Path) -> None:
    network = formats.read_network(Found(written / "classifier"), Classifier)
    assert network.spec == spec("small-cnn", 3, 1)
    torch.manual_seed(0)
    expected, images = Classifier(spec("small-cnn", 3, 1)).eval(), random_images(2, 1, 8, 8)
    assert network(images).equal(expected(images))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "does not fit its own description"),  # but there is one tensor more
        ({"n_classes": 9}, "does not fit its own description"),
        ({"mean": 3}, "does not fit its own description"),
        ({"backbone": None}, "does not fit its own description"),
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
    save_file(weights | {"extra": torch.zeros(1)}, tmp_path / "net", metadata={"salcli": json.dumps(described)})
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
def test_a_state_is_loaded_until_it_is_cleared_and_noted_if_it_cannot_be_used(
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
    point.clear()
    assert point.load() is None
