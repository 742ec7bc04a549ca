"""review: the candidate outliers of an experiment, and the wild samples just below the threshold, for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from salcli.artifacts import layout
from salcli.artifacts.candidates import read_candidates
from salcli.artifacts.gradients import GradientFile
from salcli.artifacts.images import read_image_set
from salcli.artifacts.review import KEEP, ReviewRow, filter_mark
from salcli.errors import BadArtifactError
from salcli.stages.wild_files import wild_files

if TYPE_CHECKING:
    from salcli.artifacts.candidates import Candidates
    from salcli.artifacts.layout import Workspace
    from salcli.params import Params


def run(workspace: Workspace, params: Params, ood: str, seed: int, n_below: int) -> list[ReviewRow]:
    """Every candidate, highest score first, then `n_below` samples that might be added."""
    found = workspace.find(layout.candidates(ood, seed))
    candidates = read_candidates(found)
    index = np.concatenate([ranked_candidates(candidates), just_below(candidates, n_below)])
    predicted = predicted_classes(workspace, params, candidates, ood, seed)
    files = wild_files(workspace, params.data.id, ood, seed, index)
    mark, is_candidate = filter_mark(found), candidates.is_candidate
    return [
        ReviewRow(
            ood=ood,
            seed=seed,
            filter=mark,
            index=int(i),
            file=file,
            score=float(candidates.wild_score[i]),
            predicted=predicted[i],
            decision=KEEP if is_candidate[i] else "",
        )
        for i, file in zip(index, files, strict=True)
    ]


def ranked_candidates(candidates: Candidates) -> np.ndarray:
    """Wild samples above the threshold, highest outlier score first."""
    return candidates.index[np.argsort(-candidates.score, kind="stable")]


def just_below(candidates: Candidates, n: int) -> np.ndarray:
    """The n wild samples at or below the threshold with the highest outlier score."""
    rest = np.flatnonzero(~candidates.is_candidate)
    return rest[np.argsort(-candidates.wild_score[rest], kind="stable")][:n]


def predicted_classes(workspace: Workspace, params: Params, candidates: Candidates, ood: str, seed: int) -> list[str]:
    """The name of the class that each wild sample is predicted as."""
    gradients = GradientFile.open(workspace.find(layout.wild_gradients(ood, seed)))
    if (gradients.network, gradients.wild) != (candidates.network, candidates.wild):
        cure = workspace.how_to_make(layout.candidates(ood, seed))
        raise BadArtifactError(f"{gradients.found.path} is newer than the candidates; choose them again: {cure}")
    names = read_image_set(workspace.find(layout.prepared_set(params.data.id))).class_names
    return [names[label] for label in gradients.predicted.tolist()]
