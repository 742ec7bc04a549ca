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
from salcli.store.layout import Artifact, prepared_set

ONE = ["--ood", OOD, "--seed", str(SEED)]
RUN = f"runs/{SEED}/{OOD}/pi-0.1"
X, ID, WILD = EXPERIMENT, prepared_set("digits-0-7"), prepared_set(OOD)

# --- a stage before the stage that it needs

NEEDS: dict[str, list[Artifact]] = {
    "prepare split": [ID],
    f"prepare wild --ood {OOD}": [ID, WILD, X.split],
    "train-id": [ID, X.split],
    "extract-grads id": [ID, X.split, X.classifier],
    f"extract-grads wild --ood {OOD}": [ID, WILD, X.wild, X.classifier],
    f"filter --ood {OOD}": [X.id_representation("train"), X.id_representation("calibration"), X.wild_representation],
    f"train-ood --ood {OOD}": [ID, WILD, X.split, X.wild, X.classifier, X.candidates],
    f"evaluate --ood {OOD}": [ID, WILD, X.split, X.wild, X.classifier, X.id_representation("train"), X.network("sal")],
    f"detector --ood {OOD}": [ID, X.split, X.classifier, X.network("sal")],
}


@pytest.mark.parametrize("command", NEEDS)
def test_a_stage_names_the_missing_file_and_the_command_that_makes_it(here: Path, command: str) -> None:
    for artifact in NEEDS[command]:
        aside = here / "aside"
        (here / artifact.path).rename(aside)
        message = refused(*command.split(), "--seed", str(SEED), root=here)
        assert message == f"error: {artifact.path} does not exist yet; make it with: {artifact.made_by}\n"
        aside.rename(here / artifact.path)


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


def test_a_table_before_any_evaluation_says_how_to_make_one(tmp_path: Path) -> None:
    message = refused("table", "--all", "--params", str(tmp_path / "params.yaml"), root=tmp_path)
    assert "there is no evaluation below" in message
    assert "make one with: dvc repro" in message


# --- names and values


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("filter --ood digits-89", "no OOD set is called digits-89 (did you mean digits-8-9?); known: 300k-random, "),
        ("filter --ood digits-0-7", "--ood digits-0-7: that is the ID set (data.id); name another one"),
        ("filter --ood ''", "no OOD set is called ''; known: 300k-random, "),
        ("prepare --unseen svhm", "no OOD set is called svhm (did you mean svhn?)"),
        ("filter --variant sall", "no variant is called sall (did you mean sal?); known: sal"),
        ("train-ood --method wods", "no method is called wods (did you mean woods?); known: "),
        ("train-ood --method msp", "no method is called msp (did you mean step?); known: energy-oe, oe, sal, scone, "),
        ("train-encoder --encoder knn-pluss", "no method is called knn-pluss (did you mean knn-plus?)"),
        ("train-encoder", "there is nothing to train: encoders is empty; name one there, or with --encoder"),
        ("evaluate unseen", "there is nothing to test on: data.test_ood is empty; name a set there, or with --unseen"),
        ("evaluate --method knnn", "no method is called knnn (did you mean knn?); known: "),
        ("train-id --device cudda", "device  no device is called cudda (did you mean cuda?); known: auto, cpu, cuda"),
        ("prepare --pi 0", "--pi 0: must be a number in (0, 1], or unknown"),
        ("prepare --pi nan", "--pi nan: must be a number in (0, 1], or unknown"),
        ("prepare --pi half", "--pi half: must be a number in (0, 1], or unknown"),
        ("prepare --set data.pi=0.3", "data.pi  must be a list, got 0.3 (did you mean [0.3]?)"),
        ("prepare --set data.ood=[digits-0-7]", "data.ood  must not name the ID set, got digits-0-7"),
        ("filter --set filter.calibraton=train", "filter.calibraton  no such key (did you mean calibration?)"),
        ("filter --set filter", "--set filter: must be KEY=VALUE, for example --set filter.threshold_quantile=0.9"),
        ("filter --set seeds=[", "--set seeds=[: the value is not valid YAML"),
        ("filter --params nowhere.yaml", "nowhere.yaml does not exist; start salcli in a folder with a params.yaml"),
        ("filter --params .", "cannot be read"),
        (
            "evaluate --method knn --set methods.knn.k=463",
            "methods.knn.k is 463, but there are only 462 ID training samples",
        ),
        ("inspect nowhere.h5", "nowhere.h5 is not a file"),
        ("inspect params.yaml", "params.yaml is no checkpoint and no HDF5, JSON or CSV file that salcli could show"),
        ("presets cifar11", "no preset is called cifar11 (did you mean cifar10?)"),
        ("toy --calibration hold-out", "no calibration is called hold-out (did you mean holdout?)"),
        ("train-id --set launcher=nobody-has-this", "launcher 'nobody-has-this' cannot be started: No such file"),
        ('train-id --set "launcher=\'a \\"b\'"', "No closing quotation; see launcher in params.yaml"),
    ],
)
def test_a_bad_name_or_value_is_refused(here: Path, arguments: str, message: str) -> None:
    said = refused(*shlex.split(arguments), root=here)
    assert said.startswith("error: ")
    assert message in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("filter --seed -1", "Invalid value for '--seed'"),
        ("filter --seed one", "Invalid value for '--seed'"),
        ("filter --seed", "Option '--seed' requires an argument"),
        ("filter --treshold 0.9", "No such option: --treshold .*--threshold-quantile"),
        ("filter digits-8-9", "Got unexpected extra argument"),
        ("fliter", "No such command 'fliter'. Did you mean 'filter'"),
        ("data fetsh svhn", "No such command 'fetsh'. Did you mean 'fetch'"),
        ("--sed 3", "No such option: --sed"),
        ("table --format html", "Invalid value for '--format'"),
        ("prepare everything", "Invalid value for '.*part.*'"),
        ("inspect", "Missing argument"),
        ("inspect --top -1 params.yaml", "Invalid value for '--top'"),
    ],
)
def test_a_mistake_in_options_is_reported_by_typer(here: Path, arguments: str, message: str) -> None:
    before = files(here)
    result = salcli(*arguments.split())
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "╭─ Error ─" in result.stderr
    assert re.search(message, re.sub(r"[\s│]+", " ", result.stderr))
    assert files(here) == before


