"""Unpacking archives from the web: whole or not at all, and never outside the folder they are meant for."""

from __future__ import annotations

import shutil
import tarfile
import zipfile
import zlib
from contextlib import contextmanager
from lzma import LZMAError
from typing import TYPE_CHECKING

from salcli.errors import DataError, StorageError
from salcli.fetching.archive_kinds import ArchiveKind, Gzip, Tar, Zip
from salcli.progress import Progress, Silent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TAR_NAMES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
# Images hardly shrink; lists of names shrink tenfold. What unpacks to more than this is made to fill a disk.
HIGHEST_RATIO = 200
SMALL = 50_000_000  # bytes that may come out of an archive of any size
BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, LZMAError, EOFError, RuntimeError, NotImplementedError)


def archive_kind(name: str) -> type[ArchiveKind] | None:
    """How a file of that name is unpacked, None for one that is no archive."""
    lower = name.lower()
    if lower.endswith(TAR_NAMES):
        return Tar
    if lower.endswith(".zip"):
        return Zip
    return Gzip if lower.endswith(".gz") else None


def unpack(archive: Path, folder: Path, progress: Progress | None = None) -> list[Path]:
    """Unpack into `folder` and return the files and folders at the top of what came out, which replace older ones.

    Everything is unpacked beside its place first, so that an archive that is cut short, climbs out of the
    folder or would fill the disk leaves nothing behind.
    """
    kind = archive_kind(archive.name)
    if kind is None:
        raise DataError(
            f"{archive} is no archive that salcli unpacks; it takes .tar, .tar.gz, .tar.bz2, .tar.xz, .zip, .gz"
        )
    with _explained(archive, folder), kind(archive) as content, _staging(folder, archive.name) as stage:
        limit = _limit(archive, folder)
        n_bytes = content.check(limit)
        with (progress or Silent()).task(f"unpack {archive.name}", n_bytes, "bytes") as task:
            content.extract(stage, task, limit)
        return [_move(entry, folder / entry.name, stage) for entry in sorted(stage.iterdir())]


@contextmanager
def _explained(archive: Path, folder: Path) -> Iterator[None]:
    """Say whether the archive is broken or the disk, whichever library stumbled over it."""
    try:
        yield
    except (*BROKEN, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # gzip and bz2 raise one without for what they cannot read
            raise StorageError(
                f"{archive} cannot be unpacked to {folder}: {error.strerror}; mend that and run the same command again"
            ) from None
        reason = str(error).partition("\n")[0].rstrip(":")
        raise DataError(
            f"{archive} is damaged or cut short ({reason}); remove it and run the same command again"
        ) from None


@contextmanager
def _staging(folder: Path, name: str) -> Iterator[Path]:
    stage = folder / f".{name}.unpacking"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(stage, ignore_errors=True)  # of a process that was killed
    stage.mkdir()
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _limit(archive: Path, folder: Path) -> int:
    """The most bytes that may come out."""
    sane = max(archive.stat().st_size * HIGHEST_RATIO, SMALL)
    return min(sane, shutil.disk_usage(folder).free)


def _move(entry: Path, target: Path, stage: Path) -> Path:
    if target.is_dir() and not target.is_symlink():
        target.rename(stage / f".old.{entry.name}")  # vanishes with the stage
    entry.replace(target)
    return target
