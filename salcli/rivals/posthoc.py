"""Scores that need the ID classifier alone."""

from __future__ import annotations

from jaxtyping import Float, Int
from pytorch_ood.detector import KNN, EnergyBased, MaxSoftmax
from torch import Tensor


def msp(logits: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
    """The largest softmax probability (Hendrycks and Gimpel, 2017)."""
    score: Tensor = -MaxSoftmax.score(logits.double())
    return score


def energy(logits: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
    """logsumexp of the logits, temperature 1 (Liu et al., 2020)."""
    score: Tensor = -EnergyBased.score(logits.double(), t=1.0)
    return score


def knn(
    features: Float[Tensor, "n d"], id_features: Float[Tensor, "m d"], id_labels: Int[Tensor, " m"], k: int
) -> Float[Tensor, " n"]:
    """Minus the distance to the k-th nearest ID training feature, on the unit sphere (Sun et al., 2022)."""
    detector = KNN(None, k=k).fit_features(id_features, id_labels)
    score: Tensor = -detector.predict_features(features)
    return score
