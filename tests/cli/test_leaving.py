"""How the program ends: Ctrl-C, a closed pipe. tests/store/test_faults.py has a full disk."""

import signal
import subprocess
import sys

import pytest
from helpers.cli import CONSOLE_SCRIPT, files, process
from helpers.quick import SEED

from salcli.store.layout import Workspace

pytestmark = pytest.mark.slow
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


def test_a_closed_pipe_is_no_reason_for_a_traceback() -> None:
    done = process("bash", "-c", f"{CONSOLE_SCRIPT} presets main-cifar100 | true")
    assert done.stderr == ""
