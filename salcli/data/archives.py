"""Unpack archives from the web: completely or not at all, and never outside the target folder."""

import gzip
import shutil
import stat
import tarfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager
from lzma import LZMAError
from pathlib import Path, PurePosixPath

from salcli.errors import DataError, StorageError
from salcli.progress import Progress, Silent, Task

TAR_NAMES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
CHUNK = 1 << 20
# Images hardly shrink and lists of names shrink tenfold; an archive beyond this ratio is made to fill a disk.
HIGHEST_RATIO = 200
MOST_MEMBERS = 1_000_000  # each takes memory and an inode, however small it is
SMALL = 50_000_000  # bytes that may come out of an archive of any size
BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, LZMAError, EOFError, RuntimeError, NotImplementedError)


class Archive(ABC):
    """An open archive."""

    path: Path
    file: tarfile.TarFile | zipfile.ZipFile | gzip.GzipFile

    @abstractmethod
    def __init__(self, path: Path) -> None: ...

    @abstractmethod
    def check(self, limit: int) -> int:
        """Return how many bytes will come out, 0 if unknown. Raises before anything is written."""

    @abstractmethod
    def extract(self, folder: Path, task: Task, limit: int) -> None: ...

    def close(self) -> None:
        self.file.close()


def archive_kind(name: str) -> type[Archive] | None:
    """How to unpack a file of that name; None if it is not an archive."""
    lower = name.lower()
    if lower.endswith(TAR_NAMES):
        return Tar
    if lower.endswith(".zip"):
        return Zip
    return Gzip if lower.endswith(".gz") else None


def unpack(archive: Path, folder: Path, progress: Progress | None = None) -> list[Path]:
    """Unpack into `folder` and return the top-level files and folders, which replace older ones of the same name.

    Everything is unpacked into a temporary folder first, so that an archive that is truncated, climbs out of the folder
    or would fill the disk leaves nothing behind.
    """
    kind = archive_kind(archive.name)
    if kind is None:
        raise DataError(
            f"{archive} is not an archive that salcli unpacks; use .tar, .tar.gz, .tar.bz2, .tar.xz, .zip or .gz"
        )
    with _explained(archive, folder), closing(kind(archive)) as content, _staging(folder, archive.name) as stage:
        sane = max(archive.stat().st_size * HIGHEST_RATIO, SMALL)
        limit = min(sane, shutil.disk_usage(folder).free)
        n_bytes = content.check(limit)
        with (progress or Silent()).task(f"unpack {archive.name}", n_bytes, "bytes") as task:
            content.extract(stage, task, limit)
        return [_move(entry, folder / entry.name, stage) for entry in sorted(stage.iterdir())]


@contextmanager
def _explained(archive: Path, folder: Path) -> Iterator[None]:
    """Say whether the archive or the disk is at fault, whichever library raised."""
    try:
        yield
    except (*BROKEN, OSError) as error:
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


# --- kinds of archives


class Tar(Archive):
    """A tar archive, compressed or not."""

    file: tarfile.TarFile

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, tarfile.open(path)  # noqa: SIM115 (closed by close)

    def check(self, limit: int) -> int:
        """Every member must stay inside. Sizes are in the headers, so a bomb is detected before it is unpacked."""
        total = 0
        for n, member in enumerate(self.file):
            _refuse_many(self.path, n)
            total += member.size
            _refuse_bomb(self.path, total, limit)
            _refuse_outside(self.path, member.name)
            if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                raise _unsafe(self.path, member.name, "is a device or a pipe")
        self._read_to_the_end(limit)
        members = self.file.getmembers()
        links = {PurePosixPath(member.name) for member in members if member.issym()}
        for member in members:
            # a path that leads through a link would be written to wherever the link points
            if links & set(PurePosixPath(member.name).parents):
                raise _unsafe(self.path, member.name, "leads through a link")
            if member.issym():
                _refuse_link(self.path, member.name, member.linkname)
            elif member.islnk():
                _refuse_outside(self.path, member.linkname, of=member.name)
                if links & {PurePosixPath(member.linkname), *PurePosixPath(member.linkname).parents}:
                    raise _unsafe(self.path, member.name, "leads through a link")
        return total

    def _read_to_the_end(self, limit: int) -> None:
        """tarfile stops at the last member; the checksum of the compressed data comes after it."""
        stream, n_read = self.file.fileobj, 0
        while stream and (chunk := stream.read(CHUNK)):
            n_read += len(chunk)
            _refuse_bomb(self.path, n_read, limit)

    def extract(self, folder: Path, task: Task, limit: int) -> None:
        """Python's data filter is the second lock: it drops owners, odd modes and whatever `check` overlooked."""
        for member in self.file.getmembers():
            try:
                self.file.extract(member, folder, filter="data")
            except tarfile.FilterError as error:
                raise _unsafe(self.path, member.name, str(error)) from None
            task.advance(member.size)


