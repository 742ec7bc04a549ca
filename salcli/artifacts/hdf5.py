"""HDF5 files with a kind, a schema version and plain arrays. The same content gives the same bytes."""

from __future__ import annotations

import json
from contextlib import contextmanager
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
    with atomic_path(path) as partial, h5py.File(partial, "w") as file:
        file.attrs["kind"] = kind
        file.attrs["schema"] = SCHEMA
        file.attrs["about"] = json.dumps(about, sort_keys=True)
        yield file


@contextmanager
def reading(found: Found, kind: str) -> Iterator[h5py.File]:
    """An existing file, once it has proved to be whole and of the right kind."""
    try:
        file = h5py.File(found.path, "r")
    except OSError as error:
        raise BadArtifactError(f"{found.path} is damaged or no HDF5 file ({error}); {found.cure}") from None
    with file:
        if file.attrs.get("kind") != kind:
            raise BadArtifactError(
                f"{found.path} holds {file.attrs.get('kind', 'something foreign')}, not {kind}; {found.cure}"
            )
        if file.attrs.get("schema") != SCHEMA:
            raise BadArtifactError(
                f"{found.path} has schema {file.attrs.get('schema')}, this salcli reads {SCHEMA}; {found.cure}"
            )
        yield file


def write_arrays(path: Path, kind: str, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> None:
    """A file of arrays that fit in memory."""
    with creating(path, kind, about) as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array)


def read_arrays(found: Found, kind: str) -> dict[str, np.ndarray]:
    """All arrays of a file."""
    with reading(found, kind) as file:
        return {name: np.asarray(file[name]) for name in file}


def about(file: h5py.File) -> dict[str, Any]:
    """How a file was made."""
    content: dict[str, Any] = json.loads(file.attrs["about"])
    return content
