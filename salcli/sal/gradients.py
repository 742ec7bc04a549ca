"""Last-layer gradients in factored form, and the reference gradient (Eq. 4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot


def last_layer_residual(logits: Float[Tensor, "n k"], labels: Int[Tensor, " n"]) -> Float[Tensor, "n k"]:
    """d loss / d logits of cross-entropy: softmax − one-hot.

    The gradient of the last layer's weight is its outer product with the feature, so this and the
    feature are all that has to be stored. Computed in float64, because p − 1 of a confident
    prediction would be rounded to zero in float32.
    """
    residual = logits.double().softmax(dim=1)  # n, K
    residual[torch.arange(len(labels), device=labels.device), labels] -= 1
    return residual.to(logits.dtype)


@dataclass(frozen=True)
class Factors:
    """Gradients g_i = residual_i ⊗ feature_i of n samples; `label` is the label they were taken with."""

    residual: Float[Tensor, "n k"]
    feature: Float[Tensor, "n d"]
    label: Int[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, rows: slice | Tensor) -> Factors:
        return Factors(self.residual[rows], self.feature[rows], self.label[rows])

    def to(self, device: torch.device, dtype: torch.dtype) -> Factors:
        """The same on a device, in a precision."""
        residual, feature = (factor.to(device, dtype) for factor in (self.residual, self.feature))
        return Factors(residual, feature, self.label.to(device))

    def chunks(self) -> Iterator[Factors]:
        """One chunk: what is in memory need not be cut."""
        yield self

    def of_class(self, k: int) -> Factors:
        """The samples whose label is k."""
        return self[self.label == k]

    def between(self, rows: slice) -> Factors:
        """Neighbouring samples."""
        return self[rows]

    def dense(self) -> Float[Tensor, "n kd"]:
        """The gradients themselves, flattened. For export and for tests: n·K·D numbers."""
        return torch.einsum("nk,nd->nkd", self.residual, self.feature).flatten(1)

    def probabilities(self) -> Float[Tensor, "n k"]:
        """The softmax output that the residual was made from."""
        return self.residual + one_hot(self.label, self.residual.shape[1])

    def relabelled(self, label: Int[Tensor, " n"]) -> Factors:
        """The gradients of the same samples, had they been taken with other labels."""
        changed = torch.nonzero(self.label != label).flatten()  # most are as they were
        residual = self.residual.clone() if len(changed) else self.residual
        residual[changed, self.label[changed]] += 1
        residual[changed, label[changed]] -= 1
        return Factors(residual, self.feature, label)

    def predicted_row(self) -> Factors:
        """Only the label's own row of each gradient (K = 1), which is what the authors' code uses."""
        row = self.residual.gather(1, self.label[:, None])  # n, 1
        return Factors(row, self.feature, self.label)


@runtime_checkable
class FactorSource(Protocol):
    """Gradients that can be read more than once, chunk by chunk: from memory or from a file."""

    @property
    def label(self) -> Int[Tensor, " n"]:
        """The label that each sample's gradient was taken with."""
        ...

    def __len__(self) -> int: ...

    def chunks(self) -> Iterable[Factors]:
        """The samples, in the same order each time."""
        ...

    def of_class(self, k: int) -> FactorSource:
        """The samples whose label is k."""
        ...

    def between(self, rows: slice) -> FactorSource:
        """Neighbouring samples."""
        ...


def mean_gradient(source: FactorSource) -> Float[Tensor, "k d"]:
    """Eq. 4: ∇̄, the average gradient of labeled ID data, in float64."""
    if len(source) == 0:
        raise ValueError("the mean gradient of no samples is not defined")
    total = sum(chunk.residual.double().T @ chunk.feature.double() for chunk in source.chunks())
    assert isinstance(total, Tensor)
    return total / len(source)