class Zip(Archive):
    """A zip archive."""

    file: zipfile.ZipFile

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, zipfile.ZipFile(path)

    def check(self, limit: int) -> int:
        """zipfile would silently rename members that climb out; such an archive is not trusted at all."""
        total = 0
        _refuse_many(self.path, len(self.file.infolist()))
        for member in self.file.infolist():
            total += member.file_size
            _refuse_bomb(self.path, total, limit)
            _refuse_outside(self.path, member.orig_filename)
            mode = stat.S_IFMT(member.external_attr >> 16)
            if mode not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _unsafe(self.path, member.filename, "is a link, a device or a pipe")
        return total

    def extract(self, folder: Path, task: Task, limit: int) -> None:
        """zipfile never reads more of a member than its header says, and compares its CRC."""
        for member in self.file.infolist():
            self.file.extract(member, folder)
            task.advance(member.file_size)


class Gzip(Archive):
    """One compressed file, named like the archive without .gz."""

    file: gzip.GzipFile

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, gzip.GzipFile(path)

    def check(self, limit: int) -> int:
        return 0  # the format does not say; `extract` counts

    def extract(self, folder: Path, task: Task, limit: int) -> None:
        total = 0
        with (folder / self.path.name[: -len(".gz")]).open("wb") as target:
            while chunk := self.file.read(CHUNK):
                total += len(chunk)
                _refuse_bomb(self.path, total, limit)
                target.write(chunk)
                task.advance(len(chunk))


def _refuse_bomb(archive: Path, total: int, limit: int) -> None:
    if total > limit:
        raise DataError(
            f"{archive} unpacks to more than {limit / 1e6:,.0f} MB, beyond the free disk space or any sane ratio to "
            f"its own {archive.stat().st_size / 1e6:,.1f} MB; free some space, or remove it if you do not trust it"
        )


def _refuse_many(archive: Path, n_members: int) -> None:
    if n_members > MOST_MEMBERS:
        raise DataError(
            f"{archive} has more than {MOST_MEMBERS:,} members; unpack it yourself if you trust it, else remove it"
        )


def _refuse_outside(archive: Path, name: str, of: str | None = None) -> None:
    is_windows_path = "\\" in name or name[1:2] == ":"  # would climb out there
    if not name or "\0" in name or is_windows_path or name.startswith("/") or ".." in PurePosixPath(name).parts:
        raise _unsafe(archive, of or name, "climbs out of the folder" if of is None else f"links to {name}, outside")


def _refuse_link(archive: Path, name: str, target: str) -> None:
    """A link may only climb with its first steps, and no further than the top: then no chain of links gets out."""
    parts = PurePosixPath(target).parts
    n_up = next((i for i, part in enumerate(parts) if part != ".."), len(parts))
    depth = len(PurePosixPath(name).parts) - 1
    if target.startswith("/") or "\\" in target or n_up > depth or ".." in parts[n_up:]:
        raise _unsafe(archive, name, f"links to {target}, outside")


def _unsafe(archive: Path, member: str, why: str) -> DataError:
    return DataError(
        f"{archive}: its member {member!r} {why}; nothing was unpacked, remove the file and get it elsewhere"
    )
