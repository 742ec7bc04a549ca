"""Files are whole or not there; the same content gives the same bytes; what is damaged or foreign is refused."""

import json
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from helpers.cli import files
from hypothesis import given
from hypothesis import strategies as st

from salcli.errors import BadArtifactError, StorageError
from salcli.store.files import (
    SCHEMA,
    Found,
    Header,
    StoredArray,
    atomic_path,
    creating,
    fingerprint,
    read_arrays,
    read_header,
    read_tensors,
    reading,
    reading_json,
    write_arrays,
    write_csv,
    write_json,
    write_tensors,
    write_text,
)

MADE_BY = "salcli make-it --seed 3"


def refused(path: Path, kind: str | None = None) -> str:
    """The one message about a file that cannot be used: which file, what is wrong, how to make it again."""
    with pytest.raises(BadArtifactError) as caught:
        read_header(Found(path, MADE_BY), kind)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert message.endswith(f"; make it again: {MADE_BY}")
    return message


# --- whole or not at all


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down" / "file.txt"
    with atomic_path(path) as partial:
        partial.write_text("whole")
        assert not path.exists()
        assert partial.parent == path.parent  # or the rename would not be atomic
        assert partial.name.startswith(".")
    assert files(tmp_path) == {"deep/down/file.txt": b"whole"}


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, failure: type[BaseException]) -> None:
    path = tmp_path / "file.h5"
    write_arrays(path, "kind", {"a": np.arange(5)}, {})
    before = files(tmp_path)

    def fail() -> None:
        with creating(path, "kind", {}) as file:
            file.create_dataset("a", data=np.zeros(100_000))
            raise failure

    with pytest.raises(failure):
        fail()
    assert files(tmp_path) == before


def test_a_partial_file_of_a_killed_run_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".file.txt.partial").write_text("left behind by a killed process, and longer than the new text")
    write_text(tmp_path / "file.txt", "new")
    assert files(tmp_path) == {"file.txt": b"new"}


def test_a_path_that_cannot_be_written_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(StorageError, match=r"folder/file.txt cannot be written: (Not a directory|File exists); fix"):
        write_text(tmp_path / "folder" / "file.txt", "text")


