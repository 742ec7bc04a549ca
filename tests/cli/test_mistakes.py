"""Bad input, Ctrl-C, a closed pipe: one message that says what, where and the fix; nothing half-written."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.cli import CONSOLE_SCRIPT, files, process, refused, salcli
from helpers.quick import EXPERIMENT, OOD, SEED
from PIL import Image

from salcli.params.reading import edited

ONE = ["--ood", OOD, "--seed", str(SEED)]
RUN = f"runs/{SEED}/{OOD}/pi-0.1"
X = EXPERIMENT


def test_the_command_that_is_named_makes_the_file(here: Path) -> None:
    """Delete every file, and make it again as each message says, until the evaluation is there."""
    before = files(here)
    for path in [*(here / "runs").rglob("*.*"), *(here / "data").rglob("*.*")]:
        if path.is_file():
            path.unlink()
    ran: list[str] = []
    while (result := salcli("evaluate", *ONE)).exit_code != 0:
        command = ""
        while result.exit_code != 0:
            found = re.search(r"make this file alone: (salcli .+)\n", result.stderr)
            assert found, result.stderr
            assert found[1] not in ran, "the command did not help"
            command = found[1]
            result = salcli(*shlex.split(command)[1:])
        ran.append(command)
        assert len(ran) < 12, ran
    names = [shlex.split(command)[1] for command in ran]
    assert list(dict.fromkeys(names)) == ["prepare", "train-id", "extract-grads", "filter", "train-ood"]
    after = files(here)
    assert after == {name: before[name] for name in after}
    assert X.evaluation("metrics.json").path in after


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("filter --ood digits-89", "no OOD set is called digits-89 (did you mean digits-8-9?); known: 300k-random, "),
        ("filter --ood digits-0-7", "--ood digits-0-7: that is the ID set (data.id); name another one"),
        ("train-ood --method msp", "no method is called msp (did you mean step?); known: energy-oe, energy-vos, oe, "),
        ("train-encoder", "there is nothing to train: encoders is empty; name one there, or with --encoder"),
        ("prepare --pi nan", "--pi nan: must be a number in (0, 1], or unknown"),
        ("evaluate --method knn --set methods.knn.k=463", "methods.knn.k is 463, but there are only 462 ID training"),
        ("train-id --set launcher=nobody-has-this", "launcher 'nobody-has-this' cannot be started: No such file"),
        ("train-id --set model.backbone=wrn-100000-1000", "wrn-100000-1000 is beyond depth 1,000 or 500,000,000 wei"),
        ("train-id --set model.weights=loop", "loop: Too many levels of symbolic links; fix that"),
        ("train-id --params pipe", "pipe is a pipe or a device; it should be a file"),
        ("table --params \x1b[31mred.yaml", "\\x1b[31mred.yaml does not exist"),
        ("filter --set filter.temperature=1e-308", "filter.temperature  must be at least 1e-30, or inf, got 1e-308"),
        ("train-id --lr 1e30", "epoch 1; try a smaller learning rate (lr is 1e+30)"),
        pytest.param(
            "train-id --device cuda:1", "device cuda:1: no CUDA device is available here; use device: auto or cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)  # fmt: skip
def test_a_bad_name_or_value_is_refused(here: Path, arguments: str, message: str) -> None:
    Path("loop").symlink_to("loop")
    os.mkfifo("pipe")
    said = refused(*shlex.split(arguments), root=here)
    assert said.startswith("error: ")
    assert message in said


def test_mistakes_in_params_are_named_also_by_a_table_which_runs_no_code_that_they_name(here: Path) -> None:
    params, good = here / "params.yaml", (here / "params.yaml").read_text()
    params.write_text(edited(good, {"seeds": ["one"], "rivals": ["wodos"], "filter.score": "sall"}))
    named = [line.split()[0] for line in refused("prepare", root=here).splitlines()[1:]]
    assert named == ["seeds.0", "rivals.0", "filter.score"]
    assert "not valid in seeds" in refused("table", root=here)
    (here / "evil.py").write_text("open('ran', 'w')")
    params.write_text(edited(good, {"rivals": ["evil:Evil"], "model.code": "."}))
    assert salcli("table").exit_code == 0
    assert not Path("ran").exists(), "a table is safe to look at in a stranger's folder"


def test_a_file_where_a_folder_should_be_and_a_folder_where_a_file_should_be_are_named(here: Path) -> None:
    (here / "scratch").write_text("mine")
    message = refused("filter", *ONE, "--threshold-quantile", "0.9", root=here)
    assert message.startswith(f"error: scratch/{RUN}/sal/candidates.h5 cannot be written: Not a directory; ")
    representation = here / X.wild_representation.path
    representation.unlink()
    representation.mkdir()
    assert "representation/wild.h5: Is a directory" in refused("filter", *ONE, root=here)


# --- how the program ends; tests/store/test_faults.py has a full disk

# the real program, but it reports its progress without a pause: that is how we know that it is in the middle
TALKATIVE = "import salcli.report.console as c; c.SECONDS_BETWEEN_LINES = 0; from salcli.cli import main; main()"


@pytest.mark.slow
def test_ctrl_c_ends_a_training_with_one_line_and_leaves_nothing_behind(here: Path) -> None:
    before = files(here)
    arguments = [sys.executable, "-u", "-c", TALKATIVE, "train-id", "--epochs", "100000", "--seed", str(SEED)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout
            assert any("train-id, seed 0: " in line for line in running.stdout)
            running.send_signal(signal.SIGINT)
            _, errors = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 130
    assert errors == "interrupted; nothing half-written is left behind, run the same command again\n"
    assert files(here) == before


@pytest.mark.slow
@pytest.mark.parametrize("command", ["presets main-cifar100", "table", "predict --detector {} raw", "--help"])
def test_a_closed_pipe_is_no_reason_for_noise(here: Path, command: str) -> None:
    (here / "raw").mkdir()
    for i in range(3):
        Image.new("L", (8, 8), i).save(here / "raw" / f"{i}.png")
    shown = command.format(X.detector.path)
    done = process("bash", "-c", f"{CONSOLE_SCRIPT} {shown} | true; exit ${{PIPESTATUS[0]}}", cwd=here)
    assert done.returncode in (0, 141)
    assert "Broken" not in done.stderr
    assert "error" not in done.stderr
