"""Candidate outliers as a person corrected them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from salcli.artifacts.review import ADD, DROP, KEEP, as_cell, filter_mark, read_review
from salcli.errors import ReviewError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from salcli.artifacts.candidates import Candidates
    from salcli.artifacts.layout import Found
    from salcli.artifacts.review import Decision


@dataclass(frozen=True)
class Reviewed:
    """Which wild samples are taken for outliers after a person has looked at them."""

    is_candidate: np.ndarray
    n_dropped: int
    n_added: int
    n_unseen: int  # candidates that the list does not name: they stay

    @property
    def made_with(self) -> dict[str, Any]:
        """What tells this training set from others."""
        marks = hashlib.sha256(self.is_candidate.tobytes()).hexdigest()[:16]
        return {"dropped": self.n_dropped, "added": self.n_added, "candidates": marks}

    def __str__(self) -> str:
        unseen = f", {self.n_unseen} not in the list stay" if self.n_unseen else ""
        return f"reviewed: {self.n_dropped} candidates dropped, {self.n_added} wild samples added{unseen}"


def reviewed(path: Path, candidates: Candidates, found: Found, ood: str, seed: int) -> Reviewed | None:
    """The corrected candidates; None where the list says nothing about this experiment."""
    everything = read_review(path)
    own = [row for row in everything if (row.ood, row.seed) == (as_cell(ood), str(seed))]
    mark, again = filter_mark(found), f"salcli review --ood {ood} --seed {seed}"
    for row in own:
        if row.filter != mark:
            raise ReviewError(
                f"{path}, line {row.line} is about another run of the filter ({row.filter or 'none'}) than the one "
                f"here ({mark}); write the list anew: {again}"
            )
    if not own:
        return None
    is_candidate, before = candidates.is_candidate, candidates.is_candidate
    named: dict[int, Decision] = {}
    for row in own:
        _check(path, row, before, named)
        named[row.index] = row
        is_candidate[row.index] = row.word == ADD or (before[row.index] and row.word != DROP)
    if not is_candidate.any():
        raise ReviewError(f"{path} drops every candidate of {ood}, seed {seed}; keep some to learn from")
    return Reviewed(
        is_candidate=is_candidate,
        n_dropped=int((before & ~is_candidate).sum()),
        n_added=int((is_candidate & ~before).sum()),
        n_unseen=int(before.sum()) - sum(bool(before[index]) for index in named),
    )


def _check(path: Path, row: Decision, is_candidate: np.ndarray, named: dict[int, Decision]) -> None:
    place = f"{path}, line {row.line}: wild sample {row.index}"
    if row.index >= len(is_candidate):
        raise ReviewError(f"{place} does not exist; there are {len(is_candidate)}, counted from 0")
    if row.word in (KEEP, DROP) and not is_candidate[row.index]:
        raise ReviewError(f"{place} is no candidate, so there is nothing to {row.word}; write add to make it one")
    if row.word == ADD and is_candidate[row.index]:
        raise ReviewError(f"{place} is a candidate already; write keep or drop")
    known = named.get(row.index)
    if known and known.word != row.word:
        raise ReviewError(f"{place} has another decision than in line {known.line}; leave one of them")
