"""Running stages by hand: what a command prints, which experiments it takes, and where it writes."""

import re
import shlex
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from helpers.cli import CONSOLE_SCRIPT, files, process, salcli
from helpers.quick import EXPERIMENT, OOD, REPOSITORY, SEED

from salcli.params.reading import edited
from salcli.store.formats import Candidates, read_candidates, read_id_split, read_wild_set, read_wild_truth
from salcli.store.layout import Experiment, Workspace

CHAIN = ["prepare", "train-id", "extract-grads", "filter", "train-ood", "evaluate", "table"]
ONE = ["--ood", OOD, "--seed", str(SEED)]
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


def following(first: str, n: int = 1) -> list[list[str]]:
    """The arguments of the next n commands, of which the last does not run."""
    return [next_after(result)[1:] for _, result in islice(follow(first), n)]


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


# --- what comes next


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", " --set filter.threshold_quantile=0.9"], ids=["plain", "scratch"])
def test_from_nothing_each_command_leads_to_the_next(fresh: Path, options: str) -> None:
    """In a scratch run, each stage finds what the one before it wrote, though nothing exists outside scratch/."""
    ran = []
    for command, result in follow(f"salcli prepare{options}"):
        ran.append(command[1])
        assert ("--scratch" in command) == (bool(options) and command[1] != "prepare")
        check_width(result)
        if command[1] != "table":
            check_what_was_written(fresh, result)
    assert ran == CHAIN
    tops = {Path(name).parts[0] for name in files(fresh)}
    assert tops == ({"params.yaml", "scratch"} if options else {"params.yaml", "data", "runs"})


def test_the_next_command_keeps_the_params_file_and_the_seeds(tmp_path: Path) -> None:
    root = tmp_path / "another folder"
    root.mkdir()
    values = {"seeds": [0, 1], "train_id.epochs": 1}
    (root / "params.yaml").write_text(edited((REPOSITORY / "params.yaml").read_text(), values))
    (command,) = following(f"salcli prepare --params '{root}/params.yaml' --seed 5 --seed 6 --seed 5")
    assert command == ["train-id", "--params", f"{root}/params.yaml", "--seed", "5", "--seed", "6"]
    assert {path.name for path in (root / "data" / "splits").iterdir()} == {"5", "6"}


def test_seeds_that_were_set_are_kept_as_well(fresh: Path) -> None:
    assert following("salcli prepare --set seeds=[7] --set train_id.epochs=1") == [
        ["train-id", "--seed", "7", "--scratch"]
    ]
    assert (fresh / "scratch" / "data" / "splits" / "7").is_dir()


def test_the_next_command_gets_only_options_that_it_has(here: Path) -> None:
    """train-id has no --ood and no --pi, train-ood takes variants as methods, table takes all."""
    assert following(f"salcli prepare --pi 0.3 --ood {OOD}") == [["train-id"]]
    assert following(f"salcli filter --variant sal --pi 0.1 --ood {OOD}", 3) == [
        ["train-ood", "--ood", OOD, "--pi", "0.1", "--method", "sal"],
        ["evaluate", "--ood", OOD, "--pi", "0.1"],
        ["table"],
    ]


def test_one_part_leads_to_the_rest(here: Path) -> None:
    assert following("salcli prepare id-set", 2) == [["prepare"], ["train-id"]]
    assert following(f"salcli extract-grads id --seed {SEED} --ood {OOD}", 2) == [
        ["extract-grads", "wild", *ONE], ["filter", *ONE],
    ]  # fmt: skip


