"""Opponents that need no more than stored features: positive-unlabeled learning, AdaDetect, OODD, RTL. (Deal → scores)

Each gives outlier scores of the ID and OOD test samples. The positive-unlabeled methods are told the true π.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from benchmarks.wild.deals import Deal, Part
from salcli.methods.mixture import MEMBERS, NormalQuantiles

Inputs = Callable[[Part], NDArray[np.float64]]
Scores = tuple[NDArray[np.float64], NDArray[np.float64]]
RIDGE = 0.01  # ½ · RIDGE · ‖w‖² on a mean loss


def standardized(deal: Deal) -> tuple[Inputs, NDArray, NDArray]:
    """Features as z-scores of the labeled ID data, these (with the training data where frozen), and the wild data."""
    known = [deal.calibration.feature.double().numpy()]
    if deal.frozen:
        known.append(deal.train.feature.double().numpy())
    labeled = np.concatenate(known)
    mean, std = labeled.mean(0), labeled.std(0) + 1e-6

    def inputs(part: Part) -> NDArray[np.float64]:
        return (part.feature.double().numpy() - mean) / std

    return inputs, (labeled - mean) / std, inputs(deal.wild)


def _logistic(x: NDArray, y: NDArray, weight: NDArray | None = None) -> Callable[[NDArray], NDArray]:
    from sklearn.linear_model import LogisticRegression

    if weight is None:
        weight = np.where(y, 0.5 / y.mean(), 0.5 / (1 - y.mean()))  # both sides count the same
    strength = 1 / (RIDGE * len(y))
    return LogisticRegression(C=strength, max_iter=200).fit(x, y, sample_weight=weight).decision_function


def nnpu(deal: Deal, pi: float) -> Scores:
    """nnPU, positive-unlabeled learning with the logistic loss (Kiryo et al., 2017); ID is the positive class."""
    from scipy.optimize import minimize

    inputs, known, wild = standardized(deal)
    share = 1 - max(pi, 0.01)

    def objective(w: NDArray) -> tuple[float, NDArray]:
        a, b = known @ w[:-1] + w[-1], wild @ w[:-1] + w[-1]
        down_a, down_b, up_a = -_sigmoid(-a), _sigmoid(b), _sigmoid(a)
        negative = np.logaddexp(0, b).mean() - share * np.logaddexp(0, a).mean()
        ga, gb = share * down_a / len(a), np.zeros(len(b))
        if negative > 0:
            ga, gb = ga - share * up_a / len(a), down_b / len(b)
        loss = share * np.logaddexp(0, -a).mean() + max(0.0, negative) + 0.5 * RIDGE * w[:-1] @ w[:-1]
        return loss, np.r_[ga @ known + gb @ wild + RIDGE * w[:-1], ga.sum() + gb.sum()]

    w = minimize(objective, np.zeros(known.shape[1] + 1), jac=True, method="L-BFGS-B", options={"maxiter": 100}).x
    return tuple(-(inputs(part) @ w[:-1]) for part in (deal.id_test, deal.ood_test))  # type: ignore[return-value]


def cvir(deal: Deal, pi: float) -> Scores:
    """CVIR (Garg et al., 2021): the wild samples that are most like ID are left out of the negatives."""
    inputs, known, wild = standardized(deal)
    n_kept = max(5, round(max(pi, 0.01) * len(wild)))
    kept = np.arange(len(wild))
    for _ in range(6):
        outlier = _logistic(np.concatenate([known, wild[kept]]), np.r_[np.zeros(len(known)), np.ones(len(kept))] > 0)
        kept = np.argsort(-outlier(wild))[:n_kept]
    return outlier(inputs(deal.id_test)), outlier(inputs(deal.ood_test))


def adadetect(deal: Deal, pi: float) -> Scores:
    """Half of the calibration data against the other half and the wild data (Marandon et al., 2024)."""
    inputs, _, wild = standardized(deal)
    first, second = np.array_split(inputs(deal.calibration), 2)
    x = np.concatenate([first, second, wild])
    outlier = _logistic(x, np.arange(len(x)) >= len(first))
    return outlier(inputs(deal.id_test)), outlier(inputs(deal.ood_test))


def oodd(deal: Deal, pi: float) -> Scores:
    """Similarity to the nearest labeled sample, less that to a dictionary of the least ID-like wild samples (2025)."""
    unit = [part.feature.double().numpy() for part in (deal.train, deal.wild, deal.id_test, deal.ood_test)]
    train, wild, *tests = (one / (np.linalg.norm(one, axis=1, keepdims=True) + 1e-12) for one in unit)
    score, threshold = _committee(deal, deal.wild), np.quantile(_committee(deal, deal.calibration), 0.95)
    dictionary = wild[score > threshold] if (score > threshold).any() else wild[[score.argmax()]]

    def similarity(x: NDArray, others: NDArray) -> NDArray:
        k = min(5, len(others))
        return np.concatenate([np.partition(own @ others.T, -k, axis=1)[:, -k] for own in np.array_split(x, 20)])

    return tuple(similarity(x, dictionary) - similarity(x, train) for x in tests)  # type: ignore[return-value]


def rtl(deal: Deal, pi: float) -> Scores:
    """Ridge regression of a base score, here the committee, on the wild features (Fan et al., 2024)."""
    inputs, _, wild = standardized(deal)
    base = _committee(deal, deal.wild)
    gram = wild.T @ wild / len(wild) + 0.1 * np.eye(wild.shape[1])
    w = np.linalg.solve(gram, wild.T @ (base - base.mean()) / len(wild))
    return inputs(deal.id_test) @ w, inputs(deal.ood_test) @ w


def committee(deal: Deal, pi: float) -> Scores:
    return _committee(deal, deal.id_test), _committee(deal, deal.ood_test)


def _committee(deal: Deal, part: Part) -> NDArray[np.float64]:
    pool = deal.calibration.with_others(deal.wild).columns(MEMBERS)
    return NormalQuantiles.fit(pool).committee(part.columns(MEMBERS)).numpy()


def _sigmoid(x: NDArray) -> NDArray:
    return np.exp(-np.logaddexp(0, -x))


RIVALS = {"nnPU": nnpu, "CVIR": cvir, "AdaDetect": adadetect, "OODD": oodd, "RTL": rtl, "Committee": committee}
