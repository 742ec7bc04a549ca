"""Files that several processes write, that were damaged, or that say what cannot be."""

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from helpers.cli import salcli
from hypothesis import given, settings
from hypothesis import strategies as st

from salcli.engine.batches import Rows
from salcli.errors import BadArtifactError, SalError
from salcli.models.network import Classifier
from salcli.project.verify import verify
from salcli.store import files as store
from salcli.store.formats import read_id_split, read_network
from salcli.store.layout import Artifact, Workspace

KIND = "test"
FORK = multiprocessing.get_context("fork")


def write_often(path: Path, value: int) -> None:
    for _ in range(40):
        store.write_arrays(path, KIND, {"x": np.full(20_000, value)}, {})


def test_two_writers_of_one_file_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    writers = [FORK.Process(target=write_often, args=(path, value)) for value in (1, 2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            assert len(np.unique(store.read_arrays(store.Found(path), KIND)["x"])) == 1
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert [left.name for left in tmp_path.iterdir()] == ["x.h5"]


def test_what_a_killed_writer_left_is_removed_and_what_a_live_one_writes_is_not(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    sleeper = FORK.Process(target=time.sleep, args=(60,))
    sleeper.start()
    own = store.own_sibling(path, "partial")
    others = own.with_name(own.name.replace(str(os.getpid()), str(sleeper.pid)))
    others.touch()
    store.own_sibling(path, "partial")
    assert others.exists()
    sleeper.kill()
    sleeper.join()
    store.own_sibling(path, "partial")
    assert not others.exists()


def hold(path: Path, entered: "multiprocessing.synchronize.Event") -> None:
    with store.locked(path, "train-id"):
        entered.set()
        time.sleep(60)


def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    path, entered = tmp_path / "locks/x.lock", FORK.Event()
    first = FORK.Process(target=hold, args=(path, entered))
    first.start()
    assert entered.wait(30)
    with pytest.raises(SalError, match=rf"already running \(process {first.pid}\)"), store.locked(path, "train-id"):
        pass
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    with store.locked(path, "train-id"):
        pass


def test_a_change_is_seen_also_where_the_clock_goes_backwards(tmp_path: Path) -> None:
    path, seen = tmp_path / "x.txt", set()
    for i, time_ns in enumerate([10**18, 10**18, 10**17]):
        store.write_text(path, str(i))
        os.utime(path, ns=(time_ns, time_ns))
        seen.add(store.fingerprint(path))
    assert len(seen) == 3


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_flipped_bit_is_noticed(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("flips")
    hdf5, tensors = folder / "a.h5", folder / "a.safetensors"
    store.write_arrays(hdf5, KIND, {"x": np.arange(50)}, {"why": "test"})
    store.write_tensors(tensors, store.Header(KIND), {"w": torch.arange(50.0)})
    path = data.draw(st.sampled_from([hdf5, tensors]))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with pytest.raises(BadArtifactError):
        store.read_arrays(store.Found(path), KIND) if path == hdf5 else store.read_tensors(store.Found(path))


@pytest.mark.parametrize("row", [10**9, -1, 2**62])
def test_rows_that_do_not_exist_are_never_read(row: int) -> None:
    with pytest.raises(BadArtifactError, match=f"1 rows, the first of them {row}, are not among the 8"):
        Rows((np.zeros((3, 2)), np.zeros((5, 2))), np.array([0, row])).read(slice(None))


@pytest.mark.parametrize(("test", "message"), [([0, 7], "stand there twice"), ([-1, 7], "numbers from 0 on")])
def test_a_split_with_rows_in_two_parts_is_refused(tmp_path: Path, test: list[int], message: str) -> None:
    parts = {"train": [0, 1], "calibration": [2], "wild": [3], "test": test}
    store.write_arrays(tmp_path / "id.h5", "id-split", {name: np.array(rows) for name, rows in parts.items()}, {})
    with pytest.raises(BadArtifactError, match=message):
        read_id_split(store.Found(tmp_path / "id.h5"))


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    weights = {"w": torch.tensor([1.0, torch.nan, torch.inf])}
    store.write_tensors(tmp_path / "a.safetensors", store.Header(KIND), weights)
    with pytest.raises(BadArtifactError, match="2 of 3 numbers of w are NaN or infinite"):
        store.read_tensors(store.Found(tmp_path / "a.safetensors"))


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


def resealed(source: Path, target: Path, change: Callable[[h5py.File], None]) -> store.Found:
    """A copy that someone changed, who knows about the checksum."""
    shutil.copyfile(source, target)
    with h5py.File(target, "r+") as file:
        change(file)
    with target.open("r+b") as raw:
        raw.write(store.NOT_SEALED)
    store._seal(target)
    return store.Found(target)


def put(name: str, values: object) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[name]
        file[name] = values

    return change


def claim(file: h5py.File) -> None:
    del file["label"]
    file.create_dataset("label", (10**12,), np.int64, chunks=(1000,))


def point_outside(file: h5py.File) -> None:
    del file["label"]
    file.create_dataset("label", (3,), "u1", external=[("/etc/passwd", 0, 3)])


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("representation", claim, "label is not in the file: 8,000,000,000,000 bytes"),
        ("representation", point_outside, "label is not in the file"),
        ("representation", put("label", h5py.ExternalLink("/etc/passwd", "x")), "label is a link"),
        ("representation", put("label", np.full(50, 10**12)), "50 of its 50 label numbers are not between 0 and 3"),
        ("representation", put("feature", np.tile(np.float32([1e30, -1e30]), (50, 3))), "feature of 50 of 50 samples"),
        ("representation", put("logits", np.full((50, 4), np.nan, np.float32)), "logits of 50 of 50 samples is NaN"),
        ("samples", put("images", np.zeros((9, 1, 0, 4), np.uint8)), "its samples are 9 × 1 × 0 × 4 of uint8"),
        ("split", put("train", np.zeros((1, 3), int)), "its train are not a list of numbers from 0 on"),
        ("wild", put("index", np.array([b"x"])), "its index are not a list of numbers from 0 on"),
        ("candidates", put("index", np.array([1, 10**9])), "1 of its 2 candidates are not between 0 and 6"),
        ("candidates", put("wild_score", np.full(7, np.nan)), "7 of 7 numbers of wild_score are NaN or infinite"),
    ],
)
def test_a_file_with_a_valid_checksum_is_not_trusted_either(
    written: Path, readers: dict[str, Callable[[store.Found], Any]], tmp_path: Path,
    kind: str, change: Callable[[h5py.File], None], message: str,
) -> None:  # fmt: skip
    with pytest.raises(BadArtifactError, match=message):
        readers[kind](resealed(written / kind, tmp_path / "x.h5", change))


def test_a_network_file_that_declares_more_than_it_holds_is_refused(written: Path, tmp_path: Path) -> None:
    found, path = store.Found(written / "classifier"), tmp_path / "x"
    header, tensors = store.read_header(found), store.read_tensors(found)
    for key, value in (("backbone", "wrn-100000-1000"), ("backbone", "wrn-40-2"), ("n_classes", 10**12), ("std", [0])):
        store.write_tensors(path, store.Header(header.kind, header.about, {**header.spec, key: value}), tensors)
        with pytest.raises(BadArtifactError, match="does not fit its own description"):
            read_network(store.Found(path), Classifier)


def test_deep_json_and_pipes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(BadArtifactError, match="is damaged"), store.reading_json(store.Found(tmp_path / "deep.json")):
        pass
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SalError, match="is a pipe or a device"):
        store.Found(tmp_path / "pipe")
    with pytest.raises(SalError, match="is a pipe or a device"):  # to write to it would wait for a reader
        Workspace(tmp_path).target(Artifact("pipe", ""))


def test_verify_does_not_pass_over_what_it_cannot_read(tmp_path: Path) -> None:
    store.write_arrays(tmp_path / "runs/0/a.h5", KIND, {"x": np.arange(5)}, {})
    assert verify(tmp_path).n_files == 1
    os.mkfifo(tmp_path / "runs/0/b.h5")
    with pytest.raises(SalError, match=r"b\.h5 is a pipe or a device"):
        verify(tmp_path)
