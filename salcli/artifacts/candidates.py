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


@dataclass(frozen=True)
class Candidates:
    """index, tau and predicted: of the candidates, in the order of the wild set. The rest is for a second look."""

    index: np.ndarray  # into the wild set
    tau: np.ndarray
    predicted: np.ndarray
    wild_tau: np.ndarray  # of every wild sample
    calibration_tau: np.ndarray
    threshold: float
    network: str  # fingerprints of the classifier and the wild mixture they belong to
    wild: str

    @property
    def is_candidate(self) -> np.ndarray:
        """For every wild sample."""
        mask = np.zeros(len(self.wild_tau), bool)
        mask[self.index] = True
        return mask


def write_candidates(path: Path, candidates: Candidates, made_with: Mapping[str, Any]) -> None:
    """Store everything."""
    links = {"network": candidates.network, "wild": candidates.wild, "threshold": candidates.threshold}
    with creating(path, KIND, {**links, **made_with}) as file:
        for name in ("index", "tau", "predicted", "wild_tau", "calibration_tau"):
            file.create_dataset(name, data=getattr(candidates, name))


def read_candidates(found: Found) -> Candidates:
    """Everything."""
    with reading(found, KIND) as file:
        arrays = {name: np.asarray(file[name]) for name in file}
        links = about(file)
        return Candidates(**arrays, threshold=links["threshold"], network=links["network"], wild=links["wild"])


def read_filter_params(found: Found) -> dict[str, Any]:
    """The filter section of params.yaml that they were chosen with."""
    with reading(found, KIND) as file:
        chosen_with: dict[str, Any] = about(file)["filter"]
        return chosen_with
