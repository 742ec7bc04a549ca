"""Lists of candidate outliers for a person to correct: CSV that comes back whole from a spreadsheet."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from salcli.artifacts.atomic import write_text
from salcli.artifacts.fingerprint import fingerprint
from salcli.errors import ReviewError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from salcli.artifacts.layout import Found

KEEP, DROP, ADD = "keep", "drop", "add"
WORDS = (KEEP, DROP, ADD, "")  # nothing: as the filter decided
COLUMNS = ("ood", "seed", "filter", "index", "file", "score", "predicted", "decision")
READ = ("ood", "seed", "filter", "index", "decision")  # the others are for the person
MOST_BYTES = 1 << 28
# what a spreadsheet would take for a formula
FORMULA = re.compile(r"^[=+\-@\t\r]")
NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True)
class ReviewRow:
    """One wild sample as a person sees it."""

    ood: str
    seed: int
    filter: str  # which run of the filter it is about
    index: int  # into the wild set
    file: str  # empty where it is not known
    score: float
    predicted: str
    decision: str


@dataclass(frozen=True)
class Decision:
    """What a person decided about one wild sample, and where the list says so."""

    line: int
    ood: str
    seed: str
    filter: str
    index: int
    word: str


def filter_mark(found: Found) -> str:
    """Tells one run of the filter from others. The prefix keeps spreadsheets from taking it for a number."""
    return f"filter-{fingerprint(found)}"


def as_cell(name: object) -> str:
    """A name from the data as harmless text: no formula, nothing that is not text."""
    text = NOT_TEXT.sub("\N{REPLACEMENT CHARACTER}", str(name))
    return f"'{text}" if FORMULA.match(text) else text


def write_review(path: Path, rows: Iterable[ReviewRow]) -> None:
    """All rows, as they come."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        names = {"ood": as_cell(row.ood), "file": as_cell(row.file), "predicted": as_cell(row.predicted)}
        writer.writerow({**asdict(row), **names, "score": f"{row.score:.6g}"})
    write_text(path, text.getvalue())


def read_review(path: Path) -> list[Decision]:
    """Every decision. Separators and the mark at the start may be those of any spreadsheet."""
    text = _text_of(path)
    head = text.partition("\n")[0]
    separator = max(",;\t", key=head.count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        missing = [name for name in READ if name not in (reader.fieldnames or [])]
        if missing:
            raise ReviewError(
                f"{path} has no column {', '.join(missing)}, so it is no list for review; write one with: salcli review"
            )
        return [_decision(path, reader.line_num, row) for row in reader if any(row.values())]
    except csv.Error as error:
        raise ReviewError(
            f"{path}, line {reader.reader.line_num}: {error}; mend it, or write it anew: salcli review"
        ) from None


def _text_of(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ReviewError(f"{path} is too large to be a list for review")
        return path.read_text(encoding="utf-8-sig", errors="replace")
    except FileNotFoundError:
        raise ReviewError(f"{path} does not exist; write it with: salcli review --out {path}") from None


def _decision(path: Path, line: int, row: dict[str, str | None]) -> Decision:
    ood, seed, mark, index, word = ((row[name] or "").strip() for name in READ)
    word = word.lower()
    if word not in WORDS:
        raise ReviewError(
            f"{path}, line {line}: decision must be keep, drop, add or nothing, got {word}{did_you_mean(word, WORDS)}"
        )
    if not index.isdecimal():
        raise ReviewError(
            f"{path}, line {line}: index must be a number that `salcli review` wrote, got {index or 'none'}"
        )
    return Decision(line, ood, seed, mark, int(index), word)
