"""Two processes on this machine's CPU, started by torchrun, do what one does."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from subprocess import PIPE, CompletedProcess, Popen
from typing import Any

import h5py
import numpy as np
import pytest
from helpers.cli import process, refused
from helpers.quick import EXPERIMENT, OOD, REPOSITORY
from helpers.two_processes import FILTERS, SHORT, TRAINED, loss_and_accuracy, wild_scores
from hypothesis import given
from hypothesis import strategies as st

from salcli.engine.device import Processes
from salcli.params.schema import load_params
from salcli.store.layout import Artifact, Workspace

HELPERS = REPOSITORY / "tests" / "helpers"
Together = tuple[Path, list[dict[str, Any]]]
SALCLI = [sys.executable, "-m", "salcli"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def torchrun(*arguments: str, cwd: Path) -> Popen[str]:
    search = os.pathsep.join([str(HELPERS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search}
    return Popen((*TORCHRUN, *arguments), cwd=cwd, env=environment, stdout=PIPE, stderr=PIPE, text=True)


def two_processes(*arguments: str, cwd: Path) -> CompletedProcess[str]:
    running = torchrun(*arguments, cwd=cwd)
    out, errors = running.communicate()
    return CompletedProcess(running.args, running.returncode, out, errors)


@pytest.fixture(scope="module")
def together(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Together:
    """A workspace in which two processes ran every stage, and what each of them saw."""
    root = shutil.copytree(built, tmp_path_factory.mktemp("together") / "workspace")
    done = two_processes(str(HELPERS / "two_processes.py"), str(root), cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    return root, json.loads((root / "seen.json").read_text())


@given(st.integers(0, 1000), st.integers(1, 40))
def test_parts_are_disjoint_contiguous_and_all_there_is(n: int, size: int) -> None:
    parts = [list(range(n))[Processes(rank, size).part(n)] for rank in range(size)]
    assert [i for part in parts for i in part] == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def arrays(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        found: dict[str, np.ndarray] = {}
        file.visititems(lambda name, item: found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None)
        return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "artifact",
    [
        *(EXPERIMENT.id_representation(part) for part in ("train", "calibration", "test")),
        *(EXPERIMENT.wild_representation, EXPERIMENT.test_representation()),
        *(EXPERIMENT.candidates, EXPERIMENT.evaluation("scores.h5")),
    ],
    ids=lambda artifact: Path(artifact.path).stem,
)
def test_extraction_filter_and_evaluation_give_what_one_process_gives(
    together: Together, built: Path, artifact: Artifact
) -> None:
    """Indices and labels are equal; the rest to float tolerance: batches of another size may add up differently."""
    ours, alone = arrays(together[0] / artifact.path), arrays(built / artifact.path)
    for key, found in ours.items():
        exact = found.dtype.kind == "i"
        np.testing.assert_allclose(found, alone[key], rtol=0 if exact else 1e-4, atol=0 if exact else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILTERS)
def test_the_filter_scores_as_one_process_does(together: Together, workspace: Workspace, name: str) -> None:
    """One direction for all classes is shared row by row, of the pool or of the wild data."""
    alone = wild_scores(workspace, load_params(workspace.root / "params.yaml", FILTERS[name])[0])
    first, second = (seen[name] for seen in together[1])
    assert first == second
    np.testing.assert_allclose(first, alone, rtol=1e-4, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["train_id", *TRAINED])
def test_training_has_about_the_loss_of_one_process(together: Together, workspace: Workspace, what: str) -> None:
    alone = loss_and_accuracy(workspace, load_params(workspace.root / "params.yaml", SHORT)[0], what)
    first, second = (seen[what] for seen in together[1])
    assert first == second
    # on a CPU each half of a batch has its own batch-norm statistics
    assert first["loss"] == pytest.approx(alone["loss"], rel=0.3)
    assert first["accuracy"] == pytest.approx(alone["accuracy"], abs=0.1)


@pytest.mark.slow
def test_the_launcher_of_params_starts_two_processes_and_one_speaks(workspace: Workspace, built: Path) -> None:
    (workspace.root / EXPERIMENT.candidates.path).unlink()
    launcher = "launcher=torchrun --standalone --nproc-per-node 2"
    done = process(*SALCLI, "filter", "--ood", OOD, "--set", launcher, cwd=workspace.root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Candidate outliers") == 1
    assert "warning" not in done.stdout
    assert (workspace.root / EXPERIMENT.candidates.path).read_bytes() == (
        built / EXPERIMENT.candidates.path
    ).read_bytes()


@pytest.mark.slow
def test_a_launched_mistake_is_one_message_and_a_signal_ends_all_processes(workspace: Workspace) -> None:
    launched = (*SALCLI, "train-id", "--set", "launcher=torchrun --standalone --nproc-per-node 2", "--set")
    done = process(*launched, "train_id.lr=1e30", cwd=workspace.root)
    assert done.returncode == 2
    message, *others = done.stderr.splitlines()
    assert message.startswith("error: the loss is NaN or infinite in epoch 1")
    assert {*others} <= {f"process 1: {message}"}  # on a busy machine, before torchrun ends it
    running = Popen((*launched, "train_id.epochs=1000000"), cwd=workspace.root, stderr=PIPE, stdout=PIPE, text=True)
    while not (state := list(workspace.root.rglob("*.pt"))):  # an epoch is done
        assert running.poll() is None
        time.sleep(0.1)
    running.terminate()
    said = running.communicate(timeout=60)[1]  # its processes have the same pipe: all have ended
    assert running.returncode == 143, state
    assert said.count("terminated; nothing half-written is left behind") >= 1
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("fails", "process 1: error: only this process has seen it"),
        ("is stuck", "error: process 1 of 2 has not answered for 2 s"),
    ],
)
def test_a_process_that_fails_alone_ends_all_with_one_message(tmp_path: Path, how: str, message: str) -> None:
    done = two_processes(str(HELPERS / "one_fails.py"), how, cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count(message) == 1
    assert "[rank" not in done.stderr, "torch marks the tracebacks of the processes so"
    seconds = time.time() - (tmp_path / "process-1").stat().st_mtime
    assert seconds < 25, "torchrun kills after 30 s what does not end"


@pytest.mark.slow
def test_a_signal_ends_a_process_that_waits_in_gloo(tmp_path: Path) -> None:
    """Python's own handlers do not run there."""
    running = torchrun(str(HELPERS / "one_fails.py"), "is stopped", cwd=tmp_path)
    try:
        while not all((tmp_path / f"process-{rank}").exists() for rank in (0, 1)):
            assert running.poll() is None
            time.sleep(0.1)
        time.sleep(1)  # until it waits
        waits, stopped = (int((tmp_path / f"process-{rank}").read_text()) for rank in (0, 1))
        os.kill(waits, signal.SIGTERM)
        assert running.stderr
        assert any(line.startswith("terminated; nothing half-written") for line in running.stderr)
        os.kill(stopped, signal.SIGCONT)
        running.communicate(timeout=20)
    finally:
        running.kill()


@pytest.mark.slow
def test_the_parts_of_a_command_share_one_process_group(workspace: Workspace) -> None:
    """A second group would find the addresses of the first one, where nobody listens any more."""
    done = two_processes(str(HELPERS / "late_main.py"), "extract-grads", "--ood", OOD, cwd=workspace.root)
    assert done.returncode == 0, done.stderr


def test_prepare_runs_in_one_process(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(built)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "runs in one process; start it without torchrun" in refused("prepare", root=built)
