"""Bad input: one message that says what, where and the fix; exit code 2; nothing half-written."""

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from tempfile import TemporaryDirectory

import h5py
import numpy as np
import pytest
import torch
from helpers.cli import files, process, refused, salcli
from helpers.quick import EXPERIMENT, OOD, REPOSITORY, SEED
from helpers.users import nobody

import salcli as salcli_package

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
        ("filter --variant sall", "no variant is called sall (did you mean sal?); known: sal"),
        ("train-ood --method msp", "no method is called msp (did you mean step?); known: energy-oe, oe, sal, scone, "),
        ("train-encoder", "there is nothing to train: encoders is empty; name one there, or with --encoder"),
        ("evaluate unseen", "there is nothing to test on: data.test_ood is empty; name a set there, or with --unseen"),
        ("prepare --pi nan", "--pi nan: must be a number in (0, 1], or unknown"),
        ("prepare --set data.id=cifar10 --set data.channels=3", "cifar10 is not there: looked for cifar-10-batches-py"),
        ("filter --set filter", "--set filter: must be KEY=VALUE, for example --set filter.threshold_quantile=0.9"),
        ("filter --params nowhere.yaml", "nowhere.yaml does not exist; start salcli in a folder with a params.yaml"),
        ("evaluate --method knn --set methods.knn.k=463", "methods.knn.k is 463, but there are only 462 ID training"),
        ("inspect nowhere.h5", "nowhere.h5 is not a file"),
        ("inspect params.yaml", "params.yaml is no checkpoint and no HDF5, JSON or CSV file that salcli could show"),
        ("presets cifar11", "no preset is called cifar11 (did you mean cifar10?)"),
        ("train-id --set launcher=nobody-has-this", "launcher 'nobody-has-this' cannot be started: No such file"),
        ("train-id --lr 1e30", "epoch 1; try a smaller learning rate (lr is 1e+30)"),
        pytest.param(
            "train-id --device cuda:1", "device cuda:1: no CUDA device is available here; use device: auto or cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)  # fmt: skip
def test_a_bad_name_or_value_is_refused(here: Path, arguments: str, message: str) -> None:
    said = refused(*shlex.split(arguments), root=here)
    assert said.startswith("error: ")
    assert message in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("filter --seed -1", "Invalid value for '--seed'"),
        ("filter --treshold 0.9", "No such option: --treshold .*--threshold-quantile"),
        ("fliter", "No such command 'fliter'. Did you mean 'filter'"),
        ("inspect", "Missing argument"),
    ],
)
def test_a_mistake_in_options_is_reported_by_typer(arguments: str, message: str) -> None:
    result = salcli(*arguments.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert "╭─ Error ─" in result.stderr
    assert re.search(message, re.sub(r"[\s│]+", " ", result.stderr))


@pytest.mark.slow
def test_bad_params_as_a_shell_sees_them(tmp_path: Path) -> None:
    text = (REPOSITORY / "params.yaml").read_text().replace("threshold_quantile: 0.95", "threshold_quantile: 95")
    (tmp_path / "params.yaml").write_text(text.replace("  calibration: ho", "  calibraton: ho"))
    done = process(sys.executable, "-m", "salcli", "filter", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: params.yaml is not valid\n"
        "  filter.threshold_quantile  must be less than 1, got 95 (did you mean 0.95?)\n"
        "  filter.calibration         is missing\n"
        "  filter.calibraton          no such key (did you mean calibration?)\n"
    )


# --- data, threshold, training


def test_a_share_of_ood_that_cannot_be_mixed_is_refused_with_one_that_can(here: Path) -> None:
    message = refused("prepare", "wild", *ONE, "--pi", "0.0001", root=here)
    found = re.search(r"data.pi 0.0001: 578 ID and 248 OOD samples cannot be mixed .* value from ([\d.]+) to", message)
    assert found
    assert salcli("prepare", "wild", *ONE, "--pi", found[1]).exit_code == 0


def test_a_threshold_that_separates_nothing_is_refused_with_a_range_that_works(here: Path) -> None:
    """tests/sal/test_filter.py shows that the range is right."""
    command = ["filter", *ONE, "--score", "energy", "--threshold-quantile"]
    for artifact, energy in (
        (X.id_representation("calibration"), np.arange(-115.0, 0)),
        (X.wild_representation, np.linspace(-60.5, -30.5, 642)),
    ):
        with h5py.File(here / artifact.path, "r+") as file:  # the first class dominates, so its logit is the energy
            file["logits"][:] = -1e4
            file["logits"][:, 0] = -energy
    message = refused(*command, "0.999", root=here)
    found = re.search(r"quantile 0.999 leaves no candidate outliers; values from (\S+) to (\S+) work", message)
    assert found, message
    assert [salcli(*command, works).exit_code for works in found.groups()] == [0, 0]


# --- files that cannot be read or written


@pytest.fixture
def open_to_all(built: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project that every user may enter, unlike pytest's own folders."""
    for module in walk_packages(salcli_package.__path__, "salcli."):  # another user may be unable to import them
        if module.name != "salcli.__main__":
            import_module(module.name)
    with TemporaryDirectory() as folder:
        root = Path(folder)
        shutil.copytree(built, root, dirs_exist_ok=True)
        root.chmod(0o755)
        monkeypatch.chdir(root)
        yield root
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("command", "name", "message"),
    [
        ("filter", f"runs/{SEED}/representation/id-train.h5", ": Permission denied; it should be a file that you may"),
        ("table", f"{RUN}/evaluation/metrics.json", ": Permission denied; it should be a file that you may read\n"),
        ("filter", "params.yaml", " cannot be read: [Errno 13] Permission denied: 'params.yaml'\n"),
    ],
)
def test_a_file_that_may_not_be_read_is_named(open_to_all: Path, command: str, name: str, message: str) -> None:
    (open_to_all / name).chmod(0)
    with nobody():
        result = salcli(command)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {name}{message}")


@pytest.mark.parametrize("mode", [0o000, 0o555], ids=["unreadable", "read-only"])
def test_a_folder_that_may_not_be_used_is_named(open_to_all: Path, mode: int) -> None:
    folder = open_to_all / RUN / "sal"
    before = files(open_to_all)
    folder.chmod(mode)
    with nobody():
        result = salcli("filter", *ONE)
    folder.chmod(0o755)
    assert result.exit_code == 2
    assert re.match(rf"error: .*{RUN}/sal/\S+(:| cannot be written:) Permission denied; ", result.stderr)
    assert files(open_to_all) == before


def test_a_file_where_a_folder_should_be_and_a_folder_where_a_file_should_be_are_named(here: Path) -> None:
    (here / "scratch").write_text("mine")
    message = refused("filter", *ONE, "--threshold-quantile", "0.9", root=here)
    assert message.startswith(f"error: scratch/{RUN}/sal/candidates.h5 cannot be written: Not a directory; ")
    representation = here / X.wild_representation.path
    representation.unlink()
    representation.mkdir()
    assert "representation/wild.h5: Is a directory" in refused("filter", *ONE, root=here)
