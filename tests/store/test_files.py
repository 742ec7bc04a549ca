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
from safetensors.torch import save_file

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


# --- whole or not at all


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_file_appears_when_it_is_whole_and_a_failure_leaves_the_old_one(
    tmp_path: Path, failure: type[BaseException]
) -> None:
    path = tmp_path / "deep" / "file.h5"
    with atomic_path(path) as partial:
        partial.write_text("whole")
        assert not path.exists()
        assert partial.parent == path.parent  # or the rename would not be atomic
    before = files(tmp_path)
    assert before == {"deep/file.h5": b"whole"}

    def fail() -> None:
        with creating(path, "kind", {}) as file:
            file.create_dataset("a", data=np.zeros(100_000))
            raise failure

    with pytest.raises(failure):
        fail()
    assert files(tmp_path) == before


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


def test_content_comes_back_as_it_was_and_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    """Also a second later, and in whatever order the header is."""

    def write(folder: Path, order: int) -> dict[str, bytes]:
        about = dict(list({"b": 1, "a": {"y": [1.5], "x": 2}}.items())[::order])
        shared = torch.arange(6.0).reshape(2, 3)
        write_arrays(folder / "arrays.h5", "kind", {"x": np.arange(9), "group/y": np.eye(3)}, about)
        write_tensors(folder / "tensors", Header("kind", about, about), {"t": shared.T, "u": shared})
        write_csv(folder / "curve.csv", [{"x": 1 / 3, "y": "a,b"}])
        write_json(folder / "facts.json", {"π": 0.1})
        return files(folder)

    first = write(tmp_path / "first", 1)
    found = read_arrays(Found(tmp_path / "first" / "arrays.h5"), "kind")
    np.testing.assert_array_equal(found["group/y"], np.eye(3), strict=True)
    assert torch.equal(read_tensors(Found(tmp_path / "first" / "tensors"))["t"], torch.arange(6.0).reshape(2, 3).T)
    assert first["curve.csv"] == b'x,y\n0.333333,"a,b"\n'
    time.sleep(1.1)  # HDF5 counts its timestamps in seconds
    assert write(tmp_path / "second", -1) == first


# --- headers


@pytest.mark.parametrize("storage", ["HDF5", "safetensors"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("kind", "other", "is a file of kind other, not kind"),
        ("schema", SCHEMA + 1, f"has schema {SCHEMA + 1}, this salcli reads {SCHEMA}"),
        ("about", [], "is damaged or not a file of salcli"),
        (None, None, "is damaged or not a file of salcli"),
    ],
)
def test_a_file_with_another_header_is_refused(
    tmp_path: Path, storage: str, name: str | None, value: object, message: str
) -> None:
    """One message: which file, what is wrong, how to make it again."""
    path = tmp_path / "file"
    if storage == "HDF5":
        write_arrays(path, "kind", {"x": np.zeros(2)}, {})
        with h5py.File(path, "r+") as file:
            file.attrs.update({name: str(value)}) if name else file.attrs.clear()
    else:
        header = {"kind": "kind", name: value} if name else {}
        save_file({"x": torch.zeros(2)}, path, metadata={"salcli": json.dumps(header)})
    with pytest.raises(BadArtifactError) as caught:
        read_header(Found(path, MADE_BY), "kind")
    assert str(caught.value).startswith(f"{path} {message}")
    assert str(caught.value).endswith(f"; make it again: {MADE_BY}")


def test_an_error_inside_the_reading_block_means_that_the_file_is_damaged(tmp_path: Path) -> None:
    found = Found(tmp_path / "file", MADE_BY)
    write_arrays(found.path, "kind", {"x/y": np.zeros(3)}, {})
    with pytest.raises(BadArtifactError, match=f"is damaged .*: {MADE_BY}"), reading(found, "kind") as file:
        file["absent"]
    with pytest.raises(BadArtifactError, match="its x are a group"), reading(found, "kind") as file:
        StoredArray.of(found.path, file["x"])
    write_json(found.path, {"a": 1})
    with pytest.raises(BadArtifactError, match="is damaged"), reading_json(found) as content:
        content["a"]["b"]


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


@pytest.mark.parametrize(
    ("content", "options", "is_mapped"),
    [
        (np.arange(24, dtype=np.float32).reshape(4, 3, 2), {}, True),
        (np.arange(24).reshape(4, 6), {"chunks": (1, 6), "maxshape": (None, 6)}, False),
        (np.arange(24).astype(">i4"), {}, False),
        (np.zeros((0, 3, 4, 4), np.uint8), {}, False),
    ],
    ids=["contiguous", "chunked", "byte order", "empty"],
)
def test_a_contiguous_array_is_a_map_that_outlives_the_open_file_and_any_other_is_read(
    tmp_path: Path, content: np.ndarray, options: dict[str, Any], is_mapped: bool
) -> None:
    found = stored(tmp_path / "file.h5", content, **options)
    assert isinstance(found, np.memmap) == is_mapped
    assert not found.flags.writeable
    np.testing.assert_array_equal(found, content)


def test_a_fingerprint_follows_the_content_alone(tmp_path: Path) -> None:
    for name, text in (("one", "content"), ("two", "content"), ("three", "other")):
        write_text(tmp_path / name, text)
    one, two, three = (fingerprint(tmp_path / name) for name in ("one", "two", "three"))
    assert one == two != three
    assert fingerprint(tmp_path / "nowhere") == fingerprint(tmp_path) == ""
