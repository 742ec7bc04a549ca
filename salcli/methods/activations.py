"""Energy after activations or weights were cut or scaled: ReAct, DICE, ASH, SCALE."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from salcli.methods.base import Head, Known, Percentile, PostHoc, Section, method
from salcli.methods.logits import energy
from salcli.sal.gradients import Representation


class PercentileParams(Section):
    """Where to cut."""

    percentile: Percentile


@method("react", label="ReAct", paper="Sun et al., 2021")
class React(PostHoc):
    """Energy of features clipped at a percentile of all ID training activations."""

    Params = PercentileParams
    head: Head
    limit: float

    def fit(self, known: Known) -> None:
        self.head = known.head
        self.limit = float(np.percentile(known.features.numpy(), self.params.percentile))

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        return energy(self.head.logits(x.feature.clamp(max=self.limit)))


@method("dice", label="DICE", paper="Sun and Li, 2022")
class Dice(PostHoc):
    """Energy with only the weights whose mean contribution on ID data is above a percentile of all."""

    Params = PercentileParams
    sparse: Head

    def fit(self, known: Known) -> None:
        contribution = known.head.weight * known.features.mean(dim=0, dtype=torch.float64)  # K, D
        is_kept = contribution > float(np.percentile(contribution.numpy(), self.params.percentile))
        self.sparse = Head(known.head.weight * is_kept, known.head.bias)

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        return energy(self.sparse.logits(x.feature))


def largest(features: Float[Tensor, "n d"], percentile: float) -> tuple[Tensor, Tensor, Float[Tensor, " n"]]:
    """Each sample's activations above the percentile, their indices, and exp(sum of all / sum of these).

    At least one is kept. The ratio is at most d over their number, because the others are smaller; it is below 1 where
    those are negative, as those of vectors may be. A sample without activations has the ratio 1.
    """
    n_kept = max(1, features.shape[1] - round(features.shape[1] * percentile / 100))
    values, index = features.topk(n_kept, dim=1)
    after = values.sum(dim=1)
    ratio = torch.where(after > 0, features.sum(dim=1) / after, 1.0)
    return values, index, ratio.exp()


@method("ash", label="ASH", paper="Djurisic et al., 2023")
class Ash(PostHoc):
    """ASH-S: energy of a sample's largest activations, times exp(sum before / sum after)."""

    Params = PercentileParams
    head: Head

    def fit(self, known: Known) -> None:
        self.head = known.head

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        features = x.feature.double()
        values, index, factor = largest(features, self.params.percentile)
        pruned = torch.zeros_like(features).scatter(1, index, values * factor[:, None])
        return energy(self.head.logits(pruned))


@method("scale", label="SCALE", paper="Xu et al., 2024")
class Scale(Ash):
    """Energy of all activations, times ASH's exp(sum of all / sum of the largest): nothing is cut."""

    def score(self, x: Representation) -> Float[Tensor, " n"]:
        features = x.feature.double()
        return energy(self.head.logits(features * largest(features, self.params.percentile)[2][:, None]))
