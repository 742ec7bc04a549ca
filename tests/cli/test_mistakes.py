"""Bad input: one message that says what, where and the fix; exit code 2; nothing half-written."""

import os
import re
import shlex
from pathlib import Path

import pytest
import torch
from helpers.cli import files, refused, salcli
from helpers.quick import EXPERIMENT, OOD, SEED

ONE = ["--ood", OOD, "--seed", str(SEED)]
RUN = f"runs/{SEED}/{OOD}/pi-0.1"
X = EXPERIMENT

# --- a stage before the stage that it needs


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
            found = re.search(r"make it with: (salcli .+)\n", result.stderr)
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


# --- names and values


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
        ("train-id --lr 1e308", "train_id.lr  must be less than or equal to 1"),
        ("train-id --set train_id.batch_size=10000000000", "train_id.batch_size  must be less than or equal to 1"),
        ("prepare --set data.image_size=1000000", "data.image_size  must be less than or equal to 2048, got 1000000"),
        ("train-id --set model.backbone=wrn-100000-1000", "wrn-100000-1000 is beyond depth 1,000 or 500,000,000 wei"),
        ("train-id --set model.weights=loop", "loop: Too many levels of symbolic links; fix that"),
        ("train-id --params pipe", "pipe is a pipe or a device; it should be a file"),
        ("table --params \x1b[31mred.yaml", "\\x1b[31mred.yaml does not exist"),
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


# --- files that cannot be read or written


def test_a_file_where_a_folder_should_be_and_a_folder_where_a_file_should_be_are_named(here: Path) -> None:
    (here / "scratch").write_text("mine")
    message = refused("filter", *ONE, "--threshold-quantile", "0.9", root=here)
    assert message.startswith(f"error: scratch/{RUN}/sal/candidates.h5 cannot be written: Not a directory; ")
    representation = here / X.wild_representation.path
    representation.unlink()
    representation.mkdir()
    assert "representation/wild.h5: Is a directory" in refused("filter", *ONE, root=here)
