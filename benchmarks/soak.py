"""Kill, flip, and run twice at once, for as long as asked, and count what was lost. `make soak` runs it for 20 minutes.

A small project is built once. Then, again and again at random:

- a stage is killed (-9) after a random time, or just before it opens, renames or removes a file, up to three times in a
  row, and run again: all files must be as they were to the byte;
- two processes run the same stage, and sometimes one of them is killed: one may be refused, the files must be as they
  were;
- one bit of a stored file is flipped, size and time kept: reading it, or `salcli verify`, must fail;
- a stage meets a full disk (a small tmpfs where one can be mounted, else a limit on the size of files): it must say so,
  and run again when there is room;
- `dvc repro` is killed while its child lives on, and run again beside that.

Exit code 1 if anything was lost (does not run again), differed, or was not noticed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import sklearn.datasets  # noqa: F401
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

# what stages import: they run in copies of this process, which then start in no time
import salcli.detector.stage
import salcli.pipeline.embed
import salcli.pipeline.evaluate
import salcli.pipeline.extract
import salcli.pipeline.filter
import salcli.pipeline.train_id
import salcli.pipeline.train_ood
import salcli.report.stage_tables
import salcli.report.summary  # noqa: F401
from salcli.cli.app import app
from salcli.errors import SalError
from salcli.params.reading import read_yaml
from salcli.project.verify import verify
from salcli.store.files import Found, read_arrays, read_header, read_tensors

SMALL = {
    "seeds": "[0]",
    "data.ood": "[digits-8-9]",
    "variants": "[sal, sal-auto]",  # with a random and with a fitted OOD head
    "rivals": "[woods]",
    "train_id.epochs": "4",
    "train_ood.epochs": "3",
    "evaluate.methods": "[sal, sal-auto, woods, msp, knn, mahalanobis]",
}
WILD = "--ood digits-8-9 --pi 0.1 --seed 0"
STAGES = (
    "prepare id-set",
    "prepare split --seed 0",
    f"prepare wild {WILD}",
    "train-id --seed 0",
    "extract-grads id --seed 0",
    f"extract-grads wild {WILD}",
    f"filter --variant sal {WILD}",
    f"filter --variant sal-auto {WILD}",
    f"train-ood --method sal {WILD}",
    f"train-ood --method sal-auto {WILD}",
    f"train-ood --method woods {WILD}",
    f"evaluate own {WILD}",
    f"detector {WILD}",
)
# a frozen backbone, so that `prepare` embeds; it writes to scratch/
EMBED = (
    "prepare id-set --set model.frozen=true --set model.weights=runs/0/networks/classifier.safetensors "
    "--set model.mean=[0.5] --set model.std=[0.3]"
)
COMMANDS = (*STAGES, EMBED)
FILE_OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.truncate"}  # as Python's audit events are called
BUILD = ("fingerprints", "prepare ood-set --ood digits-8-9", *STAGES, "summary")
DVC = (sys.executable, "-m", "dvc")
BY_DVC_ALONE = {"fingerprints", "summary"}  # stages that start no long work
SEALED = (".h5", ".safetensors")
KILLS, KILLS_AT_OPERATIONS, KILLS_OF_DVC = "kills at a random time", "kills at a file operation", "kills of dvc repro"
COLUMNS = ("times", REFUSED := "refused or noticed", "lost", "differ")
PAIRS, DISKS, LIMITS, FLIPS = "two at once", "full disks", "full disks (by a limit)", "flipped bits"


def contents(root: Path) -> dict[str, bytes]:
    """What the stages have written; partial files count, because none may be left."""
    paths = [
        path for folder in ("data", "runs", "scratch/data") for path in (root / folder).rglob("*") if path.is_file()
    ]
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(paths)}


class Operations:
    """Counts what a process does to the project's files; kills it just before one of them."""

    def __init__(self, root: Path, die_at: int | None) -> None:
        self.root, self.die_at, self.n = str(root), die_at, 0

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if event not in FILE_OPERATIONS or not arguments or isinstance(arguments[0], int):
            return
        changes = event != "open" or bool(int(str(arguments[2] or 0)) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if changes and os.path.abspath(os.fsdecode(arguments[0])).startswith(self.root):  # type: ignore[arg-type]  # noqa: PTH100
            self.n += 1
            if self.n == self.die_at:
                os.kill(os.getpid(), signal.SIGKILL)


def started(
    command: str, *, die_at: int | None = None, count_to: Path | None = None, largest_file: int | None = None
) -> int:
    """A stage in a copy of this process, which has torch loaded already. Its process number."""
    child = os.fork()
    if child == 0:
        operations = Operations(Path.cwd(), die_at)
        if die_at or count_to:
            sys.addaudithook(operations)
        if largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        code = 99
        try:
            code = CliRunner().invoke(app, command.split(), prog_name="salcli").exit_code
            if count_to:
                count_to.write_text(str(operations.n))
        finally:
            os._exit(code)
    return child


def code_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def first_child(parent: subprocess.Popen[bytes]) -> int | None:
    """The first process that another one starts; None if that ends before."""
    while parent.poll() is None:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        if children:
            return int(children[0])
        time.sleep(0.05)
    return None


class Soak:
    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root, self.rng = root, rng
        self.seen: dict[str, Counter[str]] = {}  # what happened by its kind, in columns of the table
        self.stages: dict[str, set[str]] = {}
        self.truth: dict[str, bytes] = {}
        self.seconds: dict[str, float] = {}
        self.n_operations: dict[str, int] = {}

    def build(self) -> None:
        values = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
        done = CliRunner().invoke(app, ["init", str(self.root), *values])
        assert done.exit_code == 0, done.output
        os.chdir(self.root)
        for stage in (*BUILD, EMBED):
            assert code_of(started(stage)) == 0, stage
        subprocess.run((*DVC, "commit", "--force", "--quiet"), check=True)
        self.truth = contents(self.root)
        self.dvc_stages = sorted(read_yaml(self.root / "dvc.lock")["stages"].keys() - BY_DVC_ALONE)
        with tempfile.TemporaryDirectory() as folder:
            counted = Path(folder) / "n"
            for stage in COMMANDS:
                start = time.perf_counter()
                assert code_of(started(stage, count_to=counted)) == 0, stage
                self.seconds[stage] = time.perf_counter() - start
                self.n_operations[stage] = int(counted.read_text())
        self.compare("build", "everything")

    def happened(self, kind: str, stage: str, *, refused: bool = False) -> None:
        self.count(kind, "times")
        self.count(kind, REFUSED, refused)
        self.stages.setdefault(kind, set()).add(stage)

    def count(self, kind: str, column: str, n: int = 1) -> None:
        self.seen.setdefault(kind, Counter())[column] += n

    def check(self, is_well: bool, kind: str, stage: str, what: str) -> None:
        if not is_well:
            self.count(kind, "lost")
            print(f"{kind}: {stage}: {what}", file=sys.stderr)

    def compare(self, kind: str, stage: str) -> None:
        """Count what is not as it was, and put it right."""
        now = contents(self.root)
        wrong = [name for name in now.keys() | self.truth.keys() if now.get(name) != self.truth.get(name)]
        if wrong:
            self.count(kind, "differ")
            print(f"{kind}: {stage}: {', '.join(sorted(wrong)[:3])} differ", file=sys.stderr)
            for name in wrong:
                (self.root / name).unlink(missing_ok=True)
                if name in self.truth:
                    (self.root / name).write_bytes(self.truth[name])

    def run_again(self, stage: str, kind: str) -> None:
        self.check(code_of(started(stage)) == 0, kind, stage, "does not run again")
        self.compare(kind, stage)

    def kill_a_stage(self) -> None:
        """Up to three times: the later kills meet what the earlier ones left."""
        stage = self.rng.choice(COMMANDS)
        for _ in range(self.rng.randint(1, 3)):
            kind = self.rng.choice((KILLS, KILLS_AT_OPERATIONS))
            if kind == KILLS:
                child = started(stage)
                time.sleep(self.rng.uniform(0, self.seconds[stage]))
                os.kill(child, signal.SIGKILL)
            else:
                child = started(stage, die_at=self.rng.randint(1, self.n_operations[stage]))
            if code_of(child) == -signal.SIGKILL:  # else it was faster
                self.happened(kind, stage)
        self.run_again(stage, kind)

    def run_twice_at_once(self) -> None:
        stage, victim = self.rng.choice(COMMANDS), self.rng.choice((None, 0, 1))
        pair = [started(stage)]
        time.sleep(self.rng.uniform(0, self.seconds[stage] / 2))
        pair.append(started(stage))
        if victim is not None:
            time.sleep(self.rng.uniform(0, self.seconds[stage]))
            os.kill(pair[victim], signal.SIGKILL)
        codes = [code_of(child) for child in pair]
        self.happened(PAIRS, stage, refused=2 in codes)
        left = [code for code in codes if code != -signal.SIGKILL]
        self.check(0 in left or len(left) < 2, PAIRS, stage, f"ended with {codes}")
        if victim is None and 0 in left:
            self.compare(PAIRS, stage)
        else:  # what a killed process has left is removed by the next run
            self.run_again(stage, PAIRS)

    def fill_the_disk(self) -> None:
        stage, kind = self.rng.choice(COMMANDS), DISKS
        code = self.on_a_small_disk(stage)
        if code is None:
            kind, code = LIMITS, code_of(started(stage, largest_file=2 ** self.rng.randint(6, 16)))
        self.happened(kind, stage, refused=code == 2)
        self.check(code in (0, 2), kind, stage, f"ended with {code}")
        self.run_again(stage, kind)

    def on_a_small_disk(self, stage: str) -> int | None:
        """The exit code of the stage in a copy of the project on a disk that is almost full; None: no right to mount.

        With room again, it must write the same bytes.
        """
        with tempfile.TemporaryDirectory() as place:
            if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], capture_output=True, check=False).returncode:
                return None
            try:
                root = Path(place) / "project"
                shutil.copytree(self.root, root, symlinks=True)
                n_used = shutil.disk_usage(place).used + 2 ** self.rng.randint(12, 18)
                subprocess.run(["mount", "-o", f"remount,size={n_used}", place], check=True)
                os.chdir(root)
                code = code_of(started(stage))
                subprocess.run(["mount", "-o", "remount,size=1g", place], check=True)
                again = code_of(started(stage))
                self.check(again == 0 and contents(root) == self.truth, DISKS, stage, "differs with room again")
                return code
            finally:
                os.chdir(self.root)
                subprocess.run(["umount", place], check=True)

    def flip_a_bit(self) -> None:
        tracked = [name for name in self.truth if name.endswith(SEALED) or not name.startswith("scratch")]
        name = self.rng.choice(tracked)
        path = self.root / name
        facts, content = path.stat(), bytearray(path.read_bytes())
        content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
        path.write_bytes(content)
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        self.happened(FLIPS, path.name, refused=(is_noticed := self.notices(path)))
        self.check(is_noticed, FLIPS, name, "was not noticed")
        path.write_bytes(self.truth[name])

    def notices(self, path: Path) -> bool:
        if path.suffix not in SEALED:
            return bool(verify(self.root).problems)
        try:
            found = Found(path)
            _ = read_tensors(found) if path.suffix == ".safetensors" else read_arrays(found, read_header(found).kind)
        except SalError:
            return True
        return False

    def kill_dvc(self) -> None:
        """Its child goes on: the next run may be refused because of that, and a later one ends the work."""
        stage = self.rng.choice(self.dvc_stages)
        command = (*DVC, "repro", "--single-item", "--force", stage)
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        child = first_child(running)
        if child is None:
            return
        orphan = os.pidfd_open(child)
        time.sleep(self.rng.uniform(0, 10))
        running.kill()
        running.wait()
        n_tries, is_done = 0, False
        while not is_done and n_tries < 30:
            is_done, n_tries = subprocess.run(command, capture_output=True, check=False).returncode == 0, n_tries + 1
        self.happened(KILLS_OF_DVC, stage, refused=n_tries > 1)
        is_gone = bool(select.select([orphan], [], [], 600)[0])
        os.close(orphan)
        self.check(is_done and is_gone, KILLS_OF_DVC, stage, "does not run again")
        self.compare(KILLS_OF_DVC, stage)

    def table(self) -> Table:
        table = Table("what", "stages or files", *COLUMNS)
        for kind, seen in sorted(self.seen.items()):
            table.add_row(kind, str(len(self.stages.get(kind, ()))), *(str(seen[column]) for column in COLUMNS))
        return table


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--minutes", type=float, default=20)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, help="also write the counts as JSON")
    given = options.parse_args()
    out = given.out.absolute() if given.out else None
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), random.Random(given.seed))
        soak.build()
        end, n = time.monotonic() + 60 * given.minutes, 0
        while time.monotonic() < end:
            n += 1
            soak.kill_a_stage()
            soak.run_twice_at_once()
            for _ in range(5):
                soak.flip_a_bit()
            if n % 5 == 0:
                soak.fill_the_disk()
            if n % 15 == 0:
                soak.kill_dvc()
        os.chdir("/")
    Console().print(soak.table())
    if out:
        out.write_text(json.dumps(soak.seen, indent=2) + "\n")
    sys.exit(int(any(seen["lost"] or seen["differ"] for seen in soak.seen.values())))


if __name__ == "__main__":
    main()
