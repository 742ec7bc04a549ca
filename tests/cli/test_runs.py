"""Running stages by hand: what a command prints, which experiments it takes, and where it writes."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from helpers.cli import CONSOLE_SCRIPT, files, process, salcli
from helpers.quick import EXPERIMENT, OOD, REPOSITORY, SEED

from salcli.store.formats import Candidates, read_candidates
from salcli.store.layout import Experiment, Workspace

CHAIN = ["prepare", "train-id", "extract-grads", "filter", "train-ood", "evaluate", "table"]
RUN = f"runs/{SEED}/{OOD}/pi-0.1"


def follow(first: str) -> Iterator[tuple[list[str], Result]]:
    """Run a command, then what it says comes next, and so on to the end."""
    command = shlex.split(first)
    while command:
        result = salcli(*command[1:])
        assert result.exit_code == 0, result.output
        yield command, result
        command = next_after(result)


def next_after(result: Result) -> list[str]:
    found = re.search(r"^next: (.+)$", result.stdout, re.MULTILINE)
    return shlex.split(found[1]) if found else []


def check_what_was_written(root: Path, result: Result) -> None:
    """`wrote` names files that exist, with the time."""
    line = re.search(r"^wrote (.+?)(?: and \d+ more)?; worked [\d.]+ s$", result.stdout, re.MULTILINE)
    assert line, result.stdout
    assert all((root / name).is_file() for name in line[1].split(", "))


def check_width(result: Result) -> None:
    """100 columns, except for paths and commands, which can be copied."""
    lines = [line for line in result.stdout.splitlines() if not line.startswith(("next: ", "wrote ", "read from "))]
    assert max(map(len, lines)) <= 100


def scratch_candidates(root: Path, experiment: Experiment = EXPERIMENT) -> Candidates:
    return read_candidates(Workspace(root, scratch=True).find(experiment.candidates))


@pytest.mark.slow
def test_from_nothing_each_command_leads_to_the_next(fresh: Path) -> None:
    """In a scratch run, each stage finds what the one before it wrote, though nothing exists outside scratch/."""
    said = {}
    for command, result in follow(f"salcli prepare --set filter.threshold_quantile=0.9 --ood {OOD} --pi 0.1"):
        said[command[1]] = result.stdout
        assert ("--scratch" in command) == (command[1] != "prepare")
        check_width(result)
        if command[1] != "table":
            check_what_was_written(fresh, result)
    assert list(said) == CHAIN
    assert {Path(name).parts[0] for name in files(fresh)} == {"params.yaml", "scratch"}
    assert "override: filter.threshold_quantile = 0.9 (params.yaml: 0.95)\n" in said["prepare"]
    assert "scratch run: writes to scratch/, what `dvc repro` builds stays as it is" in said["evaluate"]
    assert re.search(r"^read from scratch/: .*/sal/candidates.h5", said["train-ood"], re.MULTILINE)


def test_options_select_experiments(fresh: Path) -> None:
    result = salcli("prepare", "--ood", OOD, "--pi", "0.2", "--pi", "1", "--pi", "1.0", "--seed", "3", "--seed", "9")
    assert result.exit_code == 0, result.stderr
    made = {str(path.parent.relative_to(fresh / "data" / "splits")) for path in fresh.rglob("wild.h5")}
    assert made == {f"{seed}/{OOD}/pi-{pi}" for seed in (3, 9) for pi in ("0.2", "1")}
    assert not (fresh / "scratch").exists()  # they select; they override nothing


def test_only_what_changes_a_result_makes_a_scratch_run(here: Path) -> None:
    before = files(here)
    result = salcli("extract-grads", "--device", "cpu", "--ood", OOD)
    assert "override: device = cpu (params.yaml: auto)\n" in result.stdout
    assert "override" not in salcli("filter", "--threshold-quantile", "0.950", "--ood", OOD).stdout
    assert files(here) == before  # the same bytes again


def test_a_flag_wins_over_set_and_a_key_that_the_command_does_not_read_is_warned_of(here: Path) -> None:
    thresholds = set()
    for more in ([], ["--set", "filter.threshold_quantile=0.7", "--set", "train_id.epochs=3"]):
        result = salcli("filter", "--ood", OOD, "--threshold-quantile", "0.8", *more)
        thresholds.add(scratch_candidates(here).threshold)
    assert len(thresholds) == 1
    assert re.findall(r"warning: (\S+) changes nothing here", result.stdout) == ["train_id.epochs"]


@pytest.mark.slow
def test_the_filter_prints_its_table_as_the_readme_runs_it(workspace: Workspace) -> None:
    command = f"filter --threshold-quantile 0.9 --ood {OOD} --seed {SEED}"
    assert f"\nsalcli {command}" in (REPOSITORY / "README.md").read_text()
    before, done = files(workspace.root), process(CONSOLE_SCRIPT, *command.split(), cwd=workspace.root)
    assert (done.returncode, done.stderr) == (0, "")
    assert {name: content for name, content in files(workspace.root).items() if "scratch/" not in name} == before
    candidates = scratch_candidates(workspace.root)
    row = re.search(rf"^ {OOD} +{SEED} +(\S+) +(\d+) +(\d+) +\d+ +\S+%", done.stdout, re.MULTILINE)
    assert row, done.stdout
    assert (int(row[2]), int(row[3])) == (len(candidates.index), len(candidates.wild_score))
    assert float(row[1]) == pytest.approx(candidates.threshold, rel=1e-3)


def test_the_table_shows_what_params_ask_for_everything_with_all_and_scratch_runs_apart(here: Path) -> None:
    salcli("evaluate", "--method", "msp", "--ood", OOD)
    shutil.copytree(here / "runs" / str(SEED), here / "runs" / "5")
    ours, scratch = salcli("table").stdout, salcli("table", "--scratch").stdout
    assert ("SAL" in ours, "from scratch/" in ours, "Left out: 2 evaluations" in ours) == (True, False, True)
    assert ("SAL" in scratch, "MSP" in scratch, "from scratch/" in scratch) == (False, True, True)
    assert "2 seeds" in salcli("table", "--all").stdout


def test_inspect_shows_every_kind_of_file_and_the_highest_candidates_first(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(built)
    for name in files(built).keys() - {"params.yaml"}:
        result = salcli("inspect", name)
        assert result.exit_code == 0, result.stderr
        assert f"{Path(name).stat().st_size:,} bytes" in result.stdout
        check_width(result)
    candidates = read_candidates(Workspace(built).find(EXPERIMENT.candidates))
    best = candidates.index[np.argsort(-candidates.score)[:3]]
    shown = salcli("inspect", "--top", "3", f"{RUN}/sal/candidates.h5").stdout
    rows = [line.split() for line in shown.partition("Top 3 candidates")[2].splitlines()[4:7]]
    assert [int(row[0]) for row in rows] == best.tolist()
    assert [float(row[1]) for row in rows] == pytest.approx(list(candidates.wild_score[best]), rel=1e-3)
