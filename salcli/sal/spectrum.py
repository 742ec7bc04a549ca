"""Directions in which centred gradients spread most (Eq. 5 and 7), without ever building their matrix G.

G has m rows of K·D numbers; all that is used of it is products with vectors, or, where few rows
share a matrix, the m×m matrix of their inner products. Everything is computed in float64.
Several processes can work on one G: each goes through its own rows, and sums are added up over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor

from salcli.sal.gradients import ALONE, Factors, FactorSource, Workers

# Up to this many columns a dense eigenproblem is cheaper than an iteration, and exact …
SMALL_SIDE = 64
# … and up to GRAM_SIDE rows it is cheaper to work on their inner products than on themselves; where K and D are both
# large, up to GRAM_FACTOR · K·D / (K + D) rows, but at most MOST_GRAM, whose products take 134 MB.
GRAM_SIDE, GRAM_FACTOR, MOST_GRAM, DENSE_GRAM = 1024, 40, 4096, 256
# Rows that take at most RESIDENT_BYTES in float64 are read once for all passes of an iteration, in pieces that stay in
# the caches of a CPU from one product to the next.
RESIDENT_BYTES, PIECE_BYTES = 2**26, 2**21
# ARPACK keeps so many vectors, and stops at so small a residual of the largest value. Each step is a pass over all
# rows, and real gradients have one direction that stands out: most runs are done with the first vectors, and the
# projections have eight digits then (docs/performance.md).
KEPT_VECTORS, TOLERANCE = 8, 1e-10
MOST_RESTARTS, MANY_VECTORS, ROUGHLY = 200, 64, 1e-6  # where that is not enough
# Squared singular values this far below the largest are rounding errors, not directions …
RELATIVE_RANK = 1e-12
# … and so is all that is left when rows and reference cancel to the last digits.
CANCELLATION = 1e-14


@dataclass(frozen=True)
class CentredGradients:
    """Rows g_i − ∇̄: `reference` holds one ∇̄ for all rows, or one for each label."""

    source: FactorSource
    reference: Float[Tensor, "c k d"]
    workers: Workers = ALONE
    resident: Sequence[Factors] | None = None  # the own chunks, where they are kept

    def __len__(self) -> int:
        return len(self.source)

    def reference_row(self, chunk: Factors) -> Int[Tensor, " n"]:
        """Which ∇̄ belongs to which sample of a chunk."""
        return chunk.label if len(self.reference) > 1 else torch.zeros_like(chunk.label)

    def project(self, V: Float[Tensor, "v k d"]) -> Float[Tensor, "n v"]:
        """G Vᵀ: the inner product of every row with every vector, streamed."""
        return projections(self.source, V, self._offset(V), self.workers)

    def combine(self, U: Float[Tensor, "n v"]) -> Float[Tensor, "v k d"]:
        """Uᵀ G: the rows weighted by each column of U and added up, streamed."""
        total, own, start = _Total(U.shape[1], self.reference), U[self.workers.part(len(U))], 0
        for chunk in self._own_chunks():
            total.add(chunk, self.reference_row(chunk), own[start : start + len(chunk)])
            start += len(chunk)
        return self.workers.add_up(total.centred())

    def covariance_product(self, V: Float[Tensor, "v k d"]) -> Float[Tensor, "v k d"]:
        """(GᵀG) applied to each vector, in one pass over the rows."""
        offset, total = self._offset(V), _Total(len(V), self.reference)
        for chunk in self._own_chunks():
            row = self.reference_row(chunk)
            total.add(chunk, row, _project(chunk, V) - offset[row])
        return self.workers.add_up(total.centred())

    def gram(self) -> Float[Tensor, "n n"]:
        """G Gᵀ for few rows: (R Rᵀ) ∘ (F Fᵀ), less its centring."""
        chunks = list(self._in_float64(self.source))
        R = torch.cat([chunk.residual for chunk in chunks])
        F = torch.cat([chunk.feature for chunk in chunks])
        row = torch.cat([self.reference_row(chunk) for chunk in chunks])
        with_reference = torch.cat([_project(chunk, self.reference) for chunk in chunks])[:, row]  # ⟨g_i, ∇̄_j⟩
        products = R @ R.T
        products *= F @ F.T
        products -= with_reference
        products -= with_reference.T
        products += self._offset(self.reference)[row][:, row]
        return products

    def covariance(self) -> Float[Tensor, "kd kd"]:
        """GᵀG for few columns, added up chunk by chunk."""
        reference = self.reference.flatten(1)
        total = reference.new_zeros(reference.shape[1], reference.shape[1])
        for chunk in self._own_chunks():
            rows = chunk.dense() - reference[self.reference_row(chunk)]
            total += rows.T @ rows
        return self.workers.add_up(total)

    def size_before_centring(self) -> float:
        """Σ ‖g_i‖² + ‖∇̄‖²: what rounding errors of the centred rows are relative to."""
        squares = self.reference.flatten(1).square().sum(dim=1)
        total = squares.new_zeros(1)
        for chunk in self._own_chunks():
            total += (chunk.squared_norms() + squares[self.reference_row(chunk)]).sum()
        return float(self.workers.add_up(total))

    def kept_in_memory(self) -> CentredGradients:
        """The same, with its rows read once if they are few."""
        n_bytes = 8 * sum(self.reference.shape[1:])  # of a row
        if len(self) * n_bytes > RESIDENT_BYTES:
            return self
        step = max(1, PIECE_BYTES // n_bytes)
        pieces = [chunk[i : i + step] for chunk in self._own_chunks() for i in range(0, len(chunk), step)]
        return replace(self, resident=pieces)

    def _own_chunks(self) -> Iterable[Factors]:
        return self._in_float64(self.workers.share(self.source)) if self.resident is None else self.resident

    def _in_float64(self, source: FactorSource) -> Iterable[Factors]:
        """Where the reference is: what is on a GPU goes over once for each pass."""
        for chunk in source.chunks():
            yield chunk.to(self.reference.device, torch.float64)

    def _offset(self, V: Tensor) -> Tensor:
        return self.reference.flatten(1) @ V.flatten(1).T  # c, v


def projections(
    source: FactorSource, V: Float[Tensor, "v k d"], offset: Float[Tensor, "c v"], workers: Workers = ALONE
) -> Float[Tensor, "n v"]:
    """⟨g_i, v⟩ less an offset, which is one for all rows or one for each label; streamed, on the device of V."""
    start, n = 0, len(source)
    own = V.new_empty(len(range(n)[workers.part(n)]), len(V))  # as in of_each_sample: no small results between chunks
    for chunk in workers.share(source).chunks():
        rows = chunk.to(V.device, torch.float64)
        own[start : start + len(rows)] = _project(rows, V) - (offset[rows.label] if len(offset) > 1 else offset)
        start += len(rows)
    return workers.join(own)


def top_directions(terms: Sequence[tuple[CentredGradients, float]], n_vectors: int) -> Float[Tensor, "v k d"]:
    """The unit vectors v that maximise Σ weight · Σ ⟨v, g_i − ∇̄⟩² over the terms, largest first.

    One term of weight 1 gives the top singular vectors of G (Eq. 7). A term of negative weight is contrasted with.
    Fewer than `n_vectors` where fewer have a value above zero, none where all rows are zero: a vector of value zero
    points anywhere, so a projection on it would mean nothing.
    """
    terms = [(G, weight) for G, weight in terms if len(G)]
    if not terms:
        raise ValueError("directions of no gradients are not defined")
    shape, n_rows = terms[0][0].reference.shape[1:], sum(len(G) for G, _ in terms)
    most = min(max(GRAM_SIDE, GRAM_FACTOR * shape.numel() // sum(shape)), MOST_GRAM)
    if shape.numel() <= SMALL_SIDE:
        covariance = sum(weight * G.covariance() for G, weight in terms)
        assert isinstance(covariance, Tensor)
        values, right = _largest(covariance, n_vectors)
    elif n_rows <= most and n_rows < shape.numel():
        values, right = _by_inner_products(terms, n_vectors)
    else:
        values, right = _by_passes(terms, n_vectors)
    size = sum(abs(weight) * G.size_before_centring() for G, weight in terms)
    kept = values > max(RELATIVE_RANK * abs(float(values[0])), CANCELLATION * size)
    return right[:, kept].T.reshape(-1, *shape)


def _by_inner_products(terms: Sequence[tuple[CentredGradients, float]], n_vectors: int) -> tuple[Tensor, Tensor]:
    """Of few rows: with G Gᵀ = L Lᵀ and weights S, an eigenvector y of Lᵀ S L gives Gᵀ S L y, one of Gᵀ S G."""
    factors = [Factors(*(torch.cat(parts) for parts in zip(*_columns(G), strict=True))) for G, _ in terms]
    stacked = Factors(
        *(torch.cat([getattr(one, name) for one in factors]) for name in ("residual", "feature", "label"))
    )
    G = CentredGradients(stacked, terms[0][0].reference)
    sizes = [len(one) for one in factors]
    weight = torch.cat([G.reference.new_full((n,), own) for n, (_, own) in zip(sizes, terms, strict=True)])
    gram = G.gram()
    trace = float(gram.diagonal().clamp(min=0).sum())
    if trace <= CANCELLATION * G.size_before_centring():
        return gram.new_zeros(1), G.reference.new_zeros(G.reference[0].numel(), 1)
    L, failed = torch.linalg.cholesky_ex(gram)
    if failed:  # rows depend on each other
        values, vectors = torch.linalg.eigh(gram)
        L = vectors * values.clamp(min=0).sqrt()
    if len(gram) <= DENSE_GRAM:
        values, own = _largest(L.T @ (weight[:, None] * L), n_vectors)
    else:
        values, own = _arpack(lambda y: L.T @ (weight * (L @ y)), len(gram), n_vectors, gram.device)
    return values, _unit(G.combine(weight[:, None] * (L @ own))).flatten(1).T


def _columns(G: CentredGradients) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
    for chunk in G._in_float64(G.source):
        yield chunk.residual, chunk.feature, chunk.label


def _by_passes(terms: Sequence[tuple[CentredGradients, float]], n_vectors: int) -> tuple[Tensor, Tensor]:
    """Of many rows: each step of the iteration is one pass over them."""
    reference = terms[0][0].reference
    resident = [(G.kept_in_memory(), weight) for G, weight in terms]

    def product(x: Tensor) -> Tensor:
        V = x.reshape(1, *reference.shape[1:])
        total = sum(weight * G.covariance_product(V) for G, weight in resident)
        assert isinstance(total, Tensor)
        return total.flatten()

    return _arpack(product, reference[0].numel(), n_vectors, reference.device)


def _largest(symmetric: Tensor, n_vectors: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues, in falling order, and their eigenvectors as columns."""
    values, vectors = torch.linalg.eigh(symmetric)
    return values.flip(0)[:n_vectors], vectors.flip(1)[:, :n_vectors]


