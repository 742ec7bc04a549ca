"""Unpack archives from the web: completely or not at all, and never outside the target folder."""

import gzip
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from lzma import LZMAError
from pathlib import Path
from typing import IO

from salcli.errors import DataError, StorageError
from salcli.progress import Progress, Task

TAR_NAMES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
CHUNK = 1 << 20
# Images hardly shrink and lists of names shrink tenfold; an archive beyond this ratio is made to fill a disk.
HIGHEST_RATIO = 200
MOST_MEMBERS = 1_000_000  # each takes memory and an inode, however small it is
SMALL = 50_000_000  # bytes that may come out of an archive of any size


def is_archive(name: str) -> bool:
    """Whether `unpack` takes a file of that name: a tar archive, compressed or not, or a single file with .gz."""
    return name.lower().endswith((*TAR_NAMES, ".gz"))


def unpack(archive: Path, folder: Path, progress: Progress) -> list[Path]:
    """Unpack into `folder` and return the top-level files and folders, which replace older ones of the same name.

    Everything is unpacked into a temporary folder first, so that an archive that is truncated, climbs out of the folder
    or would fill the disk leaves nothing behind.
    """
    with _explained(archive, folder), _staging(folder, archive.name) as stage:
        unpack_to = _unpack_tar if archive.name.lower().endswith(TAR_NAMES) else _unpack_gzip
        with progress.task(f"unpack {archive.name}", archive.stat().st_size, "bytes") as task:
            unpack_to(archive, stage, task)
        return [_move(entry, folder / entry.name, stage) for entry in sorted(stage.iterdir())]


@contextmanager
def _explained(archive: Path, folder: Path) -> Iterator[None]:
    """Say whether the archive or the disk is at fault, whichever library raised."""
    try:
        yield
    except tarfile.FilterError as error:
        raise _unsafe(archive, str(error)) from None
    except (tarfile.TarError, zlib.error, LZMAError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # gzip and bz2 raise one without errno for broken data
            raise StorageError(
                f"{archive} cannot be unpacked to {folder}: {error.strerror}; fix that and run the same command again"
            ) from None
        reason = str(error).partition("\n")[0].rstrip(":")
        raise DataError(
            f"{archive} is damaged or truncated ({reason}); remove it and run the same command again"
        ) from None


@contextmanager
def _staging(folder: Path, name: str) -> Iterator[Path]:
    stage = folder / f".{name}.unpacking"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(stage, ignore_errors=True)  # left by a killed process
    stage.mkdir()
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _move(entry: Path, target: Path, stage: Path) -> Path:
    if target.is_dir() and not target.is_symlink():
        target.rename(stage / f".old.{entry.name}")  # deleted with the stage
    entry.replace(target)
    return target


class _Limit:
    """Counts the bytes that come out of an archive, and refuses a bomb; reports how much of the archive was read."""

    def __init__(self, archive: Path, file: IO[bytes], stage: Path, task: Task) -> None:
        self.archive, self.file, self.task = archive, file, task
        self.n_read = self.n_unpacked = 0
        sane = max(archive.stat().st_size * HIGHEST_RATIO, SMALL)
        self.limit = min(sane, shutil.disk_usage(stage).free)

    def add(self, n_bytes: int) -> None:
        self.n_unpacked += n_bytes
        if self.n_unpacked > self.limit:
            raise DataError(
                f"{self.archive} unpacks to more than {self.limit / 1e6:,.0f} MB, beyond the free disk space or any "
                f"sane ratio to its own {self.archive.stat().st_size / 1e6:,.1f} MB; free some space, or remove it if "
                "you do not trust it"
            )
        self.task.advance(self.file.tell() - self.n_read)
        self.n_read = self.file.tell()


def _unpack_tar(archive: Path, stage: Path, task: Task) -> None:
    """Python's data filter refuses members outside of the stage, and drops owners and odd modes."""
    with archive.open("rb") as file, tarfile.open(fileobj=file) as content:
        limit = _Limit(archive, file, stage, task)
        for n, member in enumerate(content):
            if n >= MOST_MEMBERS:
                raise DataError(
                    f"{archive} has more than {MOST_MEMBERS:,} members; unpack it yourself if you trust it, else "
                    "remove it"
                )
            if not (member.isreg() or member.isdir()):  # no data set needs links, and chains of them may lead anywhere
                raise _unsafe(archive, f"{member.name!r} is a link, a device or a pipe")
            limit.add(member.size)  # as the header says, before anything is written
            content.extract(member, stage, filter="data")
        # tarfile stops at the last member; the checksum of the compressed data comes after it
        while content.fileobj and (chunk := content.fileobj.read(CHUNK)):
            limit.add(len(chunk))


def _unpack_gzip(archive: Path, stage: Path, task: Task) -> None:
    with archive.open("rb") as file, gzip.GzipFile(fileobj=file) as content:
        limit = _Limit(archive, file, stage, task)
        with (stage / archive.name[: -len(".gz")]).open("wb") as target:
            while chunk := content.read(CHUNK):
                limit.add(len(chunk))
                target.write(chunk)


def _unsafe(archive: Path, why: str) -> DataError:
    return DataError(f"{archive} is not safe: {why}; nothing was unpacked, remove the file and get it elsewhere")
