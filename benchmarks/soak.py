"""Kill, flip, and run twice at once, for as long as asked, and count what was lost. `make soak` runs it for 20 minutes.

A small project is built once. Then, again and again at random:

- a stage is killed (-9) after a random time, or just before it opens, renames or removes a file, and run again: all
  files must be as they were to the byte;
- one bit of a stored file is flipped, size and time kept: reading it must fail;
- two processes run the same stage: one may be refused, the files must be as they were;
- a stage meets a full disk (a small tmpfs where one can be mounted, else a limit on the size of files): it must say so,
  and run again when there is room;
- `dvc repro` is killed with its children alive, and run again while they still run.

Exit code 1 if anything was lost, differed, or was not noticed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from salcli.cli.app import app
from salcli.errors import SalError
from salcli.store.files import Found, read_arrays, read_header, read_tensors

SMALL = {
    "seeds": "[0]",
    "data.ood": "[digits-8-9]",
    "rivals": "[woods]",
    "train_id.epochs": "6",
    "train_ood.epochs": "4",
}
WILD = "--ood digits-8-9 --pi 0.1 --seed 0"
STAGES = (
    "prepare id-set",
    "prepare split --seed 0",
    f"prepare wild {WILD}",
    "train-id --seed 0",
    "extract-grads id --seed 0",
    f"extract-grads wild {WILD}",
    f"filter {WILD}",
    f"train-ood --method sal {WILD}",
    f"train-ood --method woods {WILD}",
    f"evaluate own {WILD}",
    f"detector {WILD}",
)
# a frozen backbone, so that `prepare` embeds; it writes to scratch/
EMBED = (
    "prepare id-set --set model.frozen=true --set model.weights=runs/0/networks/classifier.safetensors "
    "--set model.mean=[0.5] --set model.std=[0.3]"
)
FILE_OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.truncate"}  # as Python's audit events are called
REPRO = (sys.executable, "-m", "dvc", "repro")
SEALED = (".h5", ".safetensors")


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


class Soak:
    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root, self.rng, self.seen = root, rng, Counter[str]()
        self.truth: dict[str, bytes] = {}
        self.seconds: dict[str, float] = {}
        self.n_operations: dict[str, int] = {}

    def build(self) -> None:
        values = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
        done = CliRunner().invoke(app, ["init", str(self.root), *values])
        assert done.exit_code == 0, done.output
        os.chdir(self.root)
        built = subprocess.run(REPRO, capture_output=True, text=True, check=False)
        assert built.returncode == 0, built.stdout + built.stderr
        assert code_of(started(EMBED)) == 0, EMBED
        self.truth = contents(self.root)
        with tempfile.TemporaryDirectory() as folder:
            counted = Path(folder) / "n"
            for stage in (*STAGES, EMBED):
                start = time.perf_counter()
                assert code_of(started(stage, count_to=counted)) == 0, stage
                self.seconds[stage] = time.perf_counter() - start
                self.n_operations[stage] = int(counted.read_text())
        self.compare("build")

    def compare(self, kind: str) -> None:
        """Count what is not as it was, and put it right."""
        now = contents(self.root)
        wrong = [name for name in now.keys() | self.truth.keys() if now.get(name) != self.truth.get(name)]
        if wrong:
            self.seen[f"{kind}: differ"] += 1
            print(f"{kind}: {', '.join(sorted(wrong)[:3])}", file=sys.stderr)
            for name in wrong:
                (self.root / name).unlink(missing_ok=True)
                if name in self.truth:
                    (self.root / name).write_bytes(self.truth[name])

    def kill_a_stage(self) -> None:
        stage = self.rng.choice((*STAGES, EMBED))
        child = started(stage)
        time.sleep(self.rng.uniform(0, self.seconds[stage]))
        os.kill(child, signal.SIGKILL)
        if code_of(child) == -signal.SIGKILL:
            self.seen["kills"] += 1
        self.run_again(stage, "kills")

    def kill_at_an_operation(self) -> None:
        stage = self.rng.choice((*STAGES, EMBED))
        if code_of(started(stage, die_at=self.rng.randint(1, self.n_operations[stage]))) == -signal.SIGKILL:
            self.seen["kills at a file operation"] += 1
        self.run_again(stage, "kills at a file operation")

    def run_again(self, stage: str, kind: str) -> None:
        if code_of(started(stage)) != 0:
            self.seen[f"{kind}: lost"] += 1
            print(f"does not run again: {stage}", file=sys.stderr)
        self.compare(kind)

    def fill_the_disk(self) -> None:
        stage = self.rng.choice((*STAGES, EMBED))
        code = self.on_a_small_disk(stage)
        kind = "full disks"
        if code is None:
            code, kind = code_of(started(stage, largest_file=2 ** self.rng.randint(6, 16))), "full disks (by a limit)"
        self.seen[kind] += 1
        self.seen[f"{kind}: refused"] += code == 2
        if code not in (0, 2):
            self.seen[f"{kind}: lost"] += 1
            print(f"code {code} on a full disk: {stage}", file=sys.stderr)
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
                if code_of(started(stage)) != 0 or contents(root) != self.truth:
                    self.seen["full disks: differ"] += 1
                    print(f"differs after a full disk: {stage}", file=sys.stderr)
                return code
            finally:
                os.chdir(self.root)
                subprocess.run(["umount", place], check=True)

    def flip_a_bit(self) -> None:
        path = self.root / self.rng.choice([name for name in self.truth if name.endswith(SEALED)])
        facts, content = path.stat(), bytearray(path.read_bytes())
        content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
        path.write_bytes(content)
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        self.seen["flips"] += 1
        try:
            found = Found(path)
            _ = read_tensors(found) if path.suffix == ".safetensors" else read_arrays(found, read_header(found).kind)
        except SalError:
            pass
        else:
            self.seen["flips: not noticed"] += 1
        path.write_bytes(self.truth[str(path.relative_to(self.root))])

    def run_twice_at_once(self) -> None:
        stage = self.rng.choice(STAGES)
        first = started(stage)
        time.sleep(self.rng.uniform(0, self.seconds[stage] / 2))
        codes = [code_of(child) for child in (first, started(stage))]
        self.seen["pairs"] += 1
        self.seen["pairs: second refused"] += codes.count(2)
        if 0 not in codes or set(codes) - {0, 2}:
            self.seen["pairs: lost"] += 1
        self.compare("pairs")

    def kill_dvc(self) -> None:
        """Its children go on for a while; the next run says that they run, and a later one ends the work."""
        for name in self.truth:
            if name.startswith("runs/0/digits-8-9"):
                (self.root / name).unlink(missing_ok=True)
        running = subprocess.Popen(REPRO, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(self.rng.uniform(2, 12))
        running.kill()
        running.wait()
        self.seen["kills of dvc repro"] += 1
        for _ in range(20):
            if subprocess.run(REPRO, capture_output=True, check=False).returncode == 0:
                break
            time.sleep(2)  # a child of the killed one still runs
        else:
            self.seen["kills of dvc repro: lost"] += 1
        self.compare("kills of dvc repro")


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
            soak.kill_at_an_operation()
            soak.run_twice_at_once()
            for _ in range(5):
                soak.flip_a_bit()
            if n % 5 == 0:
                soak.fill_the_disk()
            if n % 30 == 0:
                soak.kill_dvc()
        os.chdir("/")
    table = Table("what", "times")
    for what, times in sorted(soak.seen.items()):
        table.add_row(what, str(times))
    Console().print(table)
    if out:
        out.write_text(json.dumps(soak.seen, indent=2) + "\n")
    bad = [what for what in soak.seen if what.endswith(("differ", "lost", "not noticed"))]
    sys.exit(int(bool(bad)))


if __name__ == "__main__":
    main()
