"""Whether the files of a project still are what was written: HDF5 and safetensors by their seal, others by dvc.lock."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from salcli.errors import BadArtifactError, MissingArtifactError, check_regular, printable
from salcli.params.reading import read_yaml
from salcli.progress import Progress, Silent
from salcli.store.files import Found, check_seal
from salcli.store.layout import RUNS, SCRATCH

FOLDERS = ("data/prepared", "data/unseen", "data/splits", RUNS, SCRATCH)
SEALED = {".h5", ".safetensors"}


@dataclass(frozen=True)
class Verified:
    n_files: int
    n_unknown: int  # files without a checksum
    problems: list[str]


def verify(root: Path, progress: Progress | None = None) -> Verified:
    """Read every file that stages wrote, and compare it with its checksum."""
    lock = root / "dvc.lock"
    stages = read_yaml(lock).get("stages", {}).values() if lock.exists() else ()
    expected = {str(out["path"]): str(out.get("md5", "")) for stage in stages for out in stage.get("outs", ())}
    files = sorted(path for folder in FOLDERS for path in _files_below(root / folder) if not path.name.startswith("."))
    if not files and not expected:
        raise MissingArtifactError(
            f"{printable(root)} has no files of stages; name a project's folder, or run dvc repro there"
        )
    problems, n_unknown = [], 0
    with (progress or Silent()).task("verify", sum(path.stat().st_size for path in files), "bytes") as task:
        for path in files:
            name = path.relative_to(root).as_posix()
            if path.suffix in SEALED:
                try:
                    check_seal(Found(path))
                except BadArtifactError as error:
                    problems.append(str(error))
            elif name not in expected:
                n_unknown += 1
            elif hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() != expected[name]:
                problems.append(f"{name} is not what dvc.lock says: damaged, or made again without dvc repro")
            task.advance(path.stat().st_size)
    missing = [name for name in expected if not (root / name).exists()]
    problems += [f"{name} is missing; get it with dvc pull, or make it with dvc repro" for name in missing]
    return Verified(len(files), n_unknown, problems)


def _files_below(folder: Path) -> Iterator[Path]:
    """A folder that may not be read and a file that is none are errors."""

    def fail(error: OSError) -> None:
        raise error

    for parent, _, names in os.walk(folder, onerror=fail) if folder.exists() else ():
        for path in (Path(parent, name) for name in names):
            check_regular(path)
            if path.exists():  # no broken link
                yield path
