"""How the program ends: Ctrl-C, a full disk, a full or closed standard output."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli import CONSOLE_SCRIPT, files, process
from helpers.quick import OOD, SEED

from salcli.store.layout import Workspace

FULL = Path("/dev/full")
RUN = f"runs/{SEED}/{OOD}/pi-0.1"

# the real program, but it reports its progress without a pause: that is how we know that it is in the middle
TALKATIVE = "import salcli.report.console as c; c.SECONDS_BETWEEN_LINES = 0; from salcli.cli import main; main()"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "when"),
    [
        ("train-id --epochs 100000", "train-id, seed 0: "),
        (f"train-ood --ood {OOD} --epochs 100000", "sal, "),
    ],
    ids=["train-id", "train-ood"],
)
def test_ctrl_c_ends_a_stage_with_one_line_and_leaves_nothing_behind(
    workspace: Workspace, command: str, when: str
) -> None:
    before = files(workspace.root)
    arguments = [sys.executable, "-u", "-c", TALKATIVE, *command.split(), "--seed", str(SEED)]
    with subprocess.Popen(
        arguments, cwd=workspace.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            assert running.stdout
            assert any(when in line for line in running.stdout)
            running.send_signal(signal.SIGINT)
            _, errors = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 130
    assert errors == "interrupted; nothing half-written is left behind, run the same command again\n"
    assert files(workspace.root) == before


# --- a full disk

CAN_MOUNT = shutil.which("unshare") and process("unshare", "-rm", "mount", "-t", "tmpfs", "-", "/tmp").returncode == 0
FULL_DISK = """
set -e
mount -t tmpfs -o size={size}k tmpfs {disk}
cp -r {workspace}/. {disk}
cd {disk}
free=$(df --output=avail -k . | tail -1)
head -c $(( (free - {free}) * 1024 )) /dev/zero > fill
find . -name .salcli -prune -o -type f -print | sort | xargs md5sum > {disk}.before
set +e
{command}
code=$?
find . -name .salcli -prune -o -type f -print | sort | xargs md5sum > {disk}.after
exit $code
"""


@pytest.mark.slow
@pytest.mark.skipif(not CAN_MOUNT, reason="needs a disk of its own to fill")
@pytest.mark.parametrize(
    ("free", "command", "name"),
    [
        (64, "prepare id-set", "data/prepared/digits-0-7.h5"),
        (560, "train-id --epochs 1", f"scratch/runs/{SEED}/networks/classifier.safetensors"),
        (16, f"extract-grads wild --ood {OOD}", f"{RUN}/representation/wild.h5"),
        (8, f"filter --ood {OOD}", f"{RUN}/sal/candidates.h5"),
        (120, f"train-ood --ood {OOD}", f".salcli/resume/train-sal-{OOD}-pi-0.1-{SEED}.pt"),
    ],
)
def test_a_full_disk_is_reported_and_no_partial_file_is_left(
    workspace: Workspace, tmp_path: Path, free: int, command: str, name: str
) -> None:
    """A real disk with `free` KiB left. The earlier file is still there, as it was."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = FULL_DISK.format(
        size=6000, disk=disk, workspace=workspace.root, free=free,
        command=f"{CONSOLE_SCRIPT} {command} --seed {SEED}",
    )  # fmt: skip
    done = process("unshare", "-rm", "bash", "-c", script)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: {name} cannot be written: No space left on device; ")
    assert done.stderr.count("\n") == 1
    before, after = (disk.with_suffix(f".{when}").read_text() for when in ("before", "after"))
    assert after == before


# --- standard output


@pytest.mark.slow
@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("command", ["presets", "--help", "filter --help", "--version"])
def test_standard_output_on_a_full_disk_is_one_message(command: str, buffered: bool) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "salcli", *command.split()],
            env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard output cannot be written: No space left on device;")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["true", "head -1"])
def test_a_closed_pipe_is_no_reason_for_a_traceback(reader: str) -> None:
    done = process("bash", "-c", f"{CONSOLE_SCRIPT} presets main-cifar100 | {reader}")
    assert done.stderr == ""
