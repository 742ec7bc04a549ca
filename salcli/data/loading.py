"""Find a data set below the root of all data: one's own folder or .npz first, then the files as they are published."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from salcli.data.array_files import read_npz
from salcli.data.catalogue import data_set
from salcli.data.image_folder import read_folder
from salcli.data.stand_in import stand_ins
from salcli.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from salcli.data.catalogue import DataSet
    from salcli.data.image_set import Source


def load_source(name: str, root: Path) -> Source:
    """The set, not decoded yet."""
    entry = data_set(name)
    try:
        source = _load(entry, root)
    except OSError as error:
        where = error.filename or root
        raise DataError(f"{name}: {where} cannot be read ({error.strerror}); mend that, or move it away") from None
    return source if entry.labeled else source.unlabeled()


def read_from(name: str, root: Path) -> list[Path]:
    """The files and folders that a set is read from; none where it comes with salcli."""
    entry = data_set(name)
    own = _own(entry, root)
    if own:
        return [own]
    return read_from(entry.part_of, root) if entry.part_of else [root / file for file in entry.files]


def _load(entry: DataSet, root: Path) -> Source:
    own = _own(entry, root)
    if own:
        read = read_npz if own.suffix == ".npz" else read_folder
        return read(own, labeled=entry.labeled)
    if entry.part_of:
        return _classes(load_source(entry.part_of, root), entry)
    missing = [name for name in entry.files if not (root / name).exists()]
    if missing:
        looked_for = f"{', '.join(missing)}, {entry.name}/ and {entry.name}.npz"
        raise DataError(
            f"{entry.name} is not there: looked for {looked_for} in {root}; "
            f"get it with: salcli data fetch {entry.name}, or put a folder or .npz file of your own there"
        )
    return entry.load(root)


def _own(entry: DataSet, root: Path) -> Path | None:
    """The folder or .npz file that stands in for a set."""
    found = stand_ins(entry.name, root)
    if len(found) > 1:
        raise DataError(f"both {found[0]} and {found[1]} stand for {entry.name}; keep one of them")
    return found[0] if found else None


def _classes(whole: Source, entry: DataSet) -> Source:
    """Some classes of a set, numbered from 0."""
    first, last = entry.classes[0], entry.classes[-1]
    if whole.labels is None or last >= len(whole.class_names):
        raise DataError(
            f"{entry.name} is classes {first} to {last} of {entry.part_of}, "
            f"but what stands for that has {len(whole.class_names)} classes"
        )
    chosen = whole.take(np.flatnonzero((whole.labels >= first) & (whole.labels <= last)))
    assert chosen.labels is not None
    return type(whole)(
        chosen.pictures, chosen.labels - first, whole.class_names[first : last + 1], chosen.is_test, whole.fit
    )
