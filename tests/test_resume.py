"""A training run that was killed goes on where it was, to the very same bytes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from conftest import OOD, SEED

from salcli.artifacts import layout
from salcli.artifacts.resume import ResumePoint
from salcli.params import Params, load_params
from salcli.progress import Silent
from salcli.stages import train_id, train_ood

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from salcli.artifacts.layout import Workspace


@dataclass
class Watched(Silent):
    """Remembers what was said, and stops the run after so many images."""

    stop_after: int | None = None
    notes: list[str] = field(default_factory=list)
    skipped: int = 0
    seen: int = 0

    @contextmanager
    def task(self, name: str, total: int, unit: str) -> Iterator[Watched]:
        yield self

    def advance(self, n: int, **values: float) -> None:
        self.seen += n
        if self.stop_after is not None and self.seen > self.stop_after:
            raise KeyboardInterrupt

    def skip(self, n: int) -> None:
        self.skipped += n

    def note(self, text: str) -> None:
        self.notes.append(text)


def params_with(workspace: Workspace, **overrides: Any) -> Params:
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_params(workspace.root / "params.yaml", dotted)[0]


RUNS: dict[str, tuple[Callable[..., Any], str, str, dict[str, Any]]] = {
    "train-id": (
        lambda workspace, params, progress: train_id.run(workspace, params, SEED, progress),
        f"runs/{SEED}/networks/classifier.safetensors", f"runs/{SEED}/train-id.csv", {"train_id__epochs": 4},
    ),
    "train-id, augmented": (
        lambda workspace, params, progress: train_id.run(workspace, params, SEED, progress),
        f"runs/{SEED}/networks/classifier.safetensors", f"runs/{SEED}/train-id.csv",
        {"train_id__epochs": 4, "train_id__augment": "flip-crop"},
    ),
    "train-id, dropout": (
        lambda workspace, params, progress: train_id.run(workspace, params, SEED, progress),
        f"runs/{SEED}/networks/classifier.safetensors", f"runs/{SEED}/train-id.csv",
        {"train_id__epochs": 2, "model__backbone": "wrn-10-1", "model__drop_rate": 0.3},
    ),
    "train-ood": (
        lambda workspace, params, progress: train_ood.run(workspace, params, OOD, SEED, progress),
        f"runs/{SEED}/{OOD}/networks/sal.safetensors", f"runs/{SEED}/{OOD}/train-sal.csv",
        {"train_ood__epochs": 4, "train_ood__candidate_id": True, "train_ood__augment": "flip-crop"},
    ),
    "woods": (
        lambda workspace, params, progress: train_ood.run(workspace, params, OOD, SEED, progress, method="woods"),
        f"runs/{SEED}/{OOD}/networks/woods.safetensors", f"runs/{SEED}/{OOD}/train-woods.csv",
        {"train_ood__epochs": 3, "train_rival__woods__tolerance": 1.0},  # so that there is nothing to say
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("epochs_before", [1.0, 1.5])
def test_an_interrupted_run_ends_with_the_bytes_of_an_undisturbed_one(
    workspace: Workspace, name: str, epochs_before: float
) -> None:
    run, network, curve, overrides = RUNS[name]
    params = params_with(workspace, **overrides)
    run(workspace, params, Silent())
    undisturbed = [(workspace.root / file).read_bytes() for file in (network, curve)]
    with pytest.raises(KeyboardInterrupt):
        run(workspace, params, Watched(stop_after=int(462 * epochs_before)))
    watched = Watched()
    run(workspace, params, watched)
    assert watched.notes == [
        f"goes on after epoch 1 of {max(value for key, value in overrides.items() if 'epochs' in key)}, "
        "where an earlier run was stopped"
    ]
    assert watched.skipped == 448  # whole batches of 32
    assert [(workspace.root / file).read_bytes() for file in (network, curve)] == undisturbed


def test_nothing_is_kept_of_a_run_that_came_to_its_end(workspace: Workspace) -> None:
    params = params_with(workspace, train_id__epochs=1)
    train_id.run(workspace, params, SEED)
    assert not list((workspace.root / ".salcli").rglob("*.pt"))


@pytest.mark.parametrize(
    "changed",
    [
        {"train_id__lr": 0.05},
        {"train_id__epochs": 5},
        {"model__backbone": "wrn-10-1"},
        {"numerics__deterministic": True},
    ],
    ids=str,
)
def test_a_changed_config_starts_anew_and_says_so(workspace: Workspace, changed: dict[str, Any]) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_id.run(workspace, params_with(workspace, train_id__epochs=4), SEED, Watched(stop_after=500))
    watched = Watched()
    train_id.run(workspace, params_with(workspace, **{"train_id__epochs": 1} | changed), SEED, watched)
    assert watched.notes == ["starts anew: params or inputs have changed since the earlier run that was stopped"]
    assert watched.skipped == 0


def test_a_changed_input_starts_anew(workspace: Workspace) -> None:
    from salcli.stages import prepare

    with pytest.raises(KeyboardInterrupt):
        train_id.run(workspace, params_with(workspace, train_id__epochs=3), SEED, Watched(stop_after=500))
    other = params_with(workspace, train_id__epochs=3, data__id_shares__train=0.3, data__id_shares__test=0.22)
    prepare.prepare_split(workspace, other.data, SEED)
    watched = Watched()
    train_id.run(workspace, params_with(workspace, train_id__epochs=3), SEED, watched)
    assert "inputs have changed" in watched.notes[0]


def test_a_damaged_state_starts_anew(workspace: Workspace) -> None:
    kept = workspace.root / layout.resume_state("train-id", SEED).name
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(b"PK\x03\x04 cut short")
    watched = Watched()
    train_id.run(workspace, params_with(workspace, train_id__epochs=1), SEED, watched)
    assert watched.notes == ["starts anew: what an earlier run kept cannot be read"]


def test_what_was_kept_cannot_run_code(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (tmp_path / "boom").touch, ()

    torch.save({"config": "x", "state": Bomb()}, tmp_path / "state.pt")
    watched = Watched()
    assert ResumePoint(tmp_path / "state.pt", {}, watched).load() is None
    assert not (tmp_path / "boom").exists()
    torch.load(tmp_path / "state.pt", weights_only=False)  # it would have gone off
    assert (tmp_path / "boom").exists()


@pytest.mark.slow
def test_kill_minus_nine_in_the_middle_of_training(workspace: Workspace) -> None:
    command = [sys.executable, "-m", "salcli", "train-id", "--seed", str(SEED)]
    names = [f"runs/{SEED}/networks/classifier.safetensors", f"runs/{SEED}/train-id.csv"]
    undisturbed = [(workspace.root / name).read_bytes() for name in names]
    for name in names:
        (workspace.root / name).unlink()
    process = subprocess.Popen(command, cwd=workspace.root, stdout=subprocess.DEVNULL)
    kept = workspace.root / layout.resume_state("train-id", SEED).name
    deadline = time.monotonic() + 120
    while not kept.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was over before it could be killed"
    assert not (workspace.root / names[0]).exists()
    done = subprocess.run(command, cwd=workspace.root, capture_output=True, text=True, check=True)
    assert "goes on after epoch" in done.stdout
    assert [(workspace.root / name).read_bytes() for name in names] == undisturbed
    assert not kept.exists()
