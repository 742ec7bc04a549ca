"""Predictions as rows: CSV and JSON lines, one for each file, in the order of the files."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from salcli.detector.detector import Scanned

COLUMNS = ("path", "class", "probability", "score", "is_ood", "p_value", "error")
IS_OOD = COLUMNS.index("is_ood")
TRUE_OR_FALSE = {True: "true", False: "false", None: None}  # as JSON has it


@dataclass
class Tally:
    """What is said at the end."""

    n_images: int = 0
    n_ood: int = 0
    n_unreadable: int = 0

    def add(self, part: Scanned) -> None:
        """Count some more files."""
        self.n_images += len(part.predictions)
        self.n_ood += int(part.predictions.is_ood.sum())
        self.n_unreadable += len(part.failed)

    def __str__(self) -> str:
        share = f" ({self.n_ood / self.n_images:.1%})" if self.n_images else ""
        unreadable = f", {self.n_unreadable:,} could not be read" if self.n_unreadable else ""
        return f"{self.n_images:,} images, {self.n_ood:,} OOD{share}{unreadable}"


class Writer(Protocol):
    """Takes predictions as they come."""

    def write(self, part: Scanned) -> None:
        """Some more files."""
        ...


class CsvWriter:
    """With a header. Quoted where it must be, so that names with commas, quotes and newlines come back as they were."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._writer = csv.writer(file, lineterminator="\n")
        self._writer.writerow(COLUMNS)

    def write(self, part: Scanned) -> None:
        """One row for each file; of one that gave no image, only the path and the error."""
        found = columns(part)
        found[IS_OOD] = [TRUE_OR_FALSE[value] for value in found[IS_OOD]]
        self._writer.writerows(zip(*found, strict=True))  # None is written as nothing
        self._file.flush()  # for the program that waits at the other end of a pipe


class JsonLinesWriter:
    """One object on each line, with null for what there is not."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, part: Scanned) -> None:
        """One line for each file."""
        for row in rows(part):
            self._file.write(json.dumps(dict(zip(COLUMNS, row, strict=True)), ensure_ascii=False) + "\n")
        self._file.flush()


def columns(part: Scanned) -> list[list[Any]]:
    """Values of COLUMNS, one for each file, in plain Python types. By columns, since there may be millions of rows."""
    found, names = part.predictions, {name: as_text(name) for name in set(part.predictions.classes)}
    own: list[list[Any]] = [
        [names[name] for name in found.classes],
        shortest(found.probabilities),
        shortest(found.scores),
        found.is_ood.tolist(),
        found.p_values.tolist(),
        [None] * len(found),
    ]
    for place in sorted(part.failed):  # in ascending order, so that each place is right when its turn comes
        for column in own:
            column.insert(place, None)
        own[-1][place] = part.failed[place]
    return [[as_text(path) for path in part.files], *own]


def rows(part: Scanned) -> Iterator[tuple[Any, ...]]:
    """The same, file by file."""
    return zip(*columns(part), strict=True)


def as_text(name: str | Path) -> str:
    r"""A name need not be text; a byte of it that is none is written as \xff, so that it can still be told."""
    text = str(name)
    return text if text.isascii() else os.fsencode(text).decode("utf-8", "backslashreplace")


def one_line(text: str) -> str:
    """For people: what would move the cursor is shown as �."""
    return "".join(c if c.isprintable() else "�" for c in text)


def shortest(values: np.ndarray[Any, np.dtype[np.float32]]) -> list[float | None]:
    """Each as the float with the fewest digits that is the same float32; None for what JSON has no number for."""
    finite = np.isfinite(values).tolist()
    return [float(text) if known else None for text, known in zip(values.astype(str).tolist(), finite, strict=True)]
