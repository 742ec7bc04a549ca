"""Last-layer gradients in factored form, and the reference gradient (Eq. 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor


def last_layer_residual(
    logits: Float[Tensor, "n k"], labels: Int[Tensor, " n"], temperature: float = 1.0
) -> Float[Tensor, "n k"]:
    """Gradient of cross-entropy w.r.t. the logits: softmax(logits / temperature) minus one-hot.

    The gradient of the last layer's weight is its outer product with the feature. Computed in float64, because p − 1 of
    a confident prediction would be rounded to zero in float32. At an infinite temperature softmax is uniform.
    """
    residual = (logits.double() / temperature).softmax(dim=1)  # n, K
    residual[torch.arange(labels.shape[0], device=labels.device), labels] -= 1  # len() would fix a graph to one size
    return residual.to(logits.dtype)


@dataclass(frozen=True, eq=False)
class Representation:
    """Features, logits and labels of n samples: all that gradients and post-hoc scores need."""

    feature: Float[Tensor, "n d"]
    logits: Float[Tensor, "n k"]
    label: Int[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.label)

    @property
    def predicted(self) -> Int[Tensor, " n"]:
        return self.logits.argmax(dim=1)

    @property
    def n_classes(self) -> int:
        return self.logits.shape[1]

    def chunks(self) -> Iterator[Representation]:
        """One chunk: this is in memory already."""
        yield self

    def take(self, rows: Int[Tensor, " m"]) -> Representation:
        return Representation(self.feature[rows], self.logits[rows], self.label[rows])


@runtime_checkable
class RepresentationSource(Protocol):
    """Representations in memory or in a file, which can be read more than once, chunk by chunk."""

    @property
    def label(self) -> Int[Tensor, " n"]: ...

    @property
    def predicted(self) -> Int[Tensor, " n"]: ...

    @property
    def n_classes(self) -> int: ...

    def __len__(self) -> int: ...

    def chunks(self) -> Iterable[Representation]:
        """All samples, in the same order each time."""
        ...

    def take(self, rows: Int[Tensor, " m"]) -> RepresentationSource:
        """Some samples, in rising order; in memory where they are few."""
        ...


def of_each_sample(
    source: RepresentationSource, compute: Callable[[Representation], Tensor], dtype: torch.dtype = torch.float64
) -> Tensor:
    """What `compute` gives for each sample of a source, chunk by chunk.

    Written into one tensor: many small ones between the chunks would keep the memory of chunks from being used again.
    """
    found, start = torch.empty(len(source), dtype=dtype), 0
    for chunk in source.chunks():
        found[start : start + len(chunk)] = compute(chunk)
        start += len(chunk)
    return found


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
        residual, feature = (factor.to(device, dtype) for factor in (self.residual, self.feature))
        return Factors(residual, feature, self.label.to(device))

    def chunks(self) -> Iterator[Factors]:
        """One chunk: this is in memory already."""
        yield self

    def of_class(self, k: int) -> Factors:
        """The samples whose label is k."""
        return self[self.label == k]

    def squared_norms(self) -> Float[Tensor, " n"]:
        """‖g_i‖² = ‖residual_i‖² ‖feature_i‖², in float64."""
        return self.residual.double().square().sum(dim=1) * self.feature.double().square().sum(dim=1)

    def dense(self) -> Float[Tensor, "n kd"]:
        """The gradients themselves, flattened. For export and for tests: n·K·D numbers."""
        return torch.einsum("nk,nd->nkd", self.residual, self.feature).flatten(1)


@dataclass(frozen=True)
class Gradients:
    """Gradients of represented samples, taken with the given labels; computed from the logits chunk by chunk.

    With `label_row_only`, each gradient is its label's own row (K = 1), which is what the authors' code uses. A
    temperature above the paper's 1 softens the softmax.
    """

    source: RepresentationSource
    label: Int[Tensor, " n"]
    label_row_only: bool = False
    temperature: float = 1.0

    def __len__(self) -> int:
        return len(self.label)

    def chunks(self) -> Iterator[Factors]:
        start = 0
        for chunk in self.source.chunks():
            label = self.label[start : start + len(chunk)]
            residual = last_layer_residual(chunk.logits, label, self.temperature)
            if self.label_row_only:
                residual = residual.gather(1, label[:, None])  # n, 1
            yield Factors(residual, chunk.feature, label)
            start += len(chunk)

    def __getitem__(self, rows: slice | Tensor) -> FactorSource:
        """Some samples, computed once if they fit in memory, as they do in most data."""
        index = torch.arange(len(self))[rows]
        taken = replace(self, source=self.source.take(index), label=self.label[index])
        return next(taken.chunks()) if isinstance(taken.source, Representation) else taken

    def of_class(self, k: int) -> FactorSource:
        """The samples whose label is k."""
        return self[self.label == k]


FactorSource = Factors | Gradients  # gradients that can be read more than once, chunk by chunk: in memory or in a file


def mean_gradient(source: FactorSource) -> Float[Tensor, "k d"]:
    """Eq. 4: ∇̄, the average gradient of labeled ID data, in float64."""
    if len(source) == 0:
        raise ValueError("the mean gradient of no samples is not defined")
    total = sum(chunk.residual.double().T @ chunk.feature.double() for chunk in source.chunks())
    assert isinstance(total, Tensor)
    return total / len(source)


class Workers:
    """Those who share the rows of one matrix. This one is alone and has all of them; engine.device has several."""

    def share(self, source: FactorSource) -> FactorSource:
        """The neighbouring rows that this one goes through."""
        return source

    def part(self, n: int) -> slice:
        """Where they are among all n rows."""
        return slice(n)

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum over all of them."""
        return tensor

    def join(self, rows: Tensor) -> Tensor:
        """The rows of all of them, in order."""
        return rows


ALONE = Workers()
