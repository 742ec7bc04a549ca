"""Reading and writing files: atomic writes, HDF5, safetensors, JSON and CSV. The same content gives the same bytes.

Every HDF5 and safetensors file has a header: its kind, the version of its format, and `about`: how it was made. It
also has a seal, the SHA-256 of the whole file, which is checked when its content is read.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import io
import json
import math
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
from safetensors import SafetensorError, safe_open

from salcli.errors import BadArtifactError, SalError, check_regular

if TYPE_CHECKING:
    from torch import Tensor  # tables and headers are read without torch

SCHEMA = 3
USER_BLOCK = 512  # bytes before the content of an HDF5 file, which the library leaves alone: room for the seal
SEAL = b"salcli-sha256:"
NOT_SEALED = SEAL + b"0" * 64
SEAL_IS_WITHIN = 2**20  # bytes from the start of a file
DAMAGED = (SafetensorError, OSError, RuntimeError, LookupError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True)
class Found:
    """A file that exists, and the command that makes it."""

    path: Path
    made_by: str = ""

    def __post_init__(self) -> None:
        check_regular(self.path)

    @property
    def fix(self) -> str:
        return f"make it again: {self.made_by}" if self.made_by else "make it again with the stage it comes from"

    def damaged(self, error: object) -> BadArtifactError:
        return BadArtifactError(f"{self.path} is damaged or not a file of salcli ({error}); {self.fix}")


@dataclass(frozen=True)
class Header:
    """What a file says about itself."""

    kind: str
    about: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)  # of a network: what it is built from
    schema: int = SCHEMA
    seal: str = ""

    def __post_init__(self) -> None:
        if not (isinstance(self.about, dict) and isinstance(self.spec, dict)):
            raise TypeError("its header does not say how it was made")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A path to write to. It becomes `path` when the block succeeds, and is removed when it fails.

    A killed process leaves the old file as it was, and at most a hidden partial file, which the next run removes.
    """
    if path.is_char_device() or path.is_fifo():  # /dev/null: root would replace the device by a file
        yield path
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = own_sibling(path, "partial")
        try:
            yield partial
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
            _sync_folder(path.parent)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:  # a full disk, a read-only folder, a file where a folder should be
        reason = os.strerror(error.errno) if error.errno else error
        raise SalError(f"{path} cannot be written: {reason}; fix that and run the same command again") from None


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Only one process at a time may be inside. The lock of a killed process is gone with it; the file stays."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError:  # nothing can be written here: the stage will say so
        yield
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise SalError(
                f"{what} is already running (process {file.read().strip()}); wait until it ends, or stop it"
            ) from None
        with suppress(OSError):  # the number is for people
            os.truncate(file.fileno(), 0)
            os.write(file.fileno(), f"{os.getpid()}\n".encode())
        yield


def own_sibling(path: Path, suffix: str) -> Path:
    """A hidden file beside `path` that no other process writes. Those that killed processes left here are removed."""
    host = socket.gethostname()[:64]
    for left in path.parent.glob(f".{escape(path.name)}.{escape(host)}-*.{suffix}"):
        pid = left.name.split("-")[-1].removesuffix(f".{suffix}")
        if pid.isdigit() and not _is_running(int(pid)):
            left.unlink(missing_ok=True)
    return path.with_name(f".{path.name}.{host}-{os.getpid()}.{suffix}")


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        pass
    return True


def _sync_folder(folder: Path) -> None:
    """So that a rename survives a power failure."""
    with suppress(OSError):  # some file systems do not sync folders
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def as_json(value: Any) -> Any:
    """Arrays and tensors as lists, and None for NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {name: as_json(one) for name, one in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def reading_json(found: Found) -> Iterator[Any]:
    """The content; whatever goes wrong with it inside the block means that the file is damaged."""
    try:
        yield json.loads(found.path.read_text(encoding="utf-8"))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise found.damaged(error) from None


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]], fieldnames: Sequence[str]) -> None:
    """Rows with the same keys, for `dvc plots` and spreadsheets. Floats are rounded to what a plot can show."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(fieldnames), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})
    write_text(path, text.getvalue())


