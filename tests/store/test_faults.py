"""kill -9 or a full disk in the middle of any stage: old files survive, and the same command gives the same bytes."""

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import files, salcli
from helpers.quick import EXPERIMENT, OOD, SEED

from salcli.store import files as store_files
from salcli.store.formats import ResumePoint
from salcli.store.layout import Artifact, Workspace

pytestmark = pytest.mark.slow
OF_SEED = f"--seed {SEED}"
OF_WILD = f"--ood {OOD} --pi {EXPERIMENT.pi} {OF_SEED}"
OLD = b"from an earlier run, and longer than nothing"


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(prepare: Callable[[], None], command: str) -> bool:
    """Run a command in a copy of this process, after `prepare` has laid a trap in it. Whether it was killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads do not live on in the copy, nor need they
        child = os.fork()
    if child == 0:
        try:
            prepare()
            salcli(*command.split())
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def repeated(command: str, root: Path) -> dict[str, bytes]:
    result = salcli(*command.split())
    assert result.exit_code == 0, result.output
    return files(root)


WRITES: dict[str, Artifact] = {
    f"train-id {OF_SEED}": EXPERIMENT.classifier,
    f"filter {OF_WILD} --variant sal": EXPERIMENT.candidates,
    f"detector {OF_WILD}": EXPERIMENT.detector,
}


@pytest.mark.parametrize("command", WRITES)
def test_killed_while_it_writes(workspace: Workspace, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the whole file is written, but does not have its name yet."""
    monkeypatch.chdir(workspace.root)
    undisturbed, path, whole = files(workspace.root), Path(WRITES[command].path), store_files.atomic_path
    path.write_bytes(OLD)

    @contextmanager
    def trap(target: Path) -> Iterator[Path]:
        with whole(target) as partial:
            yield partial
            if target.name == path.name:
                kill()

    assert killed(lambda: setattr(store_files, "atomic_path", trap), command)
    left = files(workspace.root)
    (partial,) = [name for name in left if name.endswith(".partial")]
    assert left.pop(partial) == undisturbed[str(path)]
    assert left == {**undisturbed, str(path): OLD}
    assert repeated(command, workspace.root) == undisturbed


def test_killed_after_an_epoch(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """It resumes from there, to the same bytes; tests/pipeline/test_resume.py interrupts every training."""
    monkeypatch.chdir(workspace.root)
    undisturbed, save = files(workspace.root), ResumePoint.save

    def trap(self: ResumePoint, state: dict[str, Any]) -> None:
        save(self, state)
        kill()

    assert killed(lambda: setattr(ResumePoint, "save", trap), f"train-id {OF_SEED}")
    assert files(workspace.root) == undisturbed
    assert list(workspace.root.rglob("*.pt"))
    assert "epoch 1 of" in salcli("train-id", *OF_SEED.split()).output
    assert files(workspace.root) == undisturbed
    assert not list(workspace.root.rglob("*.pt"))


# --- a full disk; tests/store/test_files.py has every kind of file


def test_a_file_that_does_not_fit_is_reported_and_the_old_files_are_as_they_were(
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    small_files_only: Callable[[int], AbstractContextManager[None]],
) -> None:
    monkeypatch.chdir(workspace.root)
    before = files(workspace.root)
    with small_files_only(1024):
        result = salcli("filter", "--variant", "sal", *OF_WILD.split())
    path = EXPERIMENT.candidates.path
    message = f"error: {path} cannot be written: File too large; fix that and run the same command again\n"
    assert (result.exit_code, result.stderr) == (2, message)
    assert files(workspace.root) == before
