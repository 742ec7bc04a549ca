"""The last moment of the process: nothing that was printed is lost, and exit codes are what they were."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")
MAIN = "import sys; sys.argv[0] = 'salcli'; from salcli.cli import main; main()"


def run(code: str, *arguments: str, buffered: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    if not buffered:
        environment["PYTHONUNBUFFERED"] = "1"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["presets"], 0), (["nonsense"], 2)])
def test_exit_handlers_run_and_the_code_is_passed_on(arguments: list[str], code: int) -> None:
    done = run(f"import atexit; atexit.register(print, 'closed'); {MAIN}", *arguments)
    assert done.returncode == code
    assert done.stdout.endswith("closed\n")


def test_all_that_was_printed_arrives() -> None:
    assert run(MAIN, "presets").stdout == run(MAIN, "presets", buffered=False).stdout != ""


def test_what_python_would_take_apart_is_left_alone() -> None:
    told = "class Told:\n    def __del__(self): print('taken apart')\ntold = Told()\n"
    assert run(f"{told}{MAIN}", "--version").stdout == run(MAIN, "--version").stdout


def test_a_profiler_has_the_last_word() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cProfile", "-m", "salcli", "--version"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "function calls" in done.stdout


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("command", ["presets", "--help"])
def test_standard_output_on_a_full_disk_is_one_message(command: str, buffered: bool) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "salcli", command],
            env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard output cannot be written: No space left on device;")
    assert done.stderr.count("\n") == 1


def test_nobody_reads_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import subprocess, sys; "
         "p = subprocess.Popen([sys.executable, '-m', 'salcli', 'presets'], stdout=subprocess.PIPE); "
         "p.stdout.close(); sys.exit(p.wait())"], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
