"""Download data sets: resume interrupted transfers, verify checksums, unpack, and report what is present.

pooch also verifies and unpacks, but it sends no Range header, so a broken download starts again from the first byte;
our files have up to 0.9 GB, so resuming pays for our own downloader.
"""

import gzip
import hashlib
import os
import shlex
import shutil
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Literal
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from salcli import __version__
from salcli.data.catalogue import DataSet, RemoteFile, data_set, stand_ins
from salcli.data.sets import file_size
from salcli.errors import SalError
from salcli.progress import Progress, Silent, Task

Status = Literal["here", "custom", "partial", "missing"]  # custom: something stands in for it

ATTEMPTS = 4  # in a row without a single new byte
FIRST_PAUSE = 1.0  # seconds; doubles with each attempt
CHUNK = 1 << 18
TIMEOUT = 30.0  # seconds without a single byte
USER_AGENT = f"salcli/{__version__} (data set download)"
RANGE_NOT_SATISFIABLE = 416
WORTH_ANOTHER_TRY = {408, 425, 429, 500, 502, 503, 504}
ARCHIVES = (".tar", ".tar.gz", ".gz")
PAGE_STARTS = (b"<!doctype html", b"<html", b"<?xml", b"<head")


# --- whole data sets


@dataclass(frozen=True)
class Fetched:
    """What was done for a data set."""

    name: str
    outcome: Literal["fetched", "here already", "embedded"]
    paths: tuple[Path, ...] = ()


def status(name: str, root: Path) -> Status:
    """Whether a data set, or what stands in for it, is below the data root. Files are looked for, not read."""
    record = data_set(name)
    if stand_in(name, root):
        return "custom"
    if record.is_embedded:
        return "here"
    found = [_is_there(root / path) for path in record.provides]
    if all(found):
        return "here"
    targets = [root / record.folder / file.name for file in record.files]
    has_begun = any(target.exists() or part_of(target).exists() for target in targets)
    return "partial" if any(found) or has_begun else "missing"


def stand_in(name: str, root: Path) -> Path | None:
    """NAME/ or NAME.npz below the data root, if it is not empty."""
    return next(filter(_is_there, stand_ins(name, root)), None)


def fetch(names: Iterable[str], root: Path, progress: Progress | None = None) -> Iterator[Fetched]:
    """Fetch data sets one by one. A failure does not stop the others: all failures are raised together at the end."""
    records = [data_set(name) for name in dict.fromkeys(names)]  # unknown names are reported before the first byte
    failures = []
    for record in records:
        try:
            yield _fetch_set(record, root, progress or Silent())
        except SalError as error:
            failures.append(f"{record.name}: {error}")
    if failures:
        raise SalError("\n".join(failures))


def _fetch_set(record: DataSet, root: Path, progress: Progress) -> Fetched:
    if record.is_embedded:
        return Fetched(record.name, "embedded")
    if replacement := stand_in(record.name, root):
        return Fetched(record.name, "here already", (replacement,))
    paths = tuple(root / path for path in record.paths)
    if status(record.name, root) == "here":
        return Fetched(record.name, "here already", paths)
    if record.by_hand:
        raise SalError(f"salcli cannot download it; {record.how_to_get}")
    folder = root / record.folder
    again = f"salcli data fetch {record.name} --root {shlex.quote(str(root))}"
    for file in record.files:
        unpacked = f"{record.folder}/{file.name}".removeprefix("/").removesuffix(".gz")
        if unpacked in record.provides and _is_there(root / unpacked):
            continue
        n_missing = max((file.n_bytes or 0) - file_size(part_of(folder / file.name)), 0)
        with progress.task(file.name, n_missing, "bytes") as task:
            download(file, folder, task, again=again)
        if file.name.endswith(ARCHIVES):
            _unpack(folder / file.name, folder, progress)
    lacking = [path for path in record.provides if not _is_there(root / path)]
    if lacking:
        raise SalError(f"the files are fetched and unpacked, but {root / lacking[0]} is not among them")
    return Fetched(record.name, "fetched", paths)


def _is_there(path: Path) -> bool:
    """A file or a folder that is not empty."""
    if path.is_dir():
        return next(path.iterdir(), None) is not None
    return path.is_file() and path.stat().st_size > 0


# --- one file


