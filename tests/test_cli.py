"""The command line as people meet it: help, completion, what a run says, and where it writes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from conftest import OOD, REPOSITORY, SEED
from ruamel.yaml import YAML
from typer.testing import CliRunner

from salcli import __version__
from salcli.artifacts import layout
from salcli.artifacts.candidates import read_candidates
from salcli.artifacts.splits import read_id_split, read_wild_source, read_wild_truth
from salcli.cli import app
from salcli.params_file import read_yaml, with_overrides

if TYPE_CHECKING:
    from collections.abc import Iterator

    from click.testing import Result

    from salcli.artifacts.layout import Workspace

STAGE_COMMANDS = ["prepare", "train-id", "extract-grads", "filter", "train-ood", "evaluate"]
RESULT_COMMANDS = ["table", "report", "review", "inspect", "theory", "sweep-pi"]
COMMANDS = ["presets", "toy", "init", *STAGE_COMMANDS, *RESULT_COMMANDS, "detector", "predict", "export"]
CHAIN = ["prepare", "train-id", "extract-grads", "filter", "train-ood", "evaluate", "table"]
CONSOLE_SCRIPT = str(Path(sys.executable).with_name("salcli"))
# pydantic is not among them: Typer itself uses it
HEAVY = {
    "torch",
    "torchvision",
    "numpy",
    "matplotlib",
    "pandas",
    "h5py",
    "safetensors",
    "scipy",
    "sklearn",
    "salcli.params",
}


def salcli(*arguments: str) -> Result:
    """Run a command in this process. What is no error for the user comes through as what it is."""
    return CliRunner().invoke(app, list(arguments), prog_name="salcli", catch_exceptions=False)


def process(*command: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def files(root: Path) -> dict[str, bytes]:
    """Every file with its content; what an unfinished training keeps to go on from does not count."""
    paths = [path for path in sorted(root.rglob("*")) if path.is_file() and path.suffix != ".pt"]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def write_params(root: Path, overrides: dict[str, object]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    with (root / "params.yaml").open("w") as file:
        YAML().dump(with_overrides(read_yaml(REPOSITORY / "params.yaml"), overrides), file)


@pytest.fixture
def here(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A built workspace as the current folder."""
    monkeypatch.chdir(workspace.root)
    return workspace.root


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with nothing but a params.yaml that asks for little."""
    write_params(tmp_path, {"seeds": [4], "data.ood": [OOD], "train_id.epochs": 4, "train_ood.epochs": 1})
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- before anything heavy is imported


def imported_by(*arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """Run the real program; the modules that it imports."""
    done = process(sys.executable, "-X", "importtime", "-m", "salcli", *arguments, **environment)
    return done, {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if "|" in line}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], [], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    done, modules = imported_by(*arguments)
    assert done.returncode == (0 if arguments else 2)
    assert "salcli.cli.app" in modules
    assert not modules & HEAVY
    assert done.stdout.strip()


def test_the_import_check_can_fail() -> None:
    _, modules = imported_by("table", "--params", "/nowhere/params.yaml")
    assert modules & HEAVY >= {"numpy", "salcli.params"}


def test_the_console_script_is_the_same_program() -> None:
    by_script, by_module = process(CONSOLE_SCRIPT, "--version"), process(sys.executable, "-m", "salcli", "--version")
    assert by_script.stdout == by_module.stdout == f"salcli {__version__}\n"
    assert by_script.returncode == by_module.returncode == 0


def test_the_help_names_every_command() -> None:
    shown = salcli("--help").output
    assert all(re.search(rf"^│ {name} ", shown, re.MULTILINE) for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_help_text(name: str) -> None:
    import typer.main

    command = typer.main.get_command(app).whole(name)  # type: ignore[attr-defined]
    assert command.help
    assert all(getattr(parameter, "help", None) for parameter in command.params)


# --- completion


def complete(*words: str) -> list[str]:
    """What the shell would offer for the last word."""
    done = process(
        CONSOLE_SCRIPT, _SALCLI_COMPLETE="complete_bash", COMP_WORDS=" ".join(words), COMP_CWORD=str(len(words) - 1)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_commands_options_and_ood_sets_are_completed() -> None:
    assert complete("salcli", "tra") == ["train-id", "train-ood", "train-encoder"]
    assert complete("salcli", "filter", "--thr") == ["--threshold-quantile"]
    assert {"digits-8-9", "photo-patches", "svhn"} < {*complete("salcli", "filter", "--ood", "")}
    assert complete("salcli", "filter", "--ood", "digits-8") == ["digits-8-9"]
    assert complete("salcli", "evaluate", "--ood", "ph") == ["photo-patches"]
    assert complete("salcli", "table", "--format", "l") == ["latex"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_completion_works_in_a_real_shell() -> None:
    script = f"""
        export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"
        eval "$(salcli --show-completion bash)"
        complete -p salcli
        COMP_WORDS=(salcli filter --ood ph) COMP_CWORD=3
        _salcli_completion salcli
        echo "offers: ${{COMPREPLY[*]}}"
    """
    done = process("bash", "-c", script)
    assert "-F _salcli_completion salcli" in done.stdout
    assert "offers: photo-patches" in done.stdout


# --- what comes next


def follow(first: str) -> Iterator[tuple[list[str], Result]]:
    """Run a command, then what it says comes next, and so on to the end."""
    command = shlex.split(first)
    while command:
        result = salcli(*command[1:])
        assert result.exit_code == 0, result.output
        yield command, result
        found = re.search(r"^next: (.+)$", result.stdout, re.MULTILINE)
        command = shlex.split(found[1]) if found else []


def check_what_was_written(root: Path, result: Result) -> None:
    """`wrote` names files that are there; it may be broken into lines."""
    pattern = r"^wrote (.+?)(?:\s+and\s+\d+\s+more)?;\s+worked\s+[\d.]+\s+s\n(?:next:|$)"
    text = re.search(pattern, result.stdout, re.DOTALL | re.MULTILINE)
    assert text, result.stdout
    assert all((root / name).is_file() for name in re.split(r",\s+", text[1].strip()))


def check_width(result: Result) -> None:
    """All but the next command, which is there to be copied."""
    assert [line for line in result.stdout.splitlines() if len(line) > 100 and not line.startswith("next: ")] == []


def test_from_nothing_each_command_leads_to_the_next(fresh: Path) -> None:
    ran = []
    for command, result in follow("salcli prepare"):
        ran.append(command[1])
        check_width(result)
        if command[1] != "table":
            check_what_was_written(fresh, result)
    assert ran == CHAIN
    assert not (fresh / "scratch").exists()


def test_from_nothing_a_scratch_run_leads_to_a_scratch_table(fresh: Path) -> None:
    """Each stage finds what the one before it wrote, though nothing stands outside scratch/."""
    ran = []
    for command, result in follow("salcli prepare --pi 0.3"):
        ran.append(command[1])
        assert ("--scratch" in command) == (command[1] != "prepare")
        check_width(result)
    assert ran == CHAIN
    assert {Path(name).parts[0] for name in files(fresh)} == {"params.yaml", "scratch"}


def test_the_next_command_keeps_the_params_file_the_ood_sets_and_the_seeds(tmp_path: Path) -> None:
    root = tmp_path / "other place"
    write_params(root, {"seeds": [0, 1], "train_id.epochs": 1})
    commands = follow(f"salcli prepare --params '{root}/params.yaml' --seed 5 --seed 6 --seed 5")
    next(commands)
    command, _ = next(commands)
    assert command == ["salcli", "train-id", "--params", f"{root}/params.yaml", "--seed", "5", "--seed", "6"]
    assert {path.name for path in (root / "runs").iterdir()} == {"5", "6"}


def test_seeds_and_ood_sets_that_were_set_are_kept_as_well(fresh: Path) -> None:
    commands = follow("salcli prepare --set seeds=[7] --set train_id.epochs=1")
    next(commands)
    command, _ = next(commands)
    assert command == ["salcli", "train-id", "--seed", "7", "--scratch"]
    assert (fresh / "scratch" / "runs" / "7").is_dir()


def test_one_part_of_prepare_leads_to_the_rest(fresh: Path) -> None:
    commands = follow("salcli prepare id-set")
    assert [next(commands)[0][1:] for _ in range(3)] == [["prepare", "id-set"], ["prepare"], ["train-id"]]


def test_one_part_of_extract_grads_leads_to_the_other(here: Path) -> None:
    commands = follow(f"salcli extract-grads id --seed {SEED} --ood {OOD}")
    ran = [next(commands)[0][1:3] for _ in range(3)]
    assert ran == [["extract-grads", "id"], ["extract-grads", "wild"], ["filter", "--ood"]]


def test_dvc_is_not_told_what_comes_next(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_STAGE", "filter")
    result = salcli("filter", "--ood", OOD)
    assert "wrote runs/0/digits-8-9/candidates.h5" in result.stdout
    assert "next:" not in result.stdout


# --- scratch runs


def test_a_scratch_chain_says_what_it_overrode_and_leaves_the_rest_alone(here: Path) -> None:
    before = files(here)
    chain = list(follow(f"salcli filter --threshold-quantile 0.9 --ood {OOD} --seed {SEED}"))
    assert [command[1] for command, _ in chain] == ["filter", "train-ood", "evaluate", "table"]
    options = ["--ood", OOD, "--seed", str(SEED), "--scratch"]
    assert [command[2:] for command, _ in chain[1:]] == [options, options, ["--scratch"]]
    outputs = [result.stdout for _, result in chain]
    assert "override: filter.threshold_quantile = 0.9 (params.yaml: 0.95)\n" in outputs[0]
    assert all(
        "scratch run: writes to scratch/, what `dvc repro` builds stays as it is" in text for text in outputs[:3]
    )
    assert f"read from scratch/: runs/{SEED}/{OOD}/candidates.h5\n" in outputs[1]
    read = [f"runs/{SEED}/{OOD}/{name}" for name in ("candidates.h5", "networks/sal.safetensors")]
    assert f"read from scratch/: {', '.join(read)}" in " ".join(outputs[2].split())
    after = files(here)
    assert {name: content for name, content in after.items() if not name.startswith("scratch/")} == before
    assert set(after) - set(before) == {
        f"scratch/runs/{SEED}/{OOD}/{name}"
        for name in (
            "candidates.h5", "filter.json", "networks/sal.safetensors", "train-sal.csv", "scores.h5", "metrics.json",
            "roc.csv", "histogram.csv",
        )
    }  # fmt: skip
    for _, result in chain:
        check_width(result)


def test_a_scratch_evaluation_is_of_the_filter_in_scratch_post_hoc_too(here: Path) -> None:
    """τ of the test data has the ∇̄ and v of the filter that chose the candidates, whoever set its params."""
    one, figures = ["--ood", OOD, "--seed", str(SEED)], here / f"scratch/runs/{SEED}/{OOD}/metrics.json"
    asked_for = salcli("evaluate", *one, "--method", "sal-posthoc", "--set", "filter.svd=class-agnostic")
    expected = figures.read_text()
    salcli("filter", *one, "--svd", "class-agnostic")
    found = salcli("evaluate", *one, "--method", "sal-posthoc", "--scratch")
    assert figures.read_text() == expected
    assert "with the filter that made the candidates in scratch/" in " ".join(found.stdout.split())
    assert (asked_for.exit_code, found.exit_code) == (0, 0)
    salcli("evaluate", *one, "--method", "sal-posthoc", "--set", "evaluate.batch_size=511")
    assert figures.read_text() != expected  # that of params.yaml is another one


def test_a_wrong_key_is_refused_and_not_warned_of_as_well(here: Path) -> None:
    result = salcli("filter", "--set", "train_rival.wods.tolerance=1")
    assert result.exit_code == 2
    assert "warning" not in result.stdout + result.stderr


def test_the_scratch_table_is_not_the_table(here: Path) -> None:
    salcli("evaluate", "--method", "msp", "--ood", OOD)
    ours, scratch = salcli("table").stdout, salcli("table", "--scratch").stdout
    assert "SAL" in ours
    assert "SAL" not in scratch
    assert "MSP" in scratch
    assert "photo-patches" not in scratch


def test_a_scratch_split_and_its_wild_data_go_together(here: Path) -> None:
    """A run that makes both mixes the wild data from its own split: no sample may be in two parts."""
    shares = "{train: 0.5, calibration: 0.1, wild: 0.2, test: 0.2}"
    result = salcli("prepare", "--set", f"data.id_shares={shares}")
    assert result.exit_code == 0
    assert "read from scratch/" not in result.stdout
    scratch = layout.Workspace(here / "scratch")
    split = read_id_split(scratch.find(layout.id_split(SEED)))
    mixture = layout.wild_mixture(OOD, SEED), layout.wild_truth(OOD, SEED)
    wild, is_ood = read_wild_source(scratch.find(mixture[0])), read_wild_truth(scratch.find(mixture[1]))
    assert set(wild[~is_ood]) <= set(split.wild)


@pytest.mark.parametrize("value", ["0.95", "0.950"])
def test_a_flag_that_changes_nothing_makes_no_scratch_run(here: Path, value: str) -> None:
    result = salcli("filter", "--threshold-quantile", value, "--ood", OOD)
    assert "override" not in result.stdout
    assert not (here / "scratch").exists()


def test_a_device_makes_no_scratch_run(here: Path) -> None:
    before = files(here)
    result = salcli("extract-grads", "--device", "cpu", "--ood", OOD)
    assert "override: device = cpu (params.yaml: auto)\n" in result.stdout
    assert "scratch" not in result.stdout
    assert files(here) == before  # the same bytes again


def test_a_flag_and_set_mean_the_same_and_the_flag_wins(here: Path) -> None:
    threshold = {}
    for name, options in {
        "flag": ["--threshold-quantile", "0.8"],
        "set": ["--set", "filter.threshold_quantile=0.8"],
        "last": ["--set", "filter.threshold_quantile=0.7", "--set", "filter.threshold_quantile=0.8"],
        "both": ["--set", "filter.threshold_quantile=0.7", "--threshold-quantile", "0.8"],
    }.items():
        assert salcli("filter", "--ood", OOD, *options).exit_code == 0
        found = layout.Workspace(here / "scratch").find(layout.candidates(OOD, SEED))
        threshold[name] = read_candidates(found).threshold
    assert len(set(threshold.values())) == 1, threshold


@pytest.mark.slow
def test_the_filter_prints_its_table_in_a_process_of_its_own(workspace: Workspace) -> None:
    command = ["filter", "--threshold-quantile", "0.9", "--ood", OOD, "--seed", str(SEED)]
    done = process(CONSOLE_SCRIPT, *command, cwd=workspace.root)
    assert done.returncode == 0
    assert done.stderr == ""
    candidates = read_candidates(layout.Workspace(workspace.root / "scratch").find(layout.candidates(OOD, SEED)))
    row = re.search(rf"^  {OOD} +{SEED} +(\S+) +(\d+) +(\d+) +(\S+)% +(\S+)% +\S+ +\S+%", done.stdout, re.MULTILINE)
    assert row
    assert (int(row[2]), int(row[3])) == (len(candidates.index), len(candidates.wild_score))
    assert float(row[1]) == pytest.approx(candidates.threshold, rel=1e-3)
    assert "wild" in done.stdout
    assert "calibration (holdout)" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


# --- inspect


ARTIFACTS = {
    "data/prepared/digits-0-7.h5": ["image-set", "1443 × 1 × 8 × 8", "uint8"],
    f"data/prepared/{OOD}.h5": ["image-set", "354 × 1 × 8 × 8"],
    f"data/splits/{SEED}/id.h5": ["id-split", "calibration", "wild"],
    f"data/splits/{SEED}/{OOD}/wild.h5": ["wild-mixture", "source", "ood_test"],
    f"data/splits/{SEED}/{OOD}/truth.h5": ["wild-truth", "is_ood", "bool"],
    f"runs/{SEED}/networks/classifier.safetensors": ["classifier", "small-cnn", "head.weight", "8 × 64", "56,747"],
    f"runs/{SEED}/train-id.csv": ["The first 8 of 8 rows", "epoch", "accuracy"],
    f"runs/{SEED}/train-id.json": ["train_accuracy", "test_accuracy"],
    f"runs/{SEED}/gradients-id-train.h5": ["gradients", "ID train", "Samples of each class", "462 × 64"],
    f"runs/{SEED}/gradients-id-calibration.h5": ["gradients", "ID calibration", "115 × 8"],
    f"runs/{SEED}/{OOD}/gradients-wild.h5": ["gradients", f"wild, {OOD}", "642 × 64"],
    f"runs/{SEED}/{OOD}/candidates.h5": ["candidates", "threshold_quantile=0.95", "Top 10 candidates"],
    f"runs/{SEED}/{OOD}/filter.json": ["err_in", "n_candidates"],
    f"runs/{SEED}/{OOD}/networks/sal.safetensors": ["ood-classifier", "ood_head.weight", "56,812"],
    f"runs/{SEED}/{OOD}/detector.safetensors": ["detector", "fit=resize", "calibration_scores", "id_quantile   0.95"],
    f"runs/{SEED}/{OOD}/train-sal.csv": ["The first 3 of 3 rows"],
    f"runs/{SEED}/{OOD}/scores.h5": ["test-scores", "sal/id", "knn/ood"],
    f"runs/{SEED}/{OOD}/metrics.json": ["'sal': {", "'samples': {"],
    f"runs/{SEED}/{OOD}/roc.csv": ["The first 10 of 2,412 rows", "fpr"],
    f"runs/{SEED}/{OOD}/histogram.csv": ["The first 10 of 1,440 rows", "ID test"],
}


@pytest.mark.parametrize("name", ARTIFACTS)
def test_inspect_shows_what_is_in_a_file(built: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(built)
    result = salcli("inspect", name)
    assert result.exit_code == 0
    assert f"{(built / name).stat().st_size:,} bytes" in result.stdout
    assert [word for word in ARTIFACTS[name] if word not in result.stdout] == []
    check_width(result)


def test_the_kinds_that_are_inspected_are_all_there_are(built: Path) -> None:
    names = {name for name in files(built) if name != "params.yaml" and "photo-patches" not in name}
    assert names == set(ARTIFACTS)


def test_inspect_lists_the_highest_candidates_first(built: Path) -> None:
    candidates = read_candidates(layout.Workspace(built).find(layout.candidates(OOD, SEED)))
    best = np.argsort(-candidates.score)[:3]
    shown = salcli("inspect", "--top", "3", str(built / f"runs/{SEED}/{OOD}/candidates.h5")).stdout
    rows = [line.split() for line in shown.partition("Top 3 candidates")[2].splitlines()[4:7]]
    assert [[int(index), int(label)] for index, _, label in rows] == [
        [candidates.index[row], candidates.predicted[row]] for row in best
    ]
    assert [float(score) for _, score, _ in rows] == pytest.approx(list(candidates.score[best]), rel=1e-3)


def test_an_override_that_the_command_does_not_read_is_pointed_out(here: Path) -> None:
    result = salcli("filter", "--set", "data.pi=0.3", "--ood", OOD)
    assert "warning: data.pi changes nothing here" in result.stdout
    assert "warning" not in salcli("filter", "--set", "filter.n_vectors=2", "--ood", OOD).stdout


def test_table_shows_what_params_ask_for_and_all_on_demand(here: Path) -> None:
    shutil.copytree(here / "runs" / str(SEED), here / "runs" / "5")
    assert "Left out: 2 evaluations" in salcli("table").stdout
    assert "2 seeds" in salcli("table", "--all").stdout
