"""Lists of image files: a CSV of path,label."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

import numpy as np

from salcli.data.image_set import Source
from salcli.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATH, LABEL, SPLIT = "path", "label", "split"
PARTS = {"train": False, "test": True}
LAYOUT = "a line for each image: its path, a comma, its label; or more columns below a header that names path and label"


def read_list(file: Path, *, labeled: bool) -> Source:
    """The images of a CSV. Relative paths count from its folder; a header is one if a cell of it says `path`."""
    rows = list(_rows(file, labeled=labeled))
    if not rows:
        raise DataError(f"{file} lists no images; it should have {LAYOUT}")
    pictures = tuple(file.parent / row[PATH] for row in rows)
    if not labeled:
        return Source(pictures)
    names = class_order({row[LABEL] for row in rows})
    number = {name: k for k, name in enumerate(names)}
    labels = np.array([number[row[LABEL]] for row in rows], dtype=np.int64)
    return Source(pictures, labels, names, _is_test(file, rows))


def class_order(names: set[str]) -> tuple[str, ...]:
    """Alphabetical; numbers by their value, so that they can be the class numbers of a trained network."""
    if all(name.isdecimal() for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def _rows(file: Path, *, labeled: bool) -> Iterator[dict[str, str]]:
    wanted = [PATH, LABEL] if labeled else [PATH]
    columns: dict[str, int] | None = None
    # names of files need not be text
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            for row in reader:
                if not any(cell.strip() for cell in row):
                    continue
                if columns is None:
                    columns = _columns(file, row, wanted)
                    if _is_header(row):
                        continue
                yield _row(file, reader.line_num, row, columns, wanted)
        except csv.Error as error:
            raise DataError(f"{file}, line {reader.line_num}: {error}; it should have {LAYOUT}") from None


def _is_header(row: list[str]) -> bool:
    return PATH in _names(row)


def _names(row: list[str]) -> list[str]:
    return [cell.strip().lower() for cell in row]


def _columns(file: Path, first: list[str], wanted: list[str]) -> dict[str, int]:
    """Where each column stands, read off the first row."""
    if not _is_header(first):
        return {name: place for place, name in enumerate(wanted)}
    found = {name: place for place, name in enumerate(_names(first)) if name in (PATH, LABEL, SPLIT)}
    missing = [name for name in wanted if name not in found]
    if missing:
        raise DataError(f"{file} has no column {', '.join(missing)}; it should have {LAYOUT}")
    return found


def _row(file: Path, line: int, row: list[str], columns: dict[str, int], wanted: list[str]) -> dict[str, str]:
    cells = {name: row[place] if place < len(row) else "" for name, place in columns.items()}
    cells |= {name: cells[name].strip() for name in (LABEL, SPLIT) if name in cells}
    empty = [name for name in wanted if not cells[name]]
    if empty:
        raise DataError(f"{file}, line {line}: there is no {' and no '.join(empty)}; it should have {LAYOUT}")
    return cells


def _is_test(file: Path, rows: list[dict[str, str]]) -> np.ndarray | None:
    """What the column `split` says, None where there is none."""
    if SPLIT not in rows[0]:
        return None
    odd = {row[SPLIT] for row in rows} - set(PARTS)
    if odd:
        raise DataError(f"{file}: the column split must hold train or test, got {sorted(odd)[0]!r}")
    return np.array([PARTS[row[SPLIT]] for row in rows])
