"""How the program ends: Ctrl-C, a full or closed standard output. tests/store/test_faults.py has a full disk."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli import CONSOLE_SCRIPT, files, process
from helpers.quick import SEED

from salcli.store.layout import Workspace

pytestmark = pytest.mark.slow
FULL = Path("/dev/full")
# the real program, but it reports its progress without a pause: that is how we know that it is in the middle
TALKATIVE = "import salcli.report.console as c; c.SECONDS_BETWEEN_LINES = 0; from salcli.cli import main; main()"


def test_ctrl_c_ends_a_training_with_one_line_and_leaves_nothing_behind(workspace: Workspace) -> None:
    before = files(workspace.root)
    arguments = [sys.executable, "-u", "-c", TALKATIVE, "train-id", "--epochs", "100000", "--seed", str(SEED)]
    with subprocess.Popen(
        arguments, cwd=workspace.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            assert running.stdout
            assert any("train-id, seed 0: " in line for line in running.stdout)
            running.send_signal(signal.SIGINT)
            _, errors = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 130
    assert errors == "interrupted; nothing half-written is left behind, run the same command again\n"
    assert files(workspace.root) == before


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
@pytest.mark.parametrize(("command", "unbuffered"), [("presets", ""), ("filter --help", ""), ("--version", "1")])
def test_standard_output_on_a_full_disk_is_one_message(command: str, unbuffered: str) -> None:
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "salcli", *command.split()],
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered}, stdout=full, stderr=subprocess.PIPE, text=True,
            check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard output cannot be written: No space left on device;")
    assert done.stderr.count("\n") == 1


def test_a_closed_pipe_is_no_reason_for_a_traceback() -> None:
    done = process("bash", "-c", f"{CONSOLE_SCRIPT} presets main-cifar100 | true")
    assert done.stderr == ""