@pytest.mark.slow
def test_bad_params_as_a_shell_sees_them(tmp_path: Path) -> None:
    text = (REPOSITORY / "params.yaml").read_text()
    text = text.replace("threshold_quantile: 0.95", "threshold_quantile: 95").replace(
        "  calibration: ho", "  calibraton: ho"
    )
    (tmp_path / "params.yaml").write_text(text)
    done = process(sys.executable, "-m", "salcli", "filter", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    first, *lines = done.stderr.splitlines()
    assert first == "error: params.yaml is not valid"
    assert "  filter.threshold_quantile  must be less than 1, got 95 (did you mean 0.95?)" in lines
    assert "  filter.calibraton          no such key (did you mean calibration?)" in lines


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", ["train-id", "extract-grads", "train-ood", "evaluate"])
def test_a_cuda_device_that_does_not_exist_is_refused(here: Path, command: str) -> None:
    message = refused(command, "--device", "cuda:1", "--seed", str(SEED), root=here)
    assert message == "error: device cuda:1: no CUDA device is available here; use device: auto or cpu\n"


# --- data, threshold, training


def test_a_share_of_ood_that_cannot_be_mixed_is_refused_with_one_that_can(here: Path) -> None:
    message = refused("prepare", "wild", *ONE, "--pi", "0.0001", root=here)
    found = re.search(r"data.pi 0.0001: 578 ID and 248 OOD images cannot be mixed .* value from ([\d.]+) to", message)
    assert found
    assert salcli("prepare", "wild", *ONE, "--pi", found[1]).exit_code == 0


def give_scores(representation: Path, scores: np.ndarray) -> None:
    """Logits with just these energy scores: the first class dominates."""
    with h5py.File(representation, "r+") as file:
        file["logits"][:] = -1e4
        file["logits"][:, 0] = -scores


@pytest.mark.parametrize(
    ("quantile", "outcome"), [("0.999", "no candidate outliers"), ("0.001", "nothing but candidate outliers")]
)
def test_a_threshold_that_separates_nothing_is_refused_with_a_range_that_works(
    here: Path, quantile: str, outcome: str
) -> None:
    """The range is right: its ends and its middle work, and one calibration sample beyond its ends does not."""
    give_scores(here / X.id_representation("calibration").path, np.arange(-115.0, 0))
    give_scores(here / X.wild_representation.path, np.linspace(-60.5, -30.5, 642))
    command = ["filter", *ONE, "--score", "energy", "--threshold-quantile"]
    message = refused(*command, quantile, root=here)
    found = re.search(rf"threshold_quantile {quantile} leaves {outcome}; values from (\S+) to (\S+) work", message)
    assert found, message
    low, high = float(found[1]), float(found[2])
    for works in (found[1], found[2], str((low + high) / 2)):
        assert salcli(*command, works).exit_code == 0, works
    assert "nothing but candidate outliers" in refused(*command, str(low - 1 / 115), root=here)
    assert "no candidate outliers" in refused(*command, str(high + 1 / 115), root=here)


def test_scores_that_do_not_overlap_are_refused_as_such(here: Path) -> None:
    give_scores(here / X.id_representation("calibration").path, np.arange(-115.0, 0))
    give_scores(here / X.wild_representation.path, np.linspace(-300, -200, 642))
    message = refused("filter", *ONE, "--score", "energy", root=here)
    assert "leaves no candidate outliers; no value works: wild and calibration scores do not overlap" in message


@pytest.mark.parametrize("command", [["train-id"], ["train-ood", "--ood", OOD]])
def test_a_loss_that_is_not_finite_names_the_epoch_and_a_fix(here: Path, command: list[str]) -> None:
    message = refused(*command, "--seed", str(SEED), "--lr", "1e30", root=here)
    assert re.match(r"error: the loss .+ epoch 1; try a smaller learning rate \(lr is 1e\+30\)", message)


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
    ("command", "name"),
    [
        ("filter", f"runs/{SEED}/representation/id-train.h5"),
        ("train-ood", f"runs/{SEED}/networks/classifier.safetensors"),
        ("table", f"{RUN}/evaluation/metrics.json"),
        (f"inspect runs/{SEED}/networks/classifier.safetensors", f"runs/{SEED}/networks/classifier.safetensors"),
        (f"inspect {RUN}/sal/candidates.h5", f"{RUN}/sal/candidates.h5"),
    ],
)
def test_a_file_that_may_not_be_read_is_named(open_to_all: Path, command: str, name: str) -> None:
    (open_to_all / name).chmod(0)
    with nobody():
        result = salcli(*command.split())
    assert result.exit_code == 2
    assert result.stderr == f"error: {name}: Permission denied; it should be a file that you may read\n"


def test_a_params_file_that_may_not_be_read_is_named(open_to_all: Path) -> None:
    (open_to_all / "params.yaml").chmod(0)
    with nobody():
        result = salcli("filter")
    assert result.exit_code == 2
    assert result.stderr == "error: params.yaml cannot be read: [Errno 13] Permission denied: 'params.yaml'\n"


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