# -- seals


def _seal(path: Path) -> None:
    """Put the SHA-256 of a file in the place that was left for it."""
    with path.open("r+b") as file:
        position = file.read(SEAL_IS_WITHIN).index(NOT_SEALED) + len(SEAL)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(position)
        file.write(digest.encode())


def check_seal(found: Found) -> None:
    """Raise if any byte of a file has changed since it was written."""
    if not _is_intact(found.path, _state(found.path)):
        raise BadArtifactError(f"{found.path} is damaged: its content does not match its checksum; {found.fix}")


def _state(path: Path) -> tuple[int, ...]:
    """Changes with a file: for as long as it does not, one process reads it once. Times may also go backwards."""
    facts = path.stat()
    return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


@lru_cache(maxsize=256)
def _is_intact(path: Path, state: tuple[int, ...]) -> bool:
    with path.open("rb") as file:
        start = file.read(SEAL_IS_WITHIN)
        position = start.find(SEAL) + len(SEAL)
        if position < len(SEAL):
            return False
        digest = hashlib.sha256(start[:position] + b"0" * 64 + start[position + 64 :])
        while block := file.read(SEAL_IS_WITHIN):
            digest.update(block)
    return start[position : position + 64] == digest.hexdigest().encode()


# -- HDF5


@contextmanager
def creating(path: Path, kind: str, about: Mapping[str, Any]) -> Iterator[h5py.File]:
    """A new HDF5 file of a kind. `about` may be anything that JSON can say."""
    with atomic_path(path) as partial, sealed_file(partial, kind, about) as file:
        yield file


@contextmanager
def sealed_file(path: Path, kind: str, about: Mapping[str, Any]) -> Iterator[h5py.File]:
    """A new HDF5 file that is sealed when the block succeeds, and fails when the disk is full.

    By itself the library buffers data, and ignores errors when it writes them on closing: a damaged file would look
    like a whole one. So nothing is buffered, and the rest is flushed while errors still count.
    """
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    access.set_sieve_buf_size(0)
    creation = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    creation.set_userblock(USER_BLOCK)
    creation.set_obj_track_times(False)  # or the same content would not give the same bytes
    file = h5py.File(h5py.h5f.create(bytes(path), h5py.h5f.ACC_TRUNC, creation, access))
    try:
        file.attrs.update({"kind": kind, "schema": SCHEMA, "about": json.dumps(about, sort_keys=True)})
        yield file
        file.flush()
    except BaseException:
        with suppress(Exception):  # the first error is the one to report
            file.close()
        raise
    file.close()
    with path.open("r+b") as raw:
        raw.write(NOT_SEALED)
    _seal(path)


@contextmanager
def reading(found: Found, kind: str) -> Iterator[h5py.File]:
    """An existing HDF5 file, after a check that it is whole and of the right kind."""
    try:
        with h5py.File(found.path, "r") as file:
            _check_kind(_hdf5_header(file), found, kind)
            check_seal(found)
            check_claims(file, found.path.stat().st_size)
            yield file
    except DAMAGED as error:
        raise found.damaged(error) from None


def check_claims(file: h5py.File, size: int) -> None:
    """Raise if arrays are larger than the file, which would fill the memory, or if they point to other files."""

    def wrong(name: str, link: object) -> str | None:  # HDF5 stops at the first; it lets no exceptions through
        if not isinstance(link, h5py.HardLink):
            return f"its {name} is a link"
        try:
            item = file[name]
        except Exception as error:  # damaged bytes may lead to any
            return f"its {name} cannot be read: {error}"
        if isinstance(item, h5py.Dataset) and (item.nbytes > size or item.external or item.is_virtual):
            return f"its {name} is not in the file: {item.nbytes:,} bytes, the file has {size:,}"
        return None

    if reason := file.visititems_links(wrong):
        raise ValueError(reason)


