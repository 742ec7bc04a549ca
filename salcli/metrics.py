"""FPR95, AUROC and AUPR. ID is the positive class; a higher score is more ID-like.

Each side is sorted once, then both are walked through together from the lowest score to the highest, and counted.
Only order and ties decide, so infinities are scores like any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from salcli.errors import MetricsError

if TYPE_CHECKING:
    from collections.abc import Iterator

Scores = NDArray[np.floating]
Counts = NDArray[np.float64]  # floats are exact for these, and faster than integers where they are divided
PIECE = 2**12  # scores at once: all that is computed from them stays in the processor's cache


@dataclass(frozen=True)
class OodMetrics:
    """All metrics of one method on one pair of test sets, as shares between 0 and 1."""

    fpr95: float
    auroc: float
    aupr_in: float
    aupr_out: float


def fpr_at_tpr(id_scores: Scores, ood_scores: Scores, tpr: float = 0.95) -> float:
    """The share of OOD at or above the highest threshold that keeps at least `tpr` of ID."""
    return _fpr_at_tpr(*_sorted(id_scores, ood_scores), tpr)


def ood_metrics(id_scores: Scores, ood_scores: Scores) -> OodMetrics:
    """Every metric of the tables. Areas under precision and recall are sums over all thresholds, not interpolated."""
    ids, oods = _sorted(id_scores, ood_scores)
    n, m = len(ids), len(oods)
    twice_in_order, precision_in, precision_out = 0.0, 0.0, 0.0
    for n_id, n_ood in _counts(ids, oods):
        new_id, new_ood, n_both = np.diff(n_id), np.diff(n_ood), n_id + n_ood
        # pairs whose ID sample is higher count twice, and ties once
        twice_in_order += float(new_id @ (n_ood[1:] + n_ood[:-1]))
        precision_in += float(new_id @ ((n - n_id[:-1]) / (n + m - n_both[:-1])))
        precision_out += float(new_ood @ (n_ood[1:] / n_both[1:]))
    return OodMetrics(
        fpr95=_fpr_at_tpr(ids, oods, 0.95),
        auroc=twice_in_order / (2 * n * m),
        aupr_in=precision_in / n,
        aupr_out=precision_out / m,
    )


def roc_points(id_scores: Scores, ood_scores: Scores, n_points: int = 201) -> tuple[Scores, Scores]:
    """The ROC as the best TPR at FPR 0, 0.005, …, 1: enough for a picture, whatever the sample size."""
    ids, oods = _sorted(id_scores, ood_scores)
    grid = np.linspace(0, 1, n_points)
    # so many OOD samples may be accepted, so all ID samples above the next one are
    n_allowed = np.floor((grid + 1e-12) * len(oods)).astype(np.int64)
    highest_refused = oods[::-1][np.minimum(n_allowed, len(oods) - 1)]
    n_accepted = len(ids) - np.searchsorted(ids, highest_refused, side="right")
    return grid, np.where(n_allowed < len(oods), n_accepted / len(ids), 1.0)


def _fpr_at_tpr(ids: Scores, oods: Scores, tpr: float) -> float:
    n_kept = max(1, math.ceil(tpr * len(ids) - 1e-9))
    n_below = np.searchsorted(oods, ids[len(ids) - n_kept])
    return float((len(oods) - n_below) / len(oods))


def _counts(ids: Scores, oods: Scores) -> Iterator[tuple[Counts, Counts]]:
    """How many ID and OOD samples there are below the lowest score of a piece, and up to each distinct score of it."""
    for id_place, ood_place in _pieces(ids, oods):
        scores = np.concatenate([ids[id_place], oods[ood_place]])
        order = np.argsort(scores, kind="stable")  # of two sorted runs: it merges them
        scores = scores[order]
        last = np.append(np.flatnonzero(scores[1:] != scores[:-1]), len(scores) - 1)
        place, n_here = order[last], id_place.stop - id_place.start
        # the k-th ID sample has k of them up to it, and any other sample as many as are not OOD: that is less
        n_id = np.minimum(place + 1, last - place + n_here)
        yield _growing(id_place.start, n_id), _growing(ood_place.start, last + 1 - n_id)


def _growing(start: int, more: NDArray[np.int64]) -> Counts:
    """The count at the start of a piece, and as it grows."""
    counts = np.empty(len(more) + 1)
    counts[0], counts[1:] = 0, more
    counts += start
    return counts


def _pieces(ids: Scores, oods: Scores) -> Iterator[tuple[slice, slice]]:
    """Places of both sides between the same scores, so that no piece divides equal ones."""
    borders = np.unique(np.concatenate([ids[::PIECE], oods[::PIECE]]))  # with the lowest scores: no piece is empty
    id_ends, ood_ends = ([*np.searchsorted(side, borders).tolist(), len(side)] for side in (ids, oods))
    for id_ends_here, ood_ends_here in zip(pairwise(id_ends), pairwise(ood_ends), strict=True):
        yield slice(*id_ends_here), slice(*ood_ends_here)


def _sorted(id_scores: Scores, ood_scores: Scores) -> tuple[Scores, Scores]:
    """Both sides from the lowest score to the highest, once all are known to be scores."""
    for name, scores in (("ID", id_scores), ("OOD", ood_scores)):
        if len(scores) == 0:
            raise MetricsError(f"there are no {name} scores to evaluate")
    ids, oods = np.sort(id_scores), np.sort(ood_scores)
    for name, scores in (("ID", ids), ("OOD", oods)):
        if np.isnan(scores[-1]):  # NaN is sorted to the end
            raise MetricsError(
                f"{int(np.isnan(scores).sum())} of {len(scores)} {name} scores are NaN, so no metric is defined; "
                "the network that gave them did not stay finite: train it again with a smaller learning rate"
            )
    return ids, oods