def download(
    file: RemoteFile, folder: Path, task: Task, *, again: str, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Put the file into the folder, unless it is there. `again` is the command that errors suggest.

    An interrupted transfer leaves NAME.part, from which the next one resumes.
    """
    target = folder / file.name
    shown = file.checksum.replace(":", " ")
    if target.exists():
        if actual := _wrong_digest(file, target):
            raise SalError(
                f"{target} is damaged or another file: expected {shown}, got {actual}; remove it, then run: {again}"
            )
        return
    part = part_of(target)
    failures = []
    for url in (file.url, *file.mirrors):
        try:
            had_part = part.exists()
            _transfer_all(url, part, task, sleep)
            if had_part and _wrong_digest(file, part):  # the part was of another file
                part.unlink()
                _transfer_all(url, part, task, sleep)
            if actual := _wrong_digest(file, part):
                part.unlink()
                raise Failure(f"other bytes than published: expected {shown}, got {actual}; they were discarded")
            with part.open("rb") as complete:
                os.fsync(complete.fileno())
            part.replace(target)
            return
        except Failure as failure:
            failures.append(f"  {url}: {failure}")
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else error
            raise SalError(f"{target} cannot be written: {reason}; fix that, then resume with: {again}") from None
    by_hand = f"get it another way, put it at {target} ({shown}), then run: {again}"
    raise SalError("\n".join([f"{file.name} cannot be fetched", *failures, by_hand]))


def part_of(target: Path) -> Path:
    """The path of a file while it is incomplete."""
    return target.with_name(f"{target.name}.part")


def _wrong_digest(file: RemoteFile, path: Path) -> str | None:
    """The digest of a file that differs from the published one, else None."""
    algorithm, _, expected = file.checksum.partition(":")
    with path.open("rb") as opened:
        actual = hashlib.file_digest(opened, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()
    return actual if actual != expected else None


class Failure(Exception):  # noqa: N818 (it never leaves this module)
    """A request that failed. `may_pass`: another attempt may succeed."""

    def __init__(self, reason: str, *, may_pass: bool = False) -> None:
        super().__init__(reason)
        self.may_pass = may_pass


def _transfer_all(url: str, part: Path, task: Task, sleep: Callable[[float], None]) -> None:
    """Try until the file is complete; give up after some attempts in a row without a new byte."""
    n_failed, most = 0, file_size(part)
    while True:
        try:
            return _transfer(url, part, task)
        except Failure as failure:
            n_failed = 1 if file_size(part) > most else n_failed + 1
            most = max(most, file_size(part))
            if n_failed == ATTEMPTS or not failure.may_pass:
                raise
            sleep(FIRST_PAUSE * 2 ** (n_failed - 1))


def _transfer(url: str, part: Path, task: Task) -> None:
    """One request for the bytes that `part` lacks. Raises Failure, or OSError if they cannot be stored."""
    n_here = file_size(part)
    # identity: with compression on the way, lengths and ranges would be meaningless
    headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
    if n_here:
        headers["Range"] = f"bytes={n_here}-"
    try:
        response: HTTPResponse = urlopen(Request(url, headers=headers), timeout=TIMEOUT)
    except HTTPError as error:
        error.close()
        if error.code == RANGE_NOT_SATISFIABLE and n_here:
            return  # complete already: a process was killed just before the renaming
        may_pass = error.code in WORTH_ANOTHER_TRY
        raise Failure(f"the server answered {error.code} ({error.reason})", may_pass=may_pass) from None
    except (HTTPException, OSError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        broke = isinstance(reason, (TimeoutError, ConnectionError, HTTPException))
        raise Failure(
            f"no answer from {urlsplit(url).hostname} ({reason or type(reason).__name__}): is there a network, or a "
            "proxy or firewall in the way?",
            may_pass=broke and not isinstance(reason, ConnectionRefusedError),
        ) from None
    with response:
        asked_for = f"bytes {n_here}-"
        if response.status != 206 or not response.headers.get("Content-Range", asked_for).startswith(asked_for):
            n_here = 0  # the server does not support ranges and sends the whole file
        length = response.headers.get("Content-Length") or ""
        n_expected = int(length) if length.isdigit() else None
        part.parent.mkdir(parents=True, exist_ok=True)  # only now: a refusal leaves no empty folders behind
        free = shutil.disk_usage(part.parent).free
        if n_expected is not None and n_expected > free:
            raise OSError(f"the disk has {free / 1e6:,.0f} MB left, {n_expected / 1e6:,.0f} MB are needed")
        chunk, n_received = _read(response), 0
        is_html = response.headers.get("Content-Type", "").lower().startswith("text/html")
        if not n_here and (is_html or chunk.lstrip().lower().startswith(PAGE_STARTS)):  # a good part stays
            raise Failure("it sent a web page instead of the file (a login, a quota or an error page)")
        with part.open("ab" if n_here else "wb") as target:
            while chunk:
                target.write(chunk)
                n_received += len(chunk)
                task.advance(len(chunk))
                chunk = _read(response)
    if n_expected is not None and n_received < n_expected:
        came, whole = n_here + n_received, n_here + n_expected
        raise Failure(f"the connection broke after {came:,} of {whole:,} bytes", may_pass=True)


def _read(response: HTTPResponse) -> bytes:
    try:
        return response.read(CHUNK)
    except (HTTPException, OSError) as error:
        raise Failure(f"the connection broke ({error or type(error).__name__})", may_pass=True) from None


def _unpack(archive: Path, folder: Path, progress: Progress) -> None:
    """Replace what an archive holds, all of it or nothing. Its checksum was compared with the published one."""
    stage = folder / f".{archive.name}.unpacking"
    shutil.rmtree(stage, ignore_errors=True)  # left by a killed process
    stage.mkdir()
    try:
        with progress.task(f"unpack {archive.name}", archive.stat().st_size, "bytes") as task:
            if archive.name.endswith((".tar", ".tar.gz")):
                with tarfile.open(archive) as members:
                    members.extractall(stage, filter="data")
            else:
                with gzip.open(archive) as content, (stage / archive.stem).open("wb") as unpacked:
                    shutil.copyfileobj(content, unpacked)
            task.advance(archive.stat().st_size)
        for entry in sorted(stage.iterdir()):
            target = folder / entry.name
            if target.is_dir():
                target.rename(stage / f".old.{entry.name}")  # deleted with the stage
            entry.replace(target)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise SalError(
            f"{archive} cannot be unpacked to {folder}: {reason}; fix that and run the same command again"
        ) from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)