def _arpack(
    product: Callable[[Tensor], Tensor], size: int, n_vectors: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The same of a matrix that is known by its products."""

    def on_cpu(x: np.ndarray) -> np.ndarray:
        vector = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float64).ravel()).to(device)
        return product(vector).cpu().numpy()

    rng = np.random.default_rng(0)  # the same each time: results repeat
    start = rng.standard_normal(size)
    scale = float(np.linalg.norm(on_cpu(start)))
    if scale == 0:  # ARPACK cannot start on a matrix of zeros
        return torch.zeros(1, dtype=torch.float64, device=device), torch.zeros(
            size, 1, dtype=torch.float64, device=device
        )
    # ARPACK takes very small values for zeros, and the gradients of a confident network are very small
    operator = LinearOperator((size, size), matvec=lambda x: on_cpu(x) / scale, dtype=np.float64)
    n_kept = min(size, max(KEPT_VECTORS, 2 * n_vectors + 1))
    how = {"k": n_vectors, "which": "LA", "v0": start, "rng": rng}
    try:
        found, columns = eigsh(operator, ncv=n_kept, tol=TOLERANCE, maxiter=MOST_RESTARTS, **how)
    except ArpackNoConvergence:  # no direction stands out, as in a contrast without outliers
        found, columns = eigsh(operator, ncv=min(size, max(MANY_VECTORS, n_kept)), tol=ROUGHLY, **how)
    order = np.argsort(found)[::-1].copy()
    return torch.from_numpy(found[order] * scale).to(device), torch.from_numpy(columns[:, order]).to(device)


class _Total:
    """Σ u_i (g_i − ∇̄) for several columns of u at once, over chunks."""

    def __init__(self, n_vectors: int, reference: Tensor) -> None:
        self.reference = reference
        self.gradients = reference.new_zeros(n_vectors, *reference.shape[1:])  # v, K, D
        self.weight = reference.new_zeros(len(reference), n_vectors)  # c, v: how much of each ∇̄ to take away in the end

    def add(self, chunk: Factors, row: Tensor, U: Tensor) -> None:
        R, F = chunk.residual, chunk.feature
        for v in range(U.shape[1]):
            u = U[:, v, None]
            # the product of u with the smaller factor is a copy
            self.gradients[v] += (u * R).T @ F if R.shape[1] < F.shape[1] else R.T @ (u * F)
        self.weight.index_add_(0, row, U)

    def centred(self) -> Tensor:
        return self.gradients - torch.einsum("cv,ckd->vkd", self.weight, self.reference)


def _project(chunk: Factors, V: Tensor) -> Tensor:
    """⟨g_i, v⟩ = residual_iᵀ v feature_i, uncentred."""
    R, F = chunk.residual, chunk.feature
    if len(V) == 0:
        return R.new_zeros(len(chunk), 0)
    if R.shape[1] < F.shape[1]:
        return torch.stack([((v @ F.T) * R.T).sum(dim=0) for v in V], dim=1)  # F @ v.T takes half as long again
    return torch.stack([((R @ v) * F).sum(dim=1) for v in V], dim=1)


def _unit(V: Tensor) -> Tensor:
    # nothing but zero is too small: the gradients of a confident network are tiny, and still have directions
    return torch.nn.functional.normalize(V.flatten(1), dim=1, eps=torch.finfo(V.dtype).tiny).reshape(V.shape)
