"""HDF5 files with a kind, a schema version and plain arrays. The same content gives the same bytes."""

from __future__ import annotations

import json
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from salcli.artifacts.atomic import atomic_path
from salcli.errors import BadArtifactError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from salcli.artifacts.layout import Found

SCHEMA = 1


@contextmanager
def creating(path: Path, kind: str, about: Mapping[str, Any]) -> Iterator[h5py.File]:
    """A new file of a kind; `about` (anything JSON can say) tells how it was made."""
    with atomic_path(path) as partial, _new_file(partial) as file:
        file.attrs["kind"] = kind
        file.attrs["schema"] = SCHEMA
        file.attrs["about"] = json.dumps(about, sort_keys=True)
        yield file


@contextmanager
def _new_file(path: Path) -> Iterator[h5py.File]:
    """An HDF5 file that fails when the disk is full.

    By itself the library keeps data back, and swallows the errors of writing them when it closes: a damaged
    file would pass for a whole one. So nothing is kept back, and the rest is flushed while errors still count.
    """
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    access.set_sieve_buf_size(0)
    creation = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    creation.set_obj_track_times(False)  # or the same content would not give the same bytes
    file = h5py.File(h5py.h5f.create(bytes(path), h5py.h5f.ACC_TRUNC, creation, access))
    try:
        yield file
        file.flush()
    except BaseException:
        with suppress(Exception):  # the first error is the one to report
            file.close()
        raise
    file.close()


@contextmanager
def reading(found: Found, kind: str) -> Iterator[h5py.File]:
    """An existing file, once it has proved to be whole and of the right kind."""
    try:
        with h5py.File(found.path, "r") as file:
            _check(file, found, kind)
            yield file
    except (OSError, RuntimeError, LookupError, TypeError, ValueError) as error:
        raise BadArtifactError(f"{found.path} is damaged or not ours ({error}); {found.cure}") from None


def _check(file: h5py.File, found: Found, kind: str) -> None:
    if file.attrs.get("kind") != kind:
        raise BadArtifactError(
            f"{found.path} holds {file.attrs.get('kind', 'something foreign')}, not {kind}; {found.cure}"
        )
    if file.attrs.get("schema") != SCHEMA:
        raise BadArtifactError(
            f"{found.path} has schema {file.attrs.get('schema')}, this salcli reads {SCHEMA}; {found.cure}"
        )


def write_arrays(path: Path, kind: str, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> None:
    """A file of arrays that fit in memory."""
    with creating(path, kind, about) as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array)


def read_arrays(found: Found, kind: str) -> dict[str, np.ndarray]:
    """All arrays of a file."""
    with reading(found, kind) as file:
        return {name: np.asarray(file[name]) for name in file}


def read_array(found: Found, kind: str, name: str) -> np.ndarray:
    """One array of a file."""
    with reading(found, kind) as file:
        return np.asarray(file[name])


@dataclass(frozen=True)
class Stored:
    """Where an array lies in a file. One that does not lie in one piece is in memory already."""

    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    whole: np.ndarray | None = None

    @classmethod
    def of(cls, path: Path, stored: h5py.Dataset) -> Stored:
        """An array of an open file."""
        if not isinstance(stored, h5py.Dataset):
            raise TypeError(f"its {str(stored.name).strip('/')} are a group")
        offset = stored.id.get_offset()  # None without data, and where they do not lie in one piece
        whole = None
        if offset is None or stored.external or not stored.dtype.isnative or stored.size == 0:
            whole = stored[()]
            whole.setflags(write=False)
        return cls(path, stored.dtype, stored.shape, offset or 0, whole)

    def open(self) -> np.ndarray:
        """A read-only map of it, also after the file was closed: what is not looked at takes no memory."""
        if self.whole is not None:
            return self.whole
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape)


def about(file: h5py.File) -> dict[str, Any]:
    """How a file was made."""
    content: dict[str, Any] = json.loads(file.attrs["about"])
    return content
