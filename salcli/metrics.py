"""FPR95, AUROC and AUPR. ID is the positive class; a higher score is more ID-like."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from salcli.errors import MetricsError

Scores = NDArray[np.floating]


@dataclass(frozen=True)
class OodMetrics:
    """All metrics of one method on one pair of test sets, as shares between 0 and 1."""

    fpr95: float
    auroc: float
    aupr_in: float
    aupr_out: float


def fpr_at_tpr(id_scores: Scores, ood_scores: Scores, tpr: float = 0.95) -> float:
    """The share of OOD at or above the highest threshold that keeps at least `tpr` of ID."""
    _check(id_scores, ood_scores)
    n_kept = max(1, math.ceil(tpr * len(id_scores) - 1e-9))
    threshold = np.partition(id_scores, len(id_scores) - n_kept)[len(id_scores) - n_kept]
    return float(np.mean(ood_scores >= threshold))


def ood_metrics(id_scores: Scores, ood_scores: Scores) -> OodMetrics:
    """Every metric of the tables."""
    is_id, ranks = _ranked(id_scores, ood_scores)
    return OodMetrics(
        fpr95=fpr_at_tpr(id_scores, ood_scores),
        auroc=float(roc_auc_score(is_id, ranks)),
        aupr_in=float(average_precision_score(is_id, ranks)),
        aupr_out=float(average_precision_score(1 - is_id, -ranks)),
    )


def roc_points(id_scores: Scores, ood_scores: Scores, n_points: int = 201) -> tuple[Scores, Scores]:
    """The ROC as the best TPR at FPR 0, 0.005, …, 1: enough for a picture, whatever the sample size."""
    fpr, tpr, _ = roc_curve(*_ranked(id_scores, ood_scores), drop_intermediate=False)
    grid = np.linspace(0, 1, n_points)
    return grid, tpr[np.searchsorted(fpr, grid + 1e-12, side="right") - 1]


def _ranked(id_scores: Scores, ood_scores: Scores) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which samples are ID, and the rank of each score. Ranks keep order and ties, and are always finite."""
    _check(id_scores, ood_scores)
    _, ranks = np.unique(np.concatenate([id_scores, ood_scores]), return_inverse=True)
    is_id = np.concatenate([np.ones(len(id_scores), np.int64), np.zeros(len(ood_scores), np.int64)])
    return is_id, ranks


def _check(id_scores: Scores, ood_scores: Scores) -> None:
    for name, scores in (("ID", id_scores), ("OOD", ood_scores)):
        if len(scores) == 0:
            raise MetricsError(f"there are no {name} scores to evaluate")
        n_nan = int(np.isnan(scores).sum())
        if n_nan:
            raise MetricsError(
                f"{n_nan} of {len(scores)} {name} scores are NaN, so no metric is defined; "
                "the network that gave them did not stay finite: train it again with a smaller learning rate"
            )
