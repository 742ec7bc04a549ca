"""Candidate outliers and all filtering scores on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from salcli.artifacts.hdf5 import about, creating, reading

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from salcli.artifacts.layout import Found

KIND = "candidates"
ARRAYS = ("index", "score", "predicted", "wild_score", "calibration_score")
FACTS = ("threshold", "score_name", "network", "wild")


@dataclass(frozen=True)
class Candidates:
    """index, score and predicted: of the candidates, in the order of the wild set. The rest is for a second look.

    All scores are outlier scores: higher = outlier. `score_name` tells which (sal is τ).
    """

    index: np.ndarray  # into the wild set
    score: np.ndarray
    predicted: np.ndarray
    wild_score: np.ndarray  # of every wild sample
    calibration_score: np.ndarray
    threshold: float
    score_name: str
    network: str  # fingerprints of the classifier and the wild mixture they belong to
    wild: str

    @property
    def is_candidate(self) -> np.ndarray:
        """For every wild sample."""
        mask = np.zeros(len(self.wild_score), bool)
        mask[self.index] = True
        return mask


def write_candidates(path: Path, candidates: Candidates, made_with: Mapping[str, Any]) -> None:
    """Store everything."""
    facts = {name: getattr(candidates, name) for name in FACTS}
    with creating(path, KIND, {**facts, **made_with}) as file:
        for name in ARRAYS:
            file.create_dataset(name, data=getattr(candidates, name))


def read_candidates(found: Found) -> Candidates:
    """Everything."""
    with reading(found, KIND) as file:
        facts = about(file)
        content: dict[str, Any] = {name: np.asarray(file[name]) for name in ARRAYS}
        return Candidates(**content, **{name: facts[name] for name in FACTS})


def read_filter_params(found: Found) -> dict[str, Any]:
    """The filter section of params.yaml that they were chosen with."""
    with reading(found, KIND) as file:
        chosen_with: dict[str, Any] = about(file)["filter"]
        return chosen_with
