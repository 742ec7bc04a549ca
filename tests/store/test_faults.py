"""kill -9 or a full disk in the middle of any stage: old files survive, and the same command gives the same bytes."""

import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.cli import files, process, salcli
from helpers.quick import EXPERIMENT, OOD, REPOSITORY, SEED

from salcli.store import files as store_files
from salcli.store.formats import RepresentationWriter, ResumePoint
from salcli.store.layout import Artifact, Experiment, Workspace, prepared_set

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
    f"prepare wild {OF_WILD}": EXPERIMENT.wild,
    f"train-id {OF_SEED}": EXPERIMENT.classifier,
    f"extract-grads wild {OF_WILD}": EXPERIMENT.wild_representation,
    f"filter {OF_WILD}": EXPERIMENT.candidates,
    f"train-ood {OF_WILD}": EXPERIMENT.network("sal"),
    f"evaluate own {OF_WILD}": EXPERIMENT.evaluation("metrics.json"),
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
    assert left.pop(str(path.with_name(f".{path.name}.partial"))) == undisturbed[str(path)]
    assert left == {**undisturbed, str(path): OLD}
    assert repeated(command, workspace.root) == undisturbed


@pytest.mark.parametrize(
    ("command", "owner", "name"),
    [
        (f"train-id {OF_SEED}", ResumePoint, "save"),
        (f"train-ood {OF_WILD}", ResumePoint, "save"),
        (f"extract-grads wild {OF_WILD}", RepresentationWriter, "append"),
    ],
    ids=["train-id", "train-ood", "extract-grads"],
)
def test_killed_after_an_epoch_or_a_batch(
    workspace: Workspace, command: str, owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training resumes from the last completed epoch, to the same bytes."""
    monkeypatch.chdir(workspace.root)
    undisturbed, method = files(workspace.root), getattr(owner, name)

    def trap(self: object, *arguments: object) -> None:
        method(self, *arguments)
        kill()

    assert killed(lambda: setattr(owner, name, trap), command)
    left = {path: content for path, content in files(workspace.root).items() if not path.endswith(".partial")}
    assert left == undisturbed
    assert bool(list(workspace.root.rglob("*.pt"))) == (owner is ResumePoint)
    result = salcli(*command.split())
    assert ("epoch 1 of" in result.output) == (owner is ResumePoint)
    assert files(workspace.root) == undisturbed
    assert not list(workspace.root.rglob("*.pt"))


# --- a full disk

# free KiB, command, the file that does not fit
FULL = [
    (64, "prepare id-set", prepared_set("digits-0-7").path),
    (0, f"prepare wild {OF_WILD}", EXPERIMENT.wild.path),
    (200, f"train-id {OF_SEED}", Experiment(SEED).resume_state("train-id").path),
    (560, f"train-id --epochs 1 {OF_SEED}", f"scratch/{EXPERIMENT.classifier.path}"),
    (16, f"extract-grads wild {OF_WILD}", EXPERIMENT.wild_representation.path),
    (8, f"filter {OF_WILD}", EXPERIMENT.candidates.path),
    (8, f"evaluate own {OF_WILD}", EXPERIMENT.evaluation("scores.h5").path),
    (64, f"detector {OF_WILD}", EXPERIMENT.detector.path),
]
# In a process with mounts of its own. What does not change is not copied: old files stay where they are.
ON_A_SMALL_DISK = """
import json, os, shutil, subprocess, sys
from pathlib import Path
from helpers.cli import files, salcli

source, disk, size, cases = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(disk)], check=True)
shutil.copytree(source, disk, dirs_exist_ok=True)
os.chdir(disk)
seen = []
for free, command, _ in cases:
    Path("fill").write_bytes(bytes(shutil.disk_usage(".").free - 1024 * free))
    before = files(disk)
    result = salcli(*command.split())
    seen.append((result.exit_code, result.stderr, files(disk) == before))
    os.remove("fill")
print(json.dumps(seen))
"""


def test_a_full_disk_is_reported_and_no_partial_file_is_left(workspace: Workspace, tmp_path: Path) -> None:
    """A real disk. The old files are as they were."""
    if not shutil.which("unshare") or process("unshare", "-rm", "mount", "-t", "tmpfs", "-", "/tmp").returncode:
        pytest.skip("needs a disk of its own to fill")
    disk = tmp_path / "disk"
    disk.mkdir()
    size = sum(path.stat().st_size // 1024 + 8 for path in workspace.root.rglob("*")) + 1500
    arguments = [str(workspace.root), str(disk), str(size), json.dumps(FULL)]
    done = process(
        "unshare", "-rm", sys.executable, "-c", ON_A_SMALL_DISK, *arguments, PYTHONPATH=str(REPOSITORY / "tests")
    )
    assert done.returncode == 0, done.stderr
    for (_, command, name), seen in zip(FULL, json.loads(done.stdout), strict=True):
        message = f"error: {name} cannot be written: No space left on device; fix that and run the same command again\n"
        assert seen == [2, message, True], command
