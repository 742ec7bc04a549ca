"""Files that several processes write, that were damaged, or that say what cannot be."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from helpers.cli import salcli
from hypothesis import given, settings
from hypothesis import strategies as st

from salcli.engine.batches import Rows
from salcli.errors import BadArtifactError, StorageError
from salcli.store.files import (
    Found,
    Header,
    locked,
    own_sibling,
    read_arrays,
    read_tensors,
    write_arrays,
    write_tensors,
)
from salcli.store.formats import read_id_split
from salcli.store.layout import Workspace

KIND = "test"
FORK = multiprocessing.get_context("fork")


def write_often(path: Path, value: int) -> None:
    for _ in range(40):
        write_arrays(path, KIND, {"x": np.full(20_000, value)}, {})


def test_two_writers_of_one_file_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    writers = [FORK.Process(target=write_often, args=(path, value)) for value in (1, 2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            assert len(np.unique(read_arrays(Found(path), KIND)["x"])) == 1
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert [left.name for left in tmp_path.iterdir()] == ["x.h5"]


def test_what_a_killed_writer_left_is_removed_and_what_a_live_one_writes_is_not(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    sleeper = FORK.Process(target=time.sleep, args=(60,))
    sleeper.start()
    own = own_sibling(path, "partial")
    others = own.with_name(own.name.replace(str(os.getpid()), str(sleeper.pid)))
    others.touch()
    own_sibling(path, "partial")
    assert others.exists()
    sleeper.kill()
    sleeper.join()
    own_sibling(path, "partial")
    assert not others.exists()


def hold(path: Path, entered: "multiprocessing.synchronize.Event") -> None:
    with locked(path, "train-id"):
        entered.set()
        time.sleep(60)


def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    path, entered = tmp_path / "locks/x.lock", FORK.Event()
    first = FORK.Process(target=hold, args=(path, entered))
    first.start()
    assert entered.wait(30)
    with (
        pytest.raises(StorageError, match=rf"already running \(process {first.pid}\)"),
        locked(path, "train-id"),
    ):
        pass
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    with locked(path, "train-id"):
        pass


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_flipped_bit_is_noticed(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("flips")
    hdf5, tensors = folder / "a.h5", folder / "a.safetensors"
    write_arrays(hdf5, KIND, {"x": np.arange(50)}, {"why": "test"})
    write_tensors(tensors, Header(KIND), {"w": torch.arange(50.0)})
    path = data.draw(st.sampled_from([hdf5, tensors]))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with pytest.raises(BadArtifactError):
        read_arrays(Found(path), KIND) if path == hdf5 else read_tensors(Found(path))


def test_other_programs_can_read_a_sealed_file(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a.h5", KIND, {"x": np.arange(5)}, {})
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["x"][:].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("row", [10**9, -1, 2**62])
def test_rows_that_do_not_exist_are_never_read(row: int) -> None:
    with pytest.raises(BadArtifactError, match=f"1 rows, the first of them {row}, are not among the 8"):
        Rows((np.zeros((3, 2)), np.zeros((5, 2))), np.array([0, row])).read(slice(None))


@pytest.mark.parametrize(("test", "message"), [([0, 7], "stand there twice"), ([-1, 7], "numbers from 0 on")])
def test_a_split_with_rows_in_two_parts_is_refused(tmp_path: Path, test: list[int], message: str) -> None:
    parts = {"train": [0, 1], "calibration": [2], "wild": [3], "test": test}
    write_arrays(tmp_path / "id.h5", "id-split", {name: np.array(rows) for name, rows in parts.items()}, {})
    with pytest.raises(BadArtifactError, match=message):
        read_id_split(Found(tmp_path / "id.h5"))


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", Header(KIND), {"w": torch.tensor([1.0, torch.nan, torch.inf])})
    with pytest.raises(BadArtifactError, match="2 of 3 numbers of w are NaN or infinite"):
        read_tensors(Found(tmp_path / "a.safetensors"))


def test_verify_finds_a_flip_that_keeps_size_and_time(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace.root)
    found = salcli("verify")
    assert found.exit_code == 0
    assert "files match their checksums" in found.stdout
    path = next(Path("runs").rglob("wild.h5"))
    facts, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    found = salcli("verify")
    assert found.exit_code == 2
    assert f"{path} is damaged" in found.stdout
