"""Scores that compare features with those of the ID training data: KNN, Mahalanobis, ViM. Higher = more ID-like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from salcli.rivals.head import Head

QUERIES_AT_ONCE = 4096
# Variances this far below the largest are rounding: of features stored in float32 …
ROUNDING = 1e-12
# … and of what pytorch-ood computes from them in float32.
FLOAT32_ROUNDING = 1e-6


def fitted_knn(
    id_features: Float[Tensor, "m d"],
    id_labels: Int[Tensor, " m"],
    k: int,
    queries_at_once: int = QUERIES_AT_ONCE,
) -> Callable[[Tensor], Tensor]:
    """Minus the distance to the k-th nearest ID training feature, on the unit sphere (Sun et al., 2022).

    Exact, and in bounded memory: a chunk of queries at a time, within which scikit-learn goes block by block.
    """
    from pytorch_ood.detector import KNN

    detector = KNN(None, k=k).fit_features(id_features, id_labels)

    def score(features: Tensor) -> Tensor:
        chunks = features.split(queries_at_once)  # type: ignore[no-untyped-call]
        return -torch.cat([detector.predict_features(chunk) for chunk in chunks])

    return score


def knn(
    features: Float[Tensor, "n d"],
    id_features: Float[Tensor, "m d"],
    id_labels: Int[Tensor, " m"],
    k: int,
    queries_at_once: int = QUERIES_AT_ONCE,
) -> Float[Tensor, " n"]:
    """KNN, fitted and asked at once."""
    return fitted_knn(id_features, id_labels, k, queries_at_once)(features)


@dataclass(frozen=True)
class TiedGaussians:
    """One Gaussian for each class, all with the same covariance (Lee et al., 2018); no input noise.

    A singular covariance is inverted as the authors do it, by its pseudo-inverse: directions in which the ID training
    data do not spread (dead units, for example) do not count. Ours, in float64: pytorch-ood inverts in float32.
    """

    mean: Float[Tensor, "c d"]
    precision: Float[Tensor, "d d"]
    rank: int

    @classmethod
    def fit(cls, id_features: Float[Tensor, "m d"], id_labels: Int[Tensor, " m"]) -> TiedGaussians:
        """Class means, and the covariance around them. Classes without a sample are left out."""
        exact, (_, own) = id_features.double(), torch.unique(id_labels, return_inverse=True)
        count = own.bincount()
        mean = exact.new_zeros(len(count), exact.shape[1]).index_add(0, own, exact) / count[:, None]
        centred = exact - mean[own]
        spread, direction = torch.linalg.eigh(centred.T @ centred / len(exact))
        kept = spread > ROUNDING * spread.max()
        precision = (direction[:, kept] / spread[kept]) @ direction[:, kept].T
        return cls(mean, precision, int(kept.sum()))

    def score(self, features: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """Minus the squared distance to the nearest class mean."""
        nearest = torch.full((len(features),), torch.inf, dtype=torch.float64)
        for mean in self.mean:  # one class at a time: n·D numbers, not n·K·D
            centred = features.double() - mean
            nearest = nearest.minimum(((centred @ self.precision) * centred).sum(dim=1))
        return -nearest


def vim_rule(n_features: int) -> int:
    """The dimension of the principal space that ViM's authors recommend; always below the feature width."""
    if n_features >= 2048:
        return 1000
    return 512 if n_features >= 768 else n_features // 2


@dataclass(frozen=True)
class VirtualLogits:
    """ViM (Wang et al., 2022): energy less a virtual logit, the scaled norm of what the principal space leaves over.

    Where the ID training features span fewer dimensions than were asked for, nothing of them would be left over and
    the scale would be undefined: the principal space then has one dimension less than they span.
    """

    detector: Any  # pytorch_ood.detector.ViM
    dim: int
    rank: int

    @classmethod
    def fit(
        cls, head: Head, id_features: Float[Tensor, "m d"], id_labels: Int[Tensor, " m"], dim: int
    ) -> VirtualLogits:
        """The principal space of the training features around the point where all logits vanish."""
        origin = -torch.linalg.pinv(head.weight) @ head.bias
        shifted = id_features.double() - origin
        spread = torch.linalg.eigvalsh(shifted.T @ shifted / len(shifted))
        rank = int((spread > FLOAT32_ROUNDING * spread.max()).sum())
        dim = max(0, min(dim, rank - 1))
        from pytorch_ood.detector import ViM

        detector = ViM(None, dim, head.weight, head.bias).fit_features(id_features, id_labels)
        if rank == 0:  # all training features are the origin: no scale, so the energy alone
            detector.alpha = 0.0
        return cls(detector, dim, rank)

    def score(self, features: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """Energy less the virtual logit."""
        score: Tensor = -self.detector.predict_features(features).double()
        return score
