"""Two processes on this machine's CPU, started by torchrun, do what one does."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from helpers.quick import OOD, REPOSITORY, SEED
from helpers.two_processes import batch_norm, image_network, vector_network
from hypothesis import given
from hypothesis import strategies as st

from salcli.artifacts.layout import Workspace
from salcli.engine.device import Processes
from salcli.params import load_params
from salcli.stages import filter as filter_stage
from salcli.stages import train_id, train_ood

HELPERS = REPOSITORY / "tests" / "helpers"
Together = tuple[Path, list[dict[str, Any]]]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCHER = "launcher=torchrun --standalone --nproc-per-node 2"
EPOCHS = {"train_id.epochs": 2, "train_ood.epochs": 2}


def two_processes(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join([str(HELPERS.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": search}
    return subprocess.run(
        [*TORCHRUN, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def together(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Together:
    """A workspace in which two processes ran every stage, and what each of them saw."""
    root = tmp_path_factory.mktemp("together") / "workspace"
    shutil.copytree(built, root)
    done = two_processes(str(HELPERS / "two_processes.py"), str(root), cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    return root, json.loads((root / "seen.json").read_text())


@given(st.integers(0, 1000), st.integers(1, 40))
def test_parts_are_disjoint_contiguous_and_all_there_is(n: int, size: int) -> None:
    parts = [list(range(n))[Processes(rank, size).part(n)] for rank in range(size)]
    assert [i for part in parts for i in part] == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_there_are_two_of_them(together: Together) -> None:
    assert [(seen["rank"], seen["size"]) for seen in together[1]] == [(0, 2), (1, 2)]


def test_each_sample_is_used_once(together: Together) -> None:
    first, second = (seen["labels"] for seen in together[1])
    assert sorted(first + second) == list(range(100))
    assert abs(len(first) - len(second)) <= 8  # at most one for each batch


@pytest.mark.parametrize(("what", "shape"), [("images", (10, 2, 6, 6)), ("vectors", (10, 5))])
def test_batch_norm_over_two_processes_is_that_over_the_whole_batch(
    together: Together, what: str, shape: tuple[int, ...]
) -> None:
    network = image_network() if what == "images" else vector_network()
    alone = batch_norm(Processes(), network, torch.randn(shape))
    for seen in together[1]:
        assert seen[what]["gradients"] == pytest.approx(alone["gradients"], abs=1e-5, rel=1e-4)
        assert seen[what]["running"] == pytest.approx(alone["running"], abs=1e-6, rel=1e-5)


# STAGES: the tests from here on need the pipeline (salcli.stages, salcli.artifacts, salcli.params)


def arrays(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        found: dict[str, np.ndarray] = {}
        file.visititems(lambda name, item: found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None)
        return found


@pytest.mark.parametrize(
    "name",
    [
        f"runs/{SEED}/gradients-id-train.h5",
        f"runs/{SEED}/gradients-id-calibration.h5",
        f"runs/{SEED}/{OOD}/gradients-wild.h5",
        f"runs/{SEED}/{OOD}/candidates.h5",
        f"runs/{SEED}/{OOD}/scores.h5",
    ],
)
def test_extraction_filter_and_evaluation_give_what_one_process_gives(
    together: Together, built: Path, name: str
) -> None:
    """Index arrays are equal; the rest to float tolerance, because batches of another size may add up otherwise."""
    ours, alone = arrays(together[0] / name), arrays(built / name)
    assert set(ours) == set(alone)
    for key, expected in alone.items():
        if expected.dtype.kind == "i":
            np.testing.assert_array_equal(ours[key], expected)
        else:
            np.testing.assert_allclose(ours[key], expected, rtol=1e-4, atol=1e-5)


def test_all_processes_know_the_same_metrics(together: Together, built: Path) -> None:
    first, second = (seen["evaluation"] for seen in together[1])
    assert first == second
    alone = json.loads((built / f"runs/{SEED}/{OOD}/metrics.json").read_text())
    for method, metrics in first.items():
        assert metrics["auroc"] == pytest.approx(alone[method]["auroc"], abs=1e-4)


def test_one_svd_for_all_classes_is_shared_row_by_row(together: Together, workspace: Workspace) -> None:
    params, _ = load_params(workspace.root / "params.yaml", {"filter.svd": "class-agnostic"})
    alone = filter_stage.run(workspace, params, OOD, SEED).candidates.wild_score
    for seen in together[1]:
        torch.testing.assert_close(
            torch.tensor(seen["agnostic"]), torch.from_numpy(alone).float(), rtol=1e-5, atol=1e-8
        )
    assert together[1][0]["agnostic"] == together[1][1]["agnostic"]


@pytest.mark.parametrize("what", ["train_id", "sal", "oe", "energy-oe", "woods"])
def test_training_has_the_loss_of_one_process(together: Together, workspace: Workspace, what: str) -> None:
    params, _ = load_params(workspace.root / "params.yaml", EPOCHS)
    if what == "train_id":
        alone = train_id.run(workspace, params, SEED).last_epoch
    else:
        alone = train_ood.run(workspace, params, OOD, SEED, method=what).last_epoch
    first, second = (seen[what] for seen in together[1])
    assert first == second
    # WOODS squares means over a batch, and two halves have other means than the whole
    assert first["loss"] == pytest.approx(alone.loss, rel=1e-2 if what == "woods" else 1e-3)
    assert first["accuracy"] == pytest.approx(alone.accuracy, abs=0.01)


# CLI: the tests from here on start the command line


@pytest.mark.slow
def test_the_launcher_of_params_starts_two_processes_and_one_speaks(workspace: Workspace, built: Path) -> None:
    name = f"runs/{SEED}/{OOD}/candidates.h5"
    (workspace.root / name).unlink()
    done = subprocess.run(
        [sys.executable, "-m", "salcli", "filter", "--ood", OOD, "--set", LAUNCHER],
        cwd=workspace.root, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Candidate outliers") == 1
    assert "warning" not in done.stdout
    assert (workspace.root / name).read_bytes() == (built / name).read_bytes()


@pytest.mark.slow
def test_one_message_ends_all_processes(workspace: Workspace) -> None:
    (workspace.root / f"runs/{SEED}/networks/classifier.safetensors").unlink()
    done = two_processes("-m", "salcli", "extract-grads", "--seed", str(SEED), cwd=workspace.root)
    assert done.returncode != 0
    message = f"error: runs/{SEED}/networks/classifier.safetensors is not there yet; make it with: salcli train-id"
    assert done.stderr.count(message) == 1


@pytest.mark.slow
def test_prepare_runs_in_one_process(workspace: Workspace) -> None:
    done = two_processes("-m", "salcli", "prepare", cwd=workspace.root)
    assert done.returncode != 0
    assert "this command runs in one process; start it without torchrun" in done.stderr


def test_a_launcher_that_does_not_exist_is_named(workspace: Workspace) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "salcli", "filter", "--set", "launcher=no-such-launcher -n 2"],
        cwd=workspace.root, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert "launcher 'no-such-launcher -n 2' cannot be started: No such file or directory" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "env"])
def test_a_launcher_with_one_process_starts_it_once(workspace: Workspace, built: Path, launcher: str) -> None:
    """Under torchrun, which says so, and under a program that says nothing."""
    program = f"{launcher} --standalone" if launcher == "torchrun" else f"env {sys.executable}"
    done = subprocess.run(
        [sys.executable, "-m", "salcli", "filter", "--ood", OOD, "--set", f"launcher={program}"],
        cwd=workspace.root, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Candidate outliers") == 1


@pytest.mark.parametrize(
    ("launcher", "message"), [("torchrun 'oops", "cannot be read: No closing quotation"), (" ", "launcher is empty")]
)
def test_a_launcher_that_makes_no_sense_is_refused(workspace: Workspace, launcher: str, message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "salcli", "filter", "--set", f'launcher="{launcher}"'],
        cwd=workspace.root, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.slow
def test_a_process_that_fails_alone_ends_all_with_its_own_message(tmp_path: Path) -> None:
    done = two_processes(str(HELPERS / "one_fails.py"), cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("process 1: error: only this process has seen it") == 1
    assert "[rank" not in done.stderr, "torch marks the tracebacks of the processes so"