def write_arrays(path: Path, kind: str, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> None:
    """A file of arrays that fit in memory."""
    with creating(path, kind, about) as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array)


def read_arrays(found: Found, kind: str) -> dict[str, np.ndarray]:
    """All arrays of a file, also those in groups, by their path."""
    arrays: dict[str, np.ndarray] = {}

    def collect(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            arrays[name] = np.asarray(item)

    with reading(found, kind) as file:
        file.visititems(collect)
    return arrays


def about_of(file: h5py.File) -> dict[str, Any]:
    return _hdf5_header(file).about


def mapped(path: Path, stored: h5py.Dataset) -> Callable[[], np.ndarray]:
    """A function that maps an array of a file, read-only, also after the file was closed.

    What is not read takes no memory. An array that is not contiguous is in memory already.
    """
    offset = stored.id.get_offset()  # None for an empty or a chunked array
    if offset is None or not stored.dtype.isnative or stored.size == 0:
        whole: np.ndarray = stored[()]
        whole.setflags(write=False)
        return lambda: whole
    dtype, shape = stored.dtype, stored.shape
    return lambda: np.memmap(path, dtype, "r", offset, shape)


# -- safetensors


def write_tensors(path: Path, header: Header, tensors: Mapping[str, Tensor]) -> None:
    """Tensors and a header. Nothing is pickled, and equal tensors give equal bytes."""
    from safetensors.torch import save

    # copies, because a network may share weights between layers, which the library refuses
    copies = {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}
    # one metadata entry: the library would write several in random order
    about = asdict(replace(header, seal=NOT_SEALED.decode()))
    content = save(copies, metadata={"salcli": json.dumps(about, sort_keys=True)})
    with atomic_path(path) as partial:
        partial.write_bytes(content)
        _seal(partial)


def read_tensors(found: Found) -> dict[str, Tensor]:
    """All tensors of a file, which must be finite."""
    check_seal(found)
    with safe_open(found.path, framework="pt") as file:
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and (n_bad := tensor.numel() - int(tensor.isfinite().sum())):
            raise found.damaged(f"{n_bad} of {tensor.numel()} numbers of {name} are NaN or infinite")
    return tensors


# -- headers and fingerprints


def read_header(found: Found, kind: str | None = None) -> Header:
    """The header of an HDF5 or safetensors file of any name, without its content."""
    found.path.open("rb").close()  # a file that may not be read is not damaged
    try:
        if h5py.is_hdf5(found.path):
            with h5py.File(found.path, "r") as file:
                header = _hdf5_header(file)
        else:
            with safe_open(found.path, framework="numpy") as file:
                header = Header(**json.loads((file.metadata() or {})["salcli"]))
    except DAMAGED as error:
        raise found.damaged(error) from None
    _check_kind(header, found, kind or header.kind)
    return header


def _hdf5_header(file: h5py.File) -> Header:
    return Header(str(file.attrs["kind"]), json.loads(file.attrs["about"]), schema=int(file.attrs["schema"]))


def _check_kind(header: Header, found: Found, kind: str) -> None:
    if header.kind != kind:
        raise BadArtifactError(f"{found.path} is a file of kind {header.kind}, not {kind}; {found.fix}")
    if header.schema != SCHEMA:
        raise BadArtifactError(f"{found.path} has schema {header.schema}, this salcli reads {SCHEMA}; {found.fix}")


def fingerprint(path: Path) -> str:
    """Identifies a file by its content; empty where there is none."""
    try:
        state = _state(path)  # or a loop of links would count as no file
        return _fingerprint(path, state) if path.is_file() else ""
    except FileNotFoundError:
        return ""


@lru_cache(maxsize=256)
def _fingerprint(path: Path, state: tuple[int, ...]) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
