"""kill -9 in the middle of every stage: what was there survives, and the same command then gives the same bytes."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from conftest import OOD, SEED
from test_bad_input import TALKATIVE
from test_cli import files, here, process, salcli

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["here"]  # a fixture
pytestmark = pytest.mark.slow

# The real program, killed by itself when it has written a file but not yet given it its name ...
KILLED_WRITING = """
import os, signal, sys
from contextlib import contextmanager
from salcli.artifacts import atomic
whole = atomic.atomic_path

@contextmanager
def killed(path):
    with whole(path) as partial:
        yield partial
        if path.name == os.environ["KILL_AT"]:
            os.kill(os.getpid(), signal.SIGKILL)

atomic.atomic_path = killed
from salcli.cli import main
main()
"""
# ... or between two batches of gradients.
KILLED_BETWEEN_BATCHES = """
import os, signal
from salcli.artifacts.gradients import GradientWriter
append = GradientWriter.append

def killed(self, *batch):
    if self._filled:
        os.kill(os.getpid(), signal.SIGKILL)
    append(self, *batch)

GradientWriter.append = killed
from salcli.cli import main
main()
"""

WRITES = {
    "prepare": ("prepare wild", f"data/splits/{SEED}/{OOD}/wild.h5"),
    "prepare, truth": ("prepare wild", f"data/splits/{SEED}/{OOD}/truth.h5"),
    "train-id": ("train-id", f"runs/{SEED}/networks/classifier.safetensors"),
    "extract-grads": ("extract-grads wild", f"runs/{SEED}/{OOD}/gradients-wild.h5"),
    "filter": ("filter", f"runs/{SEED}/{OOD}/candidates.h5"),
    "train-ood": ("train-ood", f"runs/{SEED}/{OOD}/networks/sal.safetensors"),
    "evaluate": ("evaluate", f"runs/{SEED}/{OOD}/metrics.json"),
}
OLD = b"from an earlier run, and longer than nothing"


def arguments(command: str) -> list[str]:
    return [*command.split(), *([] if command == "train-id" else ["--ood", OOD]), "--seed", str(SEED)]


def check_that_it_can_be_repeated(root: Path, command: str, undisturbed: dict[str, bytes]) -> None:
    result = salcli(*arguments(command))
    assert result.exit_code == 0, result.output
    assert files(root) == undisturbed


@pytest.mark.parametrize("stage", WRITES)
def test_killed_while_it_writes(here: Path, stage: str) -> None:
    command, name = WRITES[stage]
    undisturbed = files(here)
    path = here / name
    path.write_bytes(OLD)
    done = process(sys.executable, "-c", KILLED_WRITING, *arguments(command), cwd=here, KILL_AT=path.name)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = files(here)
    assert left.pop(str(path.relative_to(here).with_name(f".{path.name}.partial"))) == undisturbed[name]
    assert left == {**undisturbed, name: OLD}
    check_that_it_can_be_repeated(here, command, undisturbed)


def test_killed_while_it_writes_for_the_first_time(here: Path) -> None:
    command, name = WRITES["filter"]
    undisturbed = files(here)
    (here / name).unlink()
    process(sys.executable, "-c", KILLED_WRITING, *arguments(command), cwd=here, KILL_AT="candidates.h5")
    assert not (here / name).exists()
    check_that_it_can_be_repeated(here, command, undisturbed)


def test_killed_between_two_batches_of_gradients(here: Path) -> None:
    command, name = WRITES["extract-grads"]
    undisturbed = files(here)
    (here / name).write_bytes(OLD)
    done = process(sys.executable, "-c", KILLED_BETWEEN_BATCHES, *arguments(command), cwd=here)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (here / name).read_bytes() == OLD
    partial = (here / name).with_name(".gradients-wild.h5.partial")
    assert partial.stat().st_size > 0
    assert partial.read_bytes() != undisturbed[name]
    check_that_it_can_be_repeated(here, command, undisturbed)


@pytest.mark.parametrize("stage", ["train-id", "train-ood"])
def test_killed_in_the_middle_of_training(here: Path, stage: str) -> None:
    command, _ = WRITES[stage]
    undisturbed = files(here)
    with subprocess.Popen(
        [sys.executable, "-u", "-c", TALKATIVE, *arguments(command)], cwd=here, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout
        assert any(line.startswith(f"{stage}, ") for line in running.stdout)
        running.kill()
    assert running.returncode == -signal.SIGKILL
    assert files(here) == undisturbed
    check_that_it_can_be_repeated(here, command, undisturbed)