def test_dvc_is_not_told_what_comes_next(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_STAGE", "filter")
    result = salcli("filter", "--ood", OOD)
    assert f"wrote {RUN}/sal/candidates.h5" in result.stdout
    assert "next:" not in result.stdout


# --- which experiments


def test_options_select_experiments(fresh: Path) -> None:
    result = salcli("prepare", "--ood", OOD, "--pi", "0.2", "--pi", "1", "--pi", "1.0", "--seed", "3", "--seed", "9")
    assert result.exit_code == 0, result.stderr
    made = {str(path.parent.relative_to(fresh / "data" / "splits")) for path in fresh.rglob("wild.h5")}
    assert made == {f"{seed}/{OOD}/pi-{pi}" for seed in (3, 9) for pi in ("0.2", "1")}
    assert not (fresh / "scratch").exists()  # they select; they override nothing


def test_variants_are_selected_and_run_with_their_params(here: Path) -> None:
    params = (here / "params.yaml").read_text()
    variants = {"variants": ["sal", "sal-2"], "variant": {"sal": {}, "sal-2": {"filter": {"n_vectors": 2}}}}
    (here / "params.yaml").write_text(edited(params, variants))
    before = files(here)
    assert salcli("filter", "--variant", "sal-2", "--ood", OOD).exit_code == 0
    assert set(files(here)) - set(before) == {f"{RUN}/sal-2/candidates.h5", f"{RUN}/sal-2/filter.json"}
    both = salcli("filter", "--ood", OOD)
    assert {name: files(here)[name] for name in before} == before
    assert "sal-2" in both.stdout
    trained = salcli("train-ood", "--method", "sal-2", "--ood", OOD)
    assert trained.exit_code == 0, trained.stderr
    assert (here / f"{RUN}/networks/sal-2.safetensors").exists()


# --- scratch runs


def test_a_scratch_chain_says_what_it_overrode_and_leaves_the_rest_alone(here: Path) -> None:
    before = files(here)
    chain = list(follow(f"salcli filter --threshold-quantile 0.9 --ood {OOD} --seed {SEED}"))
    assert [command[1:] for command, _ in chain[1:]] == [
        ["train-ood", *ONE, "--scratch"], ["evaluate", *ONE, "--scratch"], ["table", "--scratch"],
    ]  # fmt: skip
    outputs = [result.stdout for _, result in chain]
    assert "override: filter.threshold_quantile = 0.9 (params.yaml: 0.95)\n" in outputs[0]
    assert all(
        "scratch run: writes to scratch/, what `dvc repro` builds stays as it is" in text for text in outputs[:3]
    )
    assert f"read from scratch/: {RUN}/sal/candidates.h5\n" in outputs[1]
    assert f"{RUN}/networks/sal.safetensors" in outputs[2]
    after = files(here)
    assert {name: content for name, content in after.items() if not name.startswith("scratch/")} == before
    assert set(after) - set(before) == {
        f"scratch/{RUN}/{name}"
        for name in (
            "sal/candidates.h5", "sal/filter.json", "networks/sal.safetensors", "train-sal.csv",
            *(f"evaluation/{name}" for name in ("scores.h5", "metrics.json", "roc.csv", "histogram.csv")),
        )
    }  # fmt: skip


def test_a_scratch_split_and_its_wild_data_go_together(here: Path) -> None:
    """A run that makes both mixes the wild data from its own split: no sample may be in two parts."""
    shares = "{train: 0.5, calibration: 0.1, wild: 0.2, test: 0.2}"
    result = salcli("prepare", "--set", f"data.id_shares={shares}")
    assert result.exit_code == 0
    scratch = Workspace(here, scratch=True)
    split = read_id_split(scratch.find(EXPERIMENT.split))
    wild = read_wild_set(scratch.find(EXPERIMENT.wild))
    is_ood = read_wild_truth(scratch.find(EXPERIMENT.truth))
    assert is_ood is not None
    assert set(wild.source[~is_ood]) <= set(split.wild)
    assert len(split.wild) != len(read_id_split(Workspace(here).find(EXPERIMENT.split)).wild)


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
    thresholds = set()
    for options in (
        ["--threshold-quantile", "0.8"],
        ["--set", "filter.threshold_quantile=0.8"],
        ["--set", "filter.threshold_quantile=0.7", "--set", "filter.threshold_quantile=0.8"],
        ["--set", "filter.threshold_quantile=0.7", "--threshold-quantile", "0.8"],
    ):
        assert salcli("filter", "--ood", OOD, *options).exit_code == 0
        thresholds.add(scratch_candidates(here).threshold)
    assert len(thresholds) == 1


@pytest.mark.parametrize(
    ("command", "unread", "read"),
    [
        ("filter", "train_id.epochs=3", "filter.n_vectors=2"),
        ("train-id", "filter.n_vectors=2", "train_id.epochs=1"),
        ("evaluate", "train_ood.lr=0.5", "evaluate.methods=[msp]"),
    ],
)
def test_a_key_that_the_command_does_not_read_is_warned_of(here: Path, command: str, unread: str, read: str) -> None:
    result = salcli(command, "--set", unread, "--set", read, "--seed", str(SEED))
    assert result.exit_code == 0, result.stderr
    assert re.findall(r"warning: (\S+) changes nothing here", result.stdout) == [unread.partition("=")[0]]


@pytest.mark.slow
def test_the_filter_prints_its_table_as_the_readme_runs_it(workspace: Workspace) -> None:
    command = f"filter --threshold-quantile 0.9 --ood {OOD} --seed {SEED}"
    assert f"\nsalcli {command}" in (REPOSITORY / "README.md").read_text()
    done = process(CONSOLE_SCRIPT, *command.split(), cwd=workspace.root)
    assert (done.returncode, done.stderr) == (0, "")
    candidates = scratch_candidates(workspace.root)
    row = re.search(rf"^ {OOD} +{SEED} +(\S+) +(\d+) +(\d+) +(\S+)% +(\S+)% +\S+ +\S+%", done.stdout, re.MULTILINE)
    assert row
    assert (int(row[2]), int(row[3])) == (len(candidates.index), len(candidates.wild_score))
    assert float(row[1]) == pytest.approx(candidates.threshold, rel=1e-3)
    assert "calibration (holdout)" in done.stdout


# --- the table of what was run


def test_the_scratch_table_is_not_the_table(here: Path) -> None:
    salcli("evaluate", "--method", "msp", "--ood", OOD)
    ours, scratch = salcli("table").stdout, salcli("table", "--scratch").stdout
    assert "SAL" in ours
    assert "from scratch/" not in ours
    assert "from scratch/" in scratch
    assert "SAL" not in scratch
    assert "MSP" in scratch
    assert "photo-patches" not in scratch


def test_the_table_shows_what_params_ask_for_and_everything_with_all(here: Path) -> None:
    shutil.copytree(here / "runs" / str(SEED), here / "runs" / "5")
    assert "Left out: 2 evaluations" in salcli("table").stdout
    assert "2 seeds" in salcli("table", "--all").stdout


# --- inspect

ARTIFACTS = {
    "data/prepared/digits-0-7.h5": ["1443 × 1 × 8 × 8", "uint8"],
    f"data/prepared/{OOD}.h5": ["354 × 1 × 8 × 8"],
    f"data/splits/{SEED}/id.h5": ["calibration", "wild"],
    f"data/splits/{SEED}/{OOD}/pi-0.1/wild.h5": ["source", "ood_test"],
    f"data/splits/{SEED}/{OOD}/pi-0.1/truth.h5": ["is_ood", "bool"],
    f"runs/{SEED}/networks/classifier.safetensors": ["small-cnn", "head.weight", "8 × 64", "56,747"],
    f"runs/{SEED}/train-id.csv": ["The first 8 of 8 rows", "epoch", "accuracy"],
    f"runs/{SEED}/train-id.json": ["train_accuracy", "test_accuracy"],
    f"runs/{SEED}/representation/id-train.h5": ["Samples of each class", "462 × 64"],
    f"runs/{SEED}/representation/id-calibration.h5": ["115 × 8"],
    f"runs/{SEED}/representation/id-test.h5": ["288 × 8"],
    f"{RUN}/representation/wild.h5": ["642 × 64"],
    f"{RUN}/representation/test.h5": ["106 × 64"],
    f"{RUN}/sal/candidates.h5": ["candidates", "threshold_quantile=0.95", "Top 10 candidates"],
    f"{RUN}/sal/filter.json": ["err_in", "n_candidates"],
    f"{RUN}/sal/detector.safetensors": ["detector", "calibration_scores"],
    f"{RUN}/networks/sal.safetensors": ["ood_head.weight", "56,812"],
    f"{RUN}/train-sal.csv": ["The first 3 of 3 rows"],
    f"{RUN}/evaluation/scores.h5": ["sal/id", "knn/ood"],
    f"{RUN}/evaluation/metrics.json": ["'sal': {", "'samples': {"],
    f"{RUN}/evaluation/roc.csv": ["The first 10 of ", "fpr"],
    f"{RUN}/evaluation/histogram.csv": ["The first 10 of ", "ID test"],
}


def test_inspect_shows_what_is_in_every_kind_of_file(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(ARTIFACTS) == {name for name in files(built) if name != "params.yaml" and "photo-patches" not in name}
    monkeypatch.chdir(built)
    for name, words in ARTIFACTS.items():
        result = salcli("inspect", name)
        assert result.exit_code == 0, result.stderr
        assert f"{(built / name).stat().st_size:,} bytes" in result.stdout
        assert [word for word in words if word not in result.stdout] == [], result.stdout
        check_width(result)


def test_inspect_lists_the_highest_candidates_first(built: Path) -> None:
    candidates = read_candidates(Workspace(built).find(EXPERIMENT.candidates))
    best = candidates.index[np.argsort(-candidates.wild_score[candidates.index])[:3]]
    shown = salcli("inspect", "--top", "3", str(built / f"{RUN}/sal/candidates.h5")).stdout
    rows = [line.split() for line in shown.partition("Top 3 candidates")[2].splitlines()[4:7]]
    assert [int(row[0]) for row in rows] == best.tolist()
    assert [float(row[1]) for row in rows] == pytest.approx(list(candidates.wild_score[best]), rel=1e-3)