@contextmanager
def small_files_only(size: int) -> Iterator[None]:
    """The system refuses to write beyond `size` bytes, as a full disk does, but for this process alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


WRITERS: dict[str, Callable[[Path], None]] = {
    "text": lambda path: write_text(path, "x" * 20_000),
    "table": lambda path: write_csv(path, [{"epoch": i, "loss": i / 7} for i in range(3000)]),
    "tensors": lambda path: write_tensors(path, Header("kind"), {"a": torch.zeros(10_000)}),
    "one large array": lambda path: write_arrays(path, "kind", {"a": np.arange(10_000)}, {}),
    # the HDF5 library would buffer each of these, and ignore the error when it closes
    "many small arrays": lambda path: write_arrays(path, "kind", {f"a{i}": np.arange(100) for i in range(50)}, {}),
}  # fmt: skip


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_that_does_not_fit_is_not_written(tmp_path: Path, writer: str) -> None:
    write_text(tmp_path / "file", "from before")
    with small_files_only(8192), pytest.raises(StorageError, match=r"file cannot be written: File too large; fix that"):
        WRITERS[writer](tmp_path / "file")
    assert files(tmp_path) == {"file": b"from before"}
    WRITERS[writer](tmp_path / "file")
    assert (tmp_path / "file").stat().st_size > 8192


# --- the same bytes


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    """Also a second later, and in whatever order the header is."""

    def write(folder: Path, order: int) -> dict[str, bytes]:
        about = dict(list({"b": 1, "a": {"y": [1.5], "x": 2}}.items())[::order])
        shared = torch.arange(6.0).reshape(2, 3)
        write_arrays(folder / "arrays.h5", "kind", {"x": np.arange(9), "group/y": np.eye(3)}, about)
        write_tensors(folder / "tensors", Header("kind", about, about), {"t": shared.T, "u": shared})
        write_csv(folder / "curve.csv", [{"x": 0.1, "y": "z"}])
        write_json(folder / "facts.json", {"π": 0.1})
        return files(folder)

    first = write(tmp_path / "first", 1)
    time.sleep(1.1)  # HDF5 counts its timestamps in seconds
    assert write(tmp_path / "second", -1) == first


def test_arrays_tensors_and_tables_are_read_as_they_were_written(tmp_path: Path) -> None:
    arrays = {"x": np.arange(9), "group/y": np.eye(3, dtype=np.float32)}
    write_arrays(tmp_path / "a", "kind", arrays, {"n": 3})
    found = read_arrays(Found(tmp_path / "a"), "kind")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array, strict=True)
    tensor = torch.randn(3, 4)
    write_tensors(tmp_path / "t", Header("kind", {"n": 3}, {"width": 2}), {"t": tensor.T})
    assert torch.equal(read_tensors(Found(tmp_path / "t"))["t"], tensor.T)
    write_csv(tmp_path / "c", [{"x": 1 / 3, "name": "a,b"}], fieldnames=("name", "x"))
    assert (tmp_path / "c").read_text() == 'name,x\n"a,b",0.333333\n'


# --- headers


@pytest.mark.parametrize("name", ["file.h5", "file.safetensors", "model.bin", "file"])
def test_a_header_is_read_from_a_file_of_any_name(tmp_path: Path, name: str) -> None:
    """What the file is shows in its content."""
    header = Header("kind", {"seed": 3, "nested": {"a": [1, None]}})
    write_arrays(tmp_path / name, "kind", {"x": np.zeros(2)}, header.about)
    assert read_header(Found(tmp_path / name), "kind") == header
    write_tensors(tmp_path / name, header, {"x": torch.zeros(2)})
    assert read_header(Found(tmp_path / name), "kind") == header


def set_attribute(name: str, value: object) -> Any:
    return lambda file: file.attrs.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_attribute("kind", "other"), "is a file of kind other, not kind"),
        (set_attribute("schema", SCHEMA + 1), f"has schema {SCHEMA + 1}, this salcli reads {SCHEMA}"),
        (set_attribute("schema", "new"), "is damaged or not a file of salcli"),
        (set_attribute("about", "no JSON"), "is damaged or not a file of salcli"),
        (set_attribute("about", "[]"), "is damaged or not a file of salcli"),
        (lambda file: file.attrs.__delitem__("about"), "is damaged or not a file of salcli"),
        (lambda file: file.attrs.clear(), "is damaged or not a file of salcli"),
    ],
)
def test_an_hdf5_file_with_another_header_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "file.h5"
    write_arrays(path, "kind", {"x": np.zeros(2)}, {})
    with h5py.File(path, "r+") as file:
        change(file)
    assert message in refused(path, "kind")
    with pytest.raises(BadArtifactError), reading(Found(path), "kind"):
        pass


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (None, "is damaged or not a file of salcli"),
        ({"format": "pt"}, "is damaged or not a file of salcli"),
        ({"salcli": "[]"}, "is damaged or not a file of salcli"),
        ({"salcli": '{"kind": "kind", "about": []}'}, "is damaged or not a file of salcli"),
        ({"salcli": '{"kind": "kind", "spec": 3}'}, "is damaged or not a file of salcli"),
        ({"salcli": '{"kind": "kind", "author": "x"}'}, "is damaged or not a file of salcli"),
        ({"salcli": '{"kind": "other"}'}, "is a file of kind other, not kind"),
        ({"salcli": '{"kind": "kind", "schema": 1}'}, f"has schema 1, this salcli reads {SCHEMA}"),
    ],
)
def test_a_safetensors_file_with_another_header_is_refused(
    tmp_path: Path, metadata: dict[str, str] | None, message: str
) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2)}, tmp_path / "file", metadata=metadata)
    assert message in refused(tmp_path / "file", "kind")


def test_an_error_inside_the_reading_block_means_that_the_file_is_damaged(tmp_path: Path) -> None:
    write_arrays(tmp_path / "file.h5", "kind", {}, {})
    with (
        pytest.raises(BadArtifactError, match=rf"is damaged .*; make it again: {MADE_BY}"),
        reading(Found(tmp_path / "file.h5", MADE_BY), "kind") as file,
    ):
        file["absent"]
    write_json(tmp_path / "file.json", {"a": 1})
    for mistake in (lambda content: content["b"], lambda content: content["a"]["b"], lambda content: content.a):
        with (
            pytest.raises(BadArtifactError, match="is damaged"),
            reading_json(Found(tmp_path / "file.json")) as content,
        ):
            mistake(content)


@given(share=st.floats(0, 0.999))
def test_json_that_is_cut_short_is_refused(tmp_path_factory: pytest.TempPathFactory, share: float) -> None:
    path = tmp_path_factory.getbasetemp() / "facts.json"
    text = json.dumps({"sal": {"auroc": 0.5, "label": "τ"}, "samples": [1, 2]})
    path.write_text(text[: int(share * len(text))])
    with pytest.raises(BadArtifactError, match="make it again"), reading_json(Found(path)):
        pass


# --- maps of arrays


def stored(path: Path, content: np.ndarray, **options: Any) -> np.ndarray:
    with creating(path, "kind", {}) as file:
        file.create_dataset("x", data=content, **options)
    with reading(Found(path), "kind") as file:
        return StoredArray.of(path, file["x"]).open()


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.int64])
def test_a_contiguous_array_is_a_read_only_map_that_outlives_the_open_file(tmp_path: Path, dtype: type) -> None:
    content = np.arange(24).reshape(4, 3, 2).astype(dtype)
    found = stored(tmp_path / "file.h5", content)
    assert isinstance(found, np.memmap)
    assert not found.flags.writeable
    np.testing.assert_array_equal(found, content, strict=True)


@pytest.mark.parametrize(
    ("content", "options"),
    [
        (np.arange(24).reshape(4, 6), {"chunks": (1, 6), "maxshape": (None, 6)}),
        (np.arange(24).reshape(4, 6), {"compression": "gzip"}),
        (np.arange(24).astype(">i4"), {}),
        (np.zeros((0, 3, 4, 4), np.uint8), {}),
    ],
    ids=["chunked", "compressed", "byte order", "empty"],
)
def test_an_array_that_cannot_be_mapped_is_read(tmp_path: Path, content: np.ndarray, options: dict[str, Any]) -> None:
    found = stored(tmp_path / "file.h5", content, **options)
    assert not isinstance(found, np.memmap)
    assert not found.flags.writeable
    np.testing.assert_array_equal(found, content)


def test_a_group_in_place_of_an_array_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.h5"
    write_arrays(path, "kind", {"x/y": np.zeros(3)}, {})
    with pytest.raises(BadArtifactError, match="its x are a group"), reading(Found(path), "kind") as file:
        StoredArray.of(path, file["x"])


# --- fingerprints


def test_a_fingerprint_follows_the_content_alone(tmp_path: Path) -> None:
    write_text(tmp_path / "one", "content")
    write_text(tmp_path / "two", "content")
    first = fingerprint(tmp_path / "one")
    assert first == fingerprint(tmp_path / "two")
    write_text(tmp_path / "two", "other")
    assert fingerprint(tmp_path / "two") not in (first, "")
    assert fingerprint(tmp_path / "nowhere") == fingerprint(tmp_path) == ""
