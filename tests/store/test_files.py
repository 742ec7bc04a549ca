"""Files are whole or not there; the same content gives the same bytes; what is damaged or foreign is refused."""

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from helpers.cli import files
from safetensors.torch import save_file

from salcli.errors import BadArtifactError, SalError
from salcli.store import files as store

MADE_BY = "salcli make-it --seed 3"
Limit = Callable[[int], AbstractContextManager[None]]


# --- whole or not at all


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_file_appears_when_it_is_whole_and_a_failure_leaves_the_old_one(
    tmp_path: Path, failure: type[BaseException]
) -> None:
    path = tmp_path / "deep" / "file.h5"
    with store.atomic_path(path) as partial:
        partial.write_text("whole")
        assert not path.exists()
        assert partial.parent == path.parent  # or the rename would not be atomic
    before = files(tmp_path)
    assert before == {"deep/file.h5": b"whole"}

    def fail() -> None:
        with store.creating(path, "kind", {}) as file:
            file.create_dataset("a", data=np.zeros(100_000))
            raise failure

    with pytest.raises(failure):
        fail()
    assert files(tmp_path) == before


WRITERS: dict[str, Callable[[Path], None]] = {
    "table": lambda path: store.write_csv(path, [{"epoch": i, "loss": i / 7} for i in range(3000)], ["epoch", "loss"]),
    "tensors": lambda path: store.write_tensors(path, store.Header("kind"), {"a": torch.zeros(10_000)}),
    "one large array": lambda path: store.write_arrays(path, "kind", {"a": np.arange(10_000)}, {}),
    # the HDF5 library would buffer each of these, and ignore the error when it closes
    "many small arrays": lambda path: store.write_arrays(path, "kind", {f"a{i}": np.eye(10) for i in range(50)}, {}),
}  # fmt: skip


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_that_does_not_fit_is_not_written(tmp_path: Path, writer: str, small_files_only: Limit) -> None:
    store.write_text(tmp_path / "file", "from before")
    with small_files_only(8192), pytest.raises(SalError, match=r"file cannot be written: File too large; fix that"):
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
        store.write_arrays(folder / "arrays.h5", "kind", {"x": np.arange(9), "group/y": np.eye(3)}, about)
        store.write_tensors(folder / "tensors", store.Header("kind", about, about), {"t": shared.T, "u": shared})
        store.write_csv(folder / "curve.csv", [{"x": 1 / 3, "y": "a,b"}], ["x", "y"])
        store.write_json(folder / "facts.json", {"π": 0.1})
        return files(folder)

    first = write(tmp_path / "first", 1)
    found = store.read_arrays(store.Found(tmp_path / "first" / "arrays.h5"), "kind")
    np.testing.assert_array_equal(found["group/y"], np.eye(3), strict=True)
    tensors = store.read_tensors(store.Found(tmp_path / "first" / "tensors"))
    assert torch.equal(tensors["t"], torch.arange(6.0).reshape(2, 3).T)
    assert first["curve.csv"] == b'x,y\n0.333333,"a,b"\n'
    time.sleep(1.1)  # HDF5 counts its timestamps in seconds
    assert write(tmp_path / "second", -1) == first


# --- headers


@pytest.mark.parametrize("storage", ["HDF5", "safetensors"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("kind", "other", "is a file of kind other, not kind"),
        ("schema", store.SCHEMA + 1, f"has schema {store.SCHEMA + 1}, this salcli reads {store.SCHEMA}"),
        (None, None, "is damaged or not a file of salcli"),
    ],
)
def test_a_file_with_another_header_is_refused(
    tmp_path: Path, storage: str, name: str | None, value: object, message: str
) -> None:
    """One message: which file, what is wrong, how to make it again."""
    path = tmp_path / "file"
    if storage == "HDF5":
        store.write_arrays(path, "kind", {"x": np.zeros(2)}, {})
        with h5py.File(path, "r+") as file:
            file.attrs.update({name: str(value)}) if name else file.attrs.clear()
    else:
        header = {"kind": "kind", name: value} if name else {}
        save_file({"x": torch.zeros(2)}, path, metadata={"salcli": json.dumps(header)})
    with pytest.raises(BadArtifactError) as caught:
        store.read_header(store.Found(path, MADE_BY), "kind")
    assert str(caught.value).startswith(f"{path} {message}")
    assert str(caught.value).endswith(f"; make it again: {MADE_BY}")
