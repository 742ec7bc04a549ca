"""τ (Eq. 4, 6 and Remark 2): the squared projection of a gradient on the direction in which outliers stand out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from salcli.sal.gradients import ALONE, FactorSource, Workers, mean_gradient
from salcli.sal.spectrum import CentredGradients, projections, top_directions

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Direction:
    """All that τ needs, of one class or of all: v, and ⟨∇̄, v⟩ for one ∇̄ or for that of each label."""

    vector: Float[Tensor, "v k d"]  # zero where the gradients do not spread: τ is 0 there
    offset: Float[Tensor, "c v"]

    @classmethod
    def fit(
        cls,
        terms: Sequence[tuple[FactorSource, float]],
        reference: Float[Tensor, "c k d"],
        n_vectors: int,
        workers: Workers = ALONE,
    ) -> Direction:
        """The top directions of the weighted gradients around ∇̄."""
        found = top_directions(
            [(CentredGradients(own, reference, workers), weight) for own, weight in terms], n_vectors
        )
        vector = reference.new_zeros(n_vectors, *reference.shape[1:])
        vector[: len(found)] = found
        return cls(vector, reference.flatten(1) @ vector.flatten(1).T)

    def tau(self, source: FactorSource, workers: Workers = ALONE) -> Float[Tensor, " n"]:
        """Eq. 6: τ_i = ⟨g_i − ∇̄, v⟩²; for several vectors the mean of the squared projections."""
        return projections(source, self.vector, self.offset, workers).square().mean(dim=1).cpu()


def reference_gradients(id_train: FactorSource, n_classes: int, *, class_conditional: bool) -> Float[Tensor, "c k d"]:
    """∇̄ (Eq. 4), or one ∇̄_k for each class (Remark 2)."""
    if not class_conditional:
        return mean_gradient(id_train)[None]
    return torch.stack([mean_gradient(id_train.of_class(k)) for k in range(n_classes)])


@dataclass(frozen=True)
class Spectrum:
    """What the directions are computed from: ID training gradients, and the sum of the others.

    With `contrast`, the second moment of the others less that of the ID training gradients, so that a direction in
    which ID gradients spread, too, does not count.
    """

    id_train: FactorSource
    others: Sequence[FactorSource]  # wild gradients, or calibration and wild gradients
    contrast: bool
    n_vectors: int = 1

    def terms(self, k: int | None = None) -> list[tuple[FactorSource, float]]:
        """Of a class, or of all."""
        others = [one if k is None else one.of_class(k) for one in self.others]
        n = sum(len(one) for one in others)
        found = [(one, 1 / n) for one in others if len(one)]
        if found and self.contrast:
            id_train = self.id_train if k is None else self.id_train.of_class(k)
            found += [(id_train, -1 / len(id_train))] if len(id_train) else []
        return found

    def of_all(
        self, n_classes: int, *, class_conditional_reference: bool, device: torch.device = CPU, workers: Workers = ALONE
    ) -> Direction:
        """One direction for all classes."""
        reference = reference_gradients(self.id_train, n_classes, class_conditional=class_conditional_reference)
        return Direction.fit(self.terms(), reference.to(device), self.n_vectors, workers)

    def of_classes(
        self, classes: Iterable[int], *, class_conditional_reference: bool, device: torch.device = CPU
    ) -> Iterator[tuple[int, Direction]]:
        """Remark 2: a direction for each class, one after the other. Classes without other gradients have none."""
        shared = None if class_conditional_reference else mean_gradient(self.id_train)[None]
        for k in classes:
            terms = self.terms(k)
            if terms:
                reference = mean_gradient(self.id_train.of_class(k))[None] if shared is None else shared
                yield k, Direction.fit(terms, reference.to(device), self.n_vectors)


def class_conditional_tau(
    directions: Iterable[tuple[int, Direction]], sources: Sequence[FactorSource]
) -> list[Float[Tensor, " n"]]:
    """τ of every row of every source, each with the direction of its class; NaN where the class has none."""
    scores = [torch.full((len(source),), torch.nan, dtype=torch.float64) for source in sources]
    for k, direction in directions:
        for values, source in zip(scores, sources, strict=True):
            values[source.label == k] = direction.tau(source.of_class(k))
    return scores


def released_threshold(calibration: Float[Tensor, " n"], quantile: float) -> float:
    """T as in the authors' code: the quantile of √τ, interpolated between the two nearest scores."""
    return float(np.quantile(calibration.sqrt().numpy(), quantile)) ** 2


@dataclass(frozen=True)
class SeparationErrors:
    """ERR_in: share of wild ID data taken for outliers; ERR_out: share of wild OOD data missed (Theorem 1).

    Precision: share of OOD data among the candidates.
    """

    err_in: float
    err_out: float
    precision: float = math.nan


def separation_errors(is_candidate: Bool[Tensor, " m"], is_ood: Bool[Tensor, " m"]) -> SeparationErrors:
    """Compare the separation with the truth, which only an experiment knows. NaN where a side is empty."""
    return SeparationErrors(
        err_in=float(is_candidate[~is_ood].double().mean()) if (~is_ood).any() else math.nan,
        err_out=float((~is_candidate)[is_ood].double().mean()) if torch.any(is_ood) else math.nan,
        precision=float(is_ood[is_candidate].double().mean()) if is_candidate.any() else math.nan,
    )
