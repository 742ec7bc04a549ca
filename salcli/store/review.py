"""The review list as a file: what a person decided about candidates, and which samples are outliers then.

A CSV file that survives any spreadsheet. It names the run of the filter that it is about, and is refused after another
one. A person decides by the samples, not by the truth about the wild data, so SAL may use it.
"""

import csv
import hashlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from salcli.errors import SalError, check_regular, did_you_mean
from salcli.store.files import Found, fingerprint
from salcli.store.formats import Candidates
from salcli.store.layout import Experiment

KEEP, DROP, ADD = "keep", "drop", "add"
WORDS = (KEEP, DROP, ADD, "")  # empty: as the filter decided
READ = ("ood", "seed", "filter", "index", "decision")  # the others are for the person
MOST_BYTES = 1 << 28
FORMULA = re.compile(r"^[=+\-@\t\r]")  # what a spreadsheet would take for a formula
NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
MARK = re.compile(r"(?P<experiment>filter-.+-pi-[^-]+)-[0-9a-f]{16}")


def filter_mark(found: Found, experiment: Experiment) -> str:
    """Identifies a run of the filter. The prefix keeps spreadsheets from taking it for a number."""
    return f"{_mark_of(experiment)}-{fingerprint(found.path)}"


def _mark_of(experiment: Experiment) -> str:
    return f"filter-{experiment.variant}-pi-{experiment.pi}"


def as_cell(name: object) -> str:
    """A name from the data as harmless text: not a formula, no control characters."""
    text = NOT_TEXT.sub("\N{REPLACEMENT CHARACTER}", str(name))
    return f"'{text}" if FORMULA.match(text) else text


@dataclass(frozen=True)
class Decision:
    """What a person decided about one wild sample, and the line that says so."""

    line: int
    ood: str
    seed: str
    filter: str
    index: int
    word: str


def read_review(path: Path) -> list[Decision]:
    """Every decision. The separator may be that of any spreadsheet, with or without a byte order mark."""
    check_regular(path)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise SalError(f"{path} is too large to be a review list")
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except FileNotFoundError:
        raise SalError(f"{path} does not exist; write it with: salcli review --out {path}") from None
    separator = max(",;\t", key=text.partition("\n")[0].count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        missing = [name for name in READ if name not in (reader.fieldnames or [])]
        if missing:
            raise SalError(
                f"{path} has no column {', '.join(missing)}, so it is not a review list; write one with: salcli review"
            )
        return [_decision(path, reader.line_num, row) for row in reader if any(row.values())]
    except csv.Error as error:
        raise SalError(
            f"{path}, line {reader.reader.line_num}: {error}; fix it, or write the list again: salcli review"
        ) from None


def _decision(path: Path, line: int, row: dict[str, str | None]) -> Decision:
    ood, seed, mark, index, word = ((row[name] or "").strip() for name in READ)
    word = word.lower()
    if word not in WORDS:
        raise SalError(
            f"{path}, line {line}: decision must be keep, drop, add or empty, got {word}{did_you_mean(word, WORDS)}"
        )
    if not index.isdecimal():
        raise SalError(f"{path}, line {line}: index must be a number that `salcli review` wrote, got {index or 'none'}")
    return Decision(line, ood, seed, mark, int(index), word)


@dataclass(frozen=True)
class Reviewed:
    """Which wild samples are taken for outliers after the review."""

    is_candidate: np.ndarray
    n_dropped: int
    n_added: int
    n_unseen: int  # candidates that the list does not name: they stay

    @property
    def about(self) -> dict[str, Any]:
        """What tells this training set from others; the path of the list does not matter."""
        marks = hashlib.sha256(self.is_candidate.tobytes()).hexdigest()[:16]
        return {"dropped": self.n_dropped, "added": self.n_added, "candidates": marks}

    def __str__(self) -> str:
        unseen = f", {self.n_unseen} not in the list stay" if self.n_unseen else ""
        return f"reviewed: {self.n_dropped} candidates dropped, {self.n_added} wild samples added{unseen}"


def reviewed(path: Path, candidates: Candidates, found: Found, experiment: Experiment) -> Reviewed | None:
    """The corrected candidates, or None if the list says nothing about this experiment.

    `found` is the file of the candidates. A line about another run of its filter is an error.
    """
    before = candidates.is_candidate
    is_candidate = before.copy()
    named: dict[int, Decision] = {}
    for row in read_review(path):
        if not _is_about(path, row, found, experiment):
            continue
        _check(path, row, before, named)
        named[row.index] = row
        is_candidate[row.index] = row.word == ADD or (before[row.index] and row.word != DROP)
    if not named:
        return None
    if not is_candidate.any():
        raise SalError(f"{path} drops every candidate of {experiment}; keep some to learn from")
    return Reviewed(
        is_candidate=is_candidate,
        n_dropped=int((before & ~is_candidate).sum()),
        n_added=int((is_candidate & ~before).sum()),
        n_unseen=int(before.sum()) - sum(bool(before[index]) for index in named),
    )


def _is_about(path: Path, row: Decision, found: Found, experiment: Experiment) -> bool:
    if (row.ood, row.seed) != (as_cell(experiment.ood), str(experiment.seed)):
        return False
    known, mark = MARK.fullmatch(row.filter), filter_mark(found, experiment)
    if known and known["experiment"] != _mark_of(experiment):  # another π or variant
        return False
    if row.filter != mark:
        made_by = found.made_by or experiment.candidates.made_by  # the first has --scratch for a scratch run
        command = made_by.replace("salcli filter", "salcli review")
        raise SalError(
            f"{path}, line {row.line} is about another run of the filter ({row.filter or 'none'}) than the one "
            f"here ({mark}); write the list again: {command}"
        )
    return True


def _check(path: Path, row: Decision, is_candidate: np.ndarray, named: dict[int, Decision]) -> None:
    where = f"{path}, line {row.line}: wild sample {row.index}"
    if row.index >= len(is_candidate):
        raise SalError(f"{where} does not exist; there are {len(is_candidate)}, counted from 0")
    if row.word in (KEEP, DROP) and not is_candidate[row.index]:
        raise SalError(f"{where} is not a candidate, so there is nothing to {row.word}; write add to make it one")
    if row.word == ADD and is_candidate[row.index]:
        raise SalError(f"{where} is already a candidate; write keep or drop")
    known = named.get(row.index)
    if known and known.word != row.word:
        raise SalError(f"{where} has another decision than in line {known.line}; remove one of them")
