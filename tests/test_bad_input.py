"""Bad input: one message that says what, where and the cure; exit code 2; nothing half written."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import h5py
import numpy as np
import pytest
import torch
from conftest import OOD, SEED
from hypothesis import given
from hypothesis import strategies as st
from test_cli import CONSOLE_SCRIPT, files, here, process, salcli, write_params

import salcli as salcli_package
from salcli.artifacts import layout
from salcli.errors import ThresholdError
from salcli.stages import filter as filter_stage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from salcli.artifacts.layout import Artifact, Workspace

__all__ = ["here"]  # a fixture
ONE = ["--ood", OOD, "--seed", str(SEED)]


def refused(*arguments: str, root: Path) -> str:
    """The message, once it is sure that there is only one and that no file was touched."""
    before = files(root)
    result = salcli(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
    assert result.stderr.count("error:") == 1
    assert files(root) == before
    return str(result.stderr)


# --- a stage before the stage that it needs

NEEDS: dict[str, list[Artifact]] = {
    "prepare split": [layout.prepared_set("digits-0-7")],
    f"prepare wild --ood {OOD}": [
        layout.prepared_set("digits-0-7"),
        layout.prepared_ood_set(OOD),
        layout.id_split(SEED),
    ],
    "train-id": [layout.prepared_set("digits-0-7"), layout.id_split(SEED)],
    "extract-grads id": [
        layout.prepared_set("digits-0-7"),
        layout.id_split(SEED),
        layout.classifier(SEED),
    ],
    f"extract-grads wild --ood {OOD}": [
        layout.prepared_set("digits-0-7"),
        layout.prepared_ood_set(OOD),
        layout.wild_mixture(OOD, SEED),
        layout.classifier(SEED),
    ],
    f"filter --ood {OOD}": [
        layout.id_gradients("train", SEED),
        layout.id_gradients("calibration", SEED),
        layout.wild_gradients(OOD, SEED),
    ],
    f"train-ood --ood {OOD}": [
        layout.prepared_set("digits-0-7"),
        layout.prepared_ood_set(OOD),
        layout.id_split(SEED),
        layout.wild_mixture(OOD, SEED),
        layout.classifier(SEED),
        layout.candidates(OOD, SEED),
    ],
    f"evaluate --ood {OOD}": [
        layout.prepared_set("digits-0-7"),
        layout.prepared_ood_set(OOD),
        layout.id_split(SEED),
        layout.wild_mixture(OOD, SEED),
        layout.classifier(SEED),
        layout.id_gradients("train", SEED),
        layout.trained_network("sal", OOD, SEED),
    ],
    f"detector --ood {OOD}": [
        layout.prepared_set("digits-0-7"),
        layout.id_split(SEED),
        layout.classifier(SEED),
        layout.trained_network("sal", OOD, SEED),
    ],
}


@pytest.mark.parametrize("command", NEEDS)
def test_a_stage_names_the_missing_file_and_the_command_that_makes_it(here: Path, command: str) -> None:
    for artifact in NEEDS[command]:
        aside = here / "aside"
        (here / artifact.name).rename(aside)
        message = refused(*command.split(), "--seed", str(SEED), root=here)
        assert message == f"error: {artifact.name} is not there yet; make it with: {artifact.made_by}\n"
        aside.rename(here / artifact.name)


def test_the_command_that_is_named_makes_the_file(here: Path) -> None:
    """Take every file away at once, and make it again as each message says, until the table is there."""
    before = files(here)
    for path in [*(here / "runs").rglob("*.*"), *(here / "data").rglob("*.*")]:
        path.unlink()
    ran: list[str] = []
    while (result := salcli("evaluate", *ONE)).exit_code != 0:
        command = f"salcli evaluate {' '.join(ONE)}"
        while result.exit_code != 0:
            found = re.search(r"make it with: (salcli .+)\n", result.stderr)
            assert found
            assert found[1] not in ran, "the command did not help"
            command = found[1]
            result = salcli(*shlex.split(command)[1:])
        ran.append(command)
        assert len(ran) < 10, ran
    assert [shlex.split(command)[1] for command in ran] == [
        "prepare", "train-id", "extract-grads", "filter", "train-ood",
    ]  # fmt: skip
    after = files(here)
    assert {name: after[name] for name in after if name in before} == {name: before[name] for name in after}
    assert f"runs/{SEED}/{OOD}/metrics.json" in after


def test_a_table_before_any_evaluation_says_how_to_make_one(tmp_path: Path) -> None:
    message = refused("table", "--all", "--params", str(tmp_path / "params.yaml"), root=tmp_path)
    assert "there is no evaluation below" in message
    assert "make one with: dvc repro, or salcli evaluate" in message


# --- names and values


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "filter --ood digits-89",
            "no OOD set is called digits-89 (did you mean digits-8-9?); known: 300k-random, cifar10, ",
        ),
        ("filter --ood digits-0-7", "--ood digits-0-7: that is the ID set (data.id); name another one"),
        ("filter --ood ''", "no OOD set is called ''; known: 300k-random, cifar10, "),
        ("prepare --set data.ood=[digits-0-7]", "data.ood  must not name the ID set, got digits-0-7"),
        ("prepare --set data.test_ood=[svhn,digits-0-7]", "data.test_ood  must not name the ID set, got digits-0-7"),
        (
            "prepare --set data.id=textures",
            "data.id  no ID set is called textures; known: cifar10, cifar100, cifar100-first50, digits-0-7, ",
        ),
        (
            "train-id --set model.backbone=small-cn",
            "model.backbone  no backbone is called small-cn (did you mean small-cnn?); known: ",
        ),
        (
            "train-id --device cudda",
            "device  no device is called cudda (did you mean cuda?); known: auto, cpu, cuda, cuda:0, mps",
        ),
        ("prepare --pi 0", "data.pi  must be greater than 0, got 0.0"),
        ("prepare --pi -0.1", "data.pi  must be greater than 0, got -0.1"),
        ("prepare --pi 1.01", "data.pi  must be less than or equal to 1, got 1.01"),
        ("prepare --pi nan", "data.pi  must be less than or equal to 1, got nan"),
        ("prepare --pi 10", "data.pi  must be less than or equal to 1, got 10.0 (did you mean 0.1?)"),
        ("filter --set filter.calibraton=train", "filter.calibraton  no such key (did you mean calibration?)"),
        ("filter --set filter", "--set filter: must be KEY=VALUE, for example --set filter.threshold_quantile=0.9"),
        ("filter --set seeds=[", "--set seeds=[: the value is not valid YAML"),
        ("filter --params nowhere.yaml", "nowhere.yaml does not exist; start salcli in a folder with a params.yaml"),
        ("filter --params .", "cannot be read"),
        (
            "evaluate --method knnn",
            "'ash', 'gradnorm' or 'vim', got 'knnn' (did you mean knn?)",
        ),
        ("evaluate --method knn --knn-k 463", "evaluate.knn_k is 463, but there are only 462 ID training samples"),
        (
            "evaluate --method vim --set evaluate.vim_dim=64",
            "evaluate.vim_dim is 64, but must be less than the 64 features of the network; auto would be 32",
        ),
        ("inspect nowhere.h5", "nowhere.h5 is not a file"),
        ("inspect params.yaml", "params.yaml is no checkpoint and no HDF5, JSON or CSV file that salcli could show"),
    ],
)  # fmt: skip
def test_a_bad_name_or_value_is_refused(here: Path, arguments: str, message: str) -> None:
    assert message in refused(*shlex.split(arguments), root=here)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("filter --seed -1", "error: Invalid value for '--seed': .* 0 .*\\(see salcli filter --help\\)"),
        ("filter --seed one", "error: Invalid value for '--seed': .*\\(see salcli filter --help\\)"),
        ("filter --seed", "error: Option '--seed' requires an argument"),
        ("filter --treshold 0.9", "error: No such option: --treshold .*--threshold-quantile"),
        ("filter digits-8-9", "error: Got unexpected extra argument"),
        ("fliter", "error: No such command 'fliter'. Did you mean 'filter'\\? \\(see salcli --help\\)"),
        ("--sed 3", "error: No such option: --sed"),
        ("table --format html", "error: Invalid value for '--format': .*'rich', 'markdown', 'latex', 'csv', 'json'"),
        (
            "prepare everything",
            "error: Invalid value for '?part'?: .*'all', 'id-set', 'ood-set', 'unseen-set'",
        ),
        ("inspect", "error: Missing argument"),
        ("inspect --top -1 params.yaml", "error: Invalid value for '--top'"),
    ],
)
def test_a_mistake_on_the_command_line_is_refused_in_the_same_voice(here: Path, arguments: str, message: str) -> None:
    said = refused(*arguments.split(), root=here)
    assert re.match(message, said)
    assert said.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", ["train-id", "extract-grads", "train-ood", "evaluate"])
def test_a_cuda_device_that_is_not_there_is_refused(here: Path, command: str) -> None:
    message = refused(command, "--device", "cuda:1", "--seed", str(SEED), root=here)
    assert message == "error: device cuda:1: no CUDA device is available here; use device: auto or cpu\n"


# --- data, threshold, training


def test_a_share_of_ood_that_the_pools_cannot_give_is_refused_with_one_that_they_can(here: Path) -> None:
    message = refused("prepare", "wild", *ONE, "--pi", "0.0001", root=here)
    found = re.search(r"data.pi 0.0001: 578 ID and 248 OOD images cannot be mixed .* value from ([\d.]+) to", message)
    assert found
    assert salcli("prepare", "wild", *ONE, "--pi", found[1]).exit_code == 0


def give_scores(gradients: Path, scores: np.ndarray) -> None:
    """Features with just these GradNorm scores: without residuals, p is 1 for the label and 0 for the 7 others."""
    with h5py.File(gradients, "r+") as file:
        file["residual"][:] = 0
        file["feature"][:] = 0
        file["feature"][:, 0] = -scores / (2 * 7 / 8)


@pytest.mark.parametrize(
    ("quantile", "outcome"), [("0.999", "no candidate outliers"), ("0.001", "nothing but candidate outliers")]
)
def test_a_threshold_that_separates_nothing_is_refused_with_a_range_that_works(
    here: Path, quantile: str, outcome: str
) -> None:
    """The range is right: its ends and its middle work, and one calibration sample beyond its ends does not."""
    give_scores(here / layout.id_gradients("calibration", SEED).name, np.arange(-115.0, 0))
    give_scores(here / layout.wild_gradients(OOD, SEED).name, np.linspace(-60.5, -30.5, 642))
    command = ["filter", *ONE, "--score", "gradnorm", "--threshold-quantile"]
    message = refused(*command, quantile, root=here)
    found = re.search(rf"threshold_quantile {quantile} leaves {outcome}; values from (\S+) to (\S+) work", message)
    assert found, message
    low, high = float(found[1]), float(found[2])
    for works in (found[1], found[2], str((low + high) / 2)):
        assert salcli(*command, works).exit_code == 0, works
    assert "nothing but candidate outliers" in refused(*command, str(low - 1 / 115), root=here)
    assert "no candidate outliers" in refused(*command, str(high + 1 / 115), root=here)


SCORES = st.lists(st.integers(0, 8), min_size=1, max_size=12).map(lambda values: torch.tensor(values).double())


@given(SCORES, SCORES, st.floats(0.001, 0.999))
def test_a_range_of_thresholds_that_is_said_to_work_does_work(
    calibration: Tensor, wild: Tensor, quantile: float
) -> None:
    """Also with ties, and with few samples."""
    try:
        filter_stage._threshold(calibration, wild, quantile)
    except ThresholdError as error:
        said = re.search(r"values from (\S+) to (\S+) work", str(error))
        for works in said.groups() if said else ():
            filter_stage._threshold(calibration, wild, float(works))
        if not said:
            assert not [rank for rank in calibration if 0 < int((wild > rank).sum()) < len(wild)]


def test_scores_that_do_not_overlap_are_refused_as_such(here: Path) -> None:
    give_scores(here / layout.id_gradients("calibration", SEED).name, np.arange(-115.0, 0))
    give_scores(here / layout.wild_gradients(OOD, SEED).name, np.linspace(-300, -200, 642))
    message = refused("filter", *ONE, "--score", "gradnorm", root=here)
    assert "leaves no candidate outliers; no value works: wild and calibration scores do not overlap" in message


@pytest.mark.parametrize("command", [["train-id"], ["train-ood", "--ood", OOD]])
def test_a_loss_that_is_not_finite_names_the_epoch_and_a_cure(here: Path, command: list[str]) -> None:
    message = refused(*command, "--seed", str(SEED), "--lr", "1e30", root=here)
    assert message == (
        "error: the loss is not finite in epoch 1; try a smaller learning rate (lr is 1e+30) or check the data\n"
    )


# --- files that cannot be read or written


@contextmanager
def nobody() -> Iterator[None]:
    """Root may do everything, so become somebody else for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_to_all(built: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A workspace that everybody may enter, unlike pytest's own folders."""
    for module in walk_packages(salcli_package.__path__, "salcli."):  # nobody may be unable to import them
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
    ("command", "name"),
    [
        ("filter", f"runs/{SEED}/gradients-id-train.h5"),
        ("train-ood", f"runs/{SEED}/networks/classifier.safetensors"),
        ("table", f"runs/{SEED}/{OOD}/metrics.json"),
        (f"inspect runs/{SEED}/networks/classifier.safetensors", f"runs/{SEED}/networks/classifier.safetensors"),
        (f"inspect runs/{SEED}/{OOD}/candidates.h5", f"runs/{SEED}/{OOD}/candidates.h5"),
    ],
)
def test_a_file_that_may_not_be_read_is_named(open_to_all: Path, command: str, name: str) -> None:
    (open_to_all / name).chmod(0)
    with nobody():
        result = salcli(*command.split())
    assert result.exit_code == 2
    assert result.stderr == f"error: {name}: Permission denied; it should be a file that you may read\n"


