"""Tar, zip and gzip: which members are safe, how much comes out, and how it is written."""

from __future__ import annotations

import gzip
import stat
import tarfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol, Self

from salcli.errors import DataError

if TYPE_CHECKING:
    from types import TracebackType

    from salcli.progress import Task

CHUNK = 1 << 20


class ArchiveKind(Protocol):
    """An open archive."""

    def __init__(self, archive: Path) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def check(self, limit: int) -> int:
        """Bytes that will come out, 0 where nobody can know. Raises before anything is written."""
        ...

    def extract(self, folder: Path, task: Task, limit: int) -> None:
        """Write every member."""
        ...


class _Closing:
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    _file: tarfile.TarFile | zipfile.ZipFile | gzip.GzipFile


class Tar(_Closing):
    """A tar archive, compressed or not."""

    _file: tarfile.TarFile

    def __init__(self, archive: Path) -> None:
        self._archive = archive
        self._file = tarfile.open(archive)  # noqa: SIM115 (closed by __exit__)

    def check(self, limit: int) -> int:
        """Every member must stay inside. Sizes are in the headers, so that a bomb is known before it goes off."""
        total = 0
        for member in self._file:
            total += member.size
            _refuse_bomb(self._archive, total, limit)
            _refuse_outside(self._archive, member.name)
            if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                raise _unsafe(self._archive, member.name, "is a device or a pipe")
        self._read_to_the_end(limit)
        members = self._file.getmembers()
        links = {PurePosixPath(member.name) for member in members if member.issym()}
        for member in members:
            # A path that leads through a link would be written to wherever the link points
            if links & set(PurePosixPath(member.name).parents):
                raise _unsafe(self._archive, member.name, "leads through a link")
            if member.issym():
                _refuse_link(self._archive, member.name, member.linkname)
            elif member.islnk():
                _refuse_outside(self._archive, member.linkname, of=member.name)
                if links & {PurePosixPath(member.linkname), *PurePosixPath(member.linkname).parents}:
                    raise _unsafe(self._archive, member.name, "leads through a link")
        return total

    def _read_to_the_end(self, limit: int) -> None:
        """tarfile stops at the last member; the checksum of what is compressed comes after it."""
        stream, n_read = self._file.fileobj, 0
        while stream and (chunk := stream.read(CHUNK)):
            n_read += len(chunk)
            _refuse_bomb(self._archive, n_read, limit)

    def extract(self, folder: Path, task: Task, limit: int) -> None:
        """Python's own data filter is the second lock: it drops owners, odd modes and what `check` overlooked."""
        for member in self._file.getmembers():
            try:
                self._file.extract(member, folder, filter="data")
            except tarfile.FilterError as error:
                raise _unsafe(self._archive, member.name, str(error)) from None
            task.advance(member.size)


class Zip(_Closing):
    """A zip archive."""

    _file: zipfile.ZipFile

    def __init__(self, archive: Path) -> None:
        self._archive = archive
        self._file = zipfile.ZipFile(archive)

    def check(self, limit: int) -> int:
        """zipfile would quietly rename members that climb out; such an archive is rather not trusted at all."""
        total = 0
        for member in self._file.infolist():
            total += member.file_size
            _refuse_bomb(self._archive, total, limit)
            _refuse_outside(self._archive, member.orig_filename)
            mode = stat.S_IFMT(member.external_attr >> 16)
            if mode not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _unsafe(self._archive, member.filename, "is a link, a device or a pipe")
        return total

    def extract(self, folder: Path, task: Task, limit: int) -> None:
        """zipfile never reads more of a member than its header says, and compares its CRC."""
        for member in self._file.infolist():
            self._file.extract(member, folder)
            task.advance(member.file_size)


class Gzip(_Closing):
    """One compressed file, named like the archive without .gz."""

    _file: gzip.GzipFile

    def __init__(self, archive: Path) -> None:
        self._archive = archive
        self._file = gzip.GzipFile(archive)

    def check(self, limit: int) -> int:
        """The format does not tell; `extract` counts."""
        return 0

    def extract(self, folder: Path, task: Task, limit: int) -> None:
        """Stop as soon as too much comes out."""
        total = 0
        with (folder / self._archive.name[: -len(".gz")]).open("wb") as target:
            while chunk := self._file.read(CHUNK):
                total += len(chunk)
                _refuse_bomb(self._archive, total, limit)
                target.write(chunk)
                task.advance(len(chunk))


def _refuse_bomb(archive: Path, total: int, limit: int) -> None:
    if total > limit:
        raise DataError(
            f"{archive} unpacks to more than {limit / 1e6:,.0f} MB, beyond the free disk space or any sane ratio to "
            f"its own {archive.stat().st_size / 1e6:,.1f} MB; free some space, or remove it if you do not trust it"
        )


def _refuse_outside(archive: Path, name: str, of: str | None = None) -> None:
    is_windows_path = "\\" in name or name[1:2] == ":"  # would climb out there
    if not name or "\0" in name or is_windows_path or name.startswith("/") or ".." in PurePosixPath(name).parts:
        raise _unsafe(archive, of or name, "climbs out of the folder" if of is None else f"links to {name}, outside")


def _refuse_link(archive: Path, name: str, target: str) -> None:
    """A link may climb with its first steps only, and no further than to the top: then no chain of links gets out."""
    parts = PurePosixPath(target).parts
    n_up = next((place for place, part in enumerate(parts) if part != ".."), len(parts))
    depth = len(PurePosixPath(name).parts) - 1
    if target.startswith("/") or "\\" in target or n_up > depth or ".." in parts[n_up:]:
        raise _unsafe(archive, name, f"links to {target}, outside")


def _unsafe(archive: Path, member: str, why: str) -> DataError:
    return DataError(
        f"{archive}: its member {member!r} {why}; nothing was unpacked, remove the file and get it elsewhere"
    )
