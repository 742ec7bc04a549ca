"""Getting data sets: download, verify, unpack; and saying which ones are here."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from salcli.data.stand_in import stand_ins
from salcli.errors import DataError, FetchError, SalError
from salcli.fetching.archives import archive_kind, unpack
from salcli.fetching.download import download, part_of
from salcli.fetching.registry import data_source
from salcli.fetching.transfer import Opener, open_url
from salcli.progress import Progress, Silent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from salcli.fetching.data_source import DataSource, RemoteFile

Status = Literal["here", "own", "partial", "missing"]  # own: something stands in for it


@dataclass(frozen=True)
class Fetched:
    """What was done for a data set."""

    name: str
    outcome: Literal["fetched", "here already", "embedded"]
    paths: tuple[Path, ...] = ()


def status(name: str, root: Path) -> Status:
    """Whether a data set, or what stands in for it, is below the data root. Files are not read, only looked for."""
    source = data_source(name)
    if stand_in(name, root):
        return "own"
    if source.is_embedded:
        return "here"
    found = [_is_there(root / path) for path in source.provides]
    if all(found):
        return "here"
    targets = [root / source.folder / file.name for file in source.files]
    begun = any(target.exists() or part_of(target).exists() for target in targets)
    return "partial" if any(found) or begun else "missing"


def stand_in(name: str, root: Path) -> Path | None:
    """NAME/ with something in it, or NAME.npz: a set of one's own under a known name."""
    for path in stand_ins(name, root):
        if _is_there(path) and path.is_dir() == (path.suffix != ".npz"):
            return path
    return None


def fetch(
    names: Iterable[str], root: Path, progress: Progress | None = None, opener: Opener = open_url
) -> Iterator[Fetched]:
    """Get one data set after the other. One that cannot be had does not stop the rest: it is raised at the end."""
    sources = [data_source(name) for name in dict.fromkeys(names)]  # every wrong name is known before the first byte
    failures = []
    for source in sources:
        try:
            yield _fetch_set(source, root, progress or Silent(), opener)
        except SalError as error:
            failures.append(f"{source.name}: {error}")
    if failures:
        raise FetchError("\n".join(failures))


def _fetch_set(source: DataSource, root: Path, progress: Progress, opener: Opener) -> Fetched:
    if source.is_embedded:
        return Fetched(source.name, "embedded")
    if status(source.name, root) in ("here", "own"):
        replacement = stand_in(source.name, root)
        return Fetched(source.name, "here already", (replacement,) if replacement else _tops(source, root))
    folder = root / source.folder
    again = f"salcli data fetch {source.name} --root {shlex.quote(str(root))}"
    for file in source.files:
        if not _is_unpacked(file, source, root):
            with progress.task(file.name, _to_fetch(file, folder), "bytes") as task:
                download(file, folder, task, again=again, opener=opener)
            if archive_kind(file.name):
                unpack(folder / file.name, folder, progress)
    lacking = [path for path in source.provides if not _is_there(root / path)]
    if lacking:
        raise DataError(f"the files are fetched and unpacked, but {root / lacking[0]} is not among them")
    return Fetched(source.name, "fetched", _tops(source, root))


def _is_unpacked(file: RemoteFile, source: DataSource, root: Path) -> bool:
    """For files that become one file each: those that are there need not be fetched again."""
    unpacked = f"{source.folder}/{file.name}".removeprefix("/").removesuffix(".gz")
    return unpacked in source.provides and _is_there(root / unpacked)


def _to_fetch(file: RemoteFile, folder: Path) -> int:
    """Bytes that are missing; 0 where nobody knows."""
    part = part_of(folder / file.name)
    n_here = part.stat().st_size if part.exists() else 0
    return max((file.n_bytes or 0) - n_here, 0)


def _is_there(path: Path) -> bool:
    """A file with something in it, or a folder with something in it."""
    if path.is_dir():
        return next(path.iterdir(), None) is not None
    return path.is_file() and path.stat().st_size > 0


def _tops(source: DataSource, root: Path) -> tuple[Path, ...]:
    """What to show of a set: its folder, not each file in it."""
    folders = [path.rpartition("/")[0] or path for path in source.provides]
    return tuple(root / folder for folder in dict.fromkeys(folders))