@pytest.mark.parametrize("mode", [0o000, 0o555], ids=["unreadable", "read-only"])
def test_a_folder_that_may_not_be_used_is_named(open_to_all: Path, mode: int) -> None:
    folder = open_to_all / "runs" / str(SEED) / OOD
    before = files(open_to_all)
    folder.chmod(mode)
    with nobody():
        result = salcli("filter", *ONE)
    folder.chmod(0o755)
    assert result.exit_code == 2
    assert re.match(rf"error: .*runs/{SEED}/{OOD}/\S+(:| cannot be written:) Permission denied; ", result.stderr)
    assert files(open_to_all) == before


def test_a_params_file_that_may_not_be_read_is_named(open_to_all: Path) -> None:
    (open_to_all / "params.yaml").chmod(0)
    with nobody():
        result = salcli("filter")
    assert result.exit_code == 2
    assert result.stderr == "error: params.yaml cannot be read: [Errno 13] Permission denied: 'params.yaml'\n"


def test_a_file_in_place_of_a_folder_and_a_folder_in_place_of_a_file_are_named(here: Path) -> None:
    (here / "scratch").write_text("mine")
    message = refused("filter", *ONE, "--threshold-quantile", "0.9", root=here)
    assert re.match(r"error: scratch/runs/0/digits-8-9/candidates.h5 cannot be written: Not a directory; mend", message)
    gradients = here / layout.wild_gradients(OOD, SEED).name
    gradients.unlink()
    gradients.mkdir()
    assert "gradients-wild.h5: Is a directory" in refused("filter", *ONE, root=here)


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
        (0, f"prepare wild --ood {OOD}", f"data/splits/{SEED}/{OOD}/wild.h5"),
        (200, "train-id --set train_id.epochs=1", f"scratch/.salcli/resume/train-id-{SEED}.pt"),
        (560, "train-id --set train_id.epochs=1", f"scratch/runs/{SEED}/networks/classifier.safetensors"),
        (16, f"extract-grads wild --ood {OOD}", f"runs/{SEED}/{OOD}/gradients-wild.h5"),
        (8, f"filter --ood {OOD}", f"runs/{SEED}/{OOD}/candidates.h5"),
        (120, f"train-ood --ood {OOD}", f".salcli/resume/train-sal-{OOD}-{SEED}.pt"),
        (560, f"train-ood --epochs 1 --ood {OOD}", f"scratch/runs/{SEED}/{OOD}/networks/sal.safetensors"),
        (8, f"evaluate --ood {OOD}", f"runs/{SEED}/{OOD}/scores.h5"),
    ],
)  # fmt: skip
def test_a_full_disk_is_reported_and_no_partial_file_is_left(
    workspace: Workspace, tmp_path: Path, free: int, command: str, name: str
) -> None:
    """A real disk with `free` KiB left. The file from before is still there, as it was."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = FULL_DISK.format(
        size=4000, disk=disk, workspace=workspace.root, free=free,
        command=f"{CONSOLE_SCRIPT} {command} --seed {SEED}",
    )  # fmt: skip
    done = process("unshare", "-rm", "bash", "-c", script)
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        f"error: {name} cannot be written: No space left on device; mend that and run the same command again\n"
    )
    before, after = (disk.with_suffix(f".{when}").read_text() for when in ("before", "after"))
    assert after == before


# --- Ctrl-C

# the real program, but it reports its progress without a pause: that is how we know that it is in the middle
TALKATIVE = "import salcli.reporting.progress as p; p.SECONDS_BETWEEN_LINES = 0; from salcli.cli import main; main()"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "when"),
    [
        ("train-id --epochs 100000", "train-id, seed 0: "),
        (f"train-ood --ood {OOD} --epochs 100000", f"train-ood, sal, {OOD}, seed 0: "),
        ("train-id --epochs 100000", "scratch run: "),  # torch is still importing parts of itself
    ],
    ids=["train-id", "train-ood", "before"],
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
            assert any(line.startswith(when) for line in running.stdout)
            running.send_signal(signal.SIGINT)
            _, errors = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 130
    assert errors == "interrupted; nothing half written is left behind, run the same command again\n"
    assert files(workspace.root) == before


def test_a_ctrl_c_that_python_would_lose_is_kept() -> None:
    """In a destructor or while a module is imported, Python reports a KeyboardInterrupt and goes on."""
    script = """
import signal, sys, time
from salcli.cli.errors import keep_interrupts
class Loses:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
sys.unraisablehook = keep_interrupts if sys.argv[1] == "kept" else sys.unraisablehook
try:
    Loses()
    time.sleep(2)
    print("lost")
except KeyboardInterrupt:
    print("kept")
"""
    for outcome in ("kept", "lost"):
        done = process(sys.executable, "-c", script, outcome)
        assert done.stdout == f"{outcome}\n"
        assert ("KeyboardInterrupt" in done.stderr) == (outcome == "lost")


def test_bad_params_are_refused_in_a_process_of_their_own(tmp_path: Path) -> None:
    """The exit code and the streams as a shell sees them."""
    write_params(tmp_path, {"filter.threshold_quantile": 95, "filter.calibraton": "train"})
    done = process(sys.executable, "-m", "salcli", "filter", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: params.yaml is not valid\n"
        "  filter.threshold_quantile  must be less than 1, got 95 (did you mean 0.95?)\n"
        "  filter.calibraton          no such key (did you mean calibration?)\n"
    )
