"""Filtering scores: how much a sample's gradient looks like an outlier's (higher = outlier)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from salcli.sal.gradients import FactorSource, mean_gradient
from salcli.sal.spectrum import ALONE, CentredGradients, Workers, top_singular_vectors

CPU = torch.device("cpu")


def outlier_scores(G: CentredGradients, V: Float[Tensor, "v k d"], n_vectors: int) -> Float[Tensor, " n"]:
    """Eq. 6: τ_i = ⟨g_i − ∇̄, v⟩²; for several vectors the mean of the squared projections.

    The mean is over `n_vectors` even where V has fewer: along the missing directions all wild
    gradients are zero.
    """
    return G.project(V).square().sum(dim=1) / n_vectors


def gradnorm_outlier_scores(source: FactorSource) -> Float[Tensor, " n"]:
    """GradNorm (Huang et al., 2021), which is higher for ID data, negated."""
    return torch.cat(
        [-uniform_gradient_norm(chunk.probabilities().double(), chunk.feature.double()) for chunk in source.chunks()]
    )


def uniform_gradient_norm(probabilities: Float[Tensor, "n k"], feature: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """‖p − uniform‖₁ · ‖f‖₁: the L1 norm of the last layer's gradient, had the target been the uniform distribution."""
    spread = (probabilities - 1 / probabilities.shape[1]).abs().sum(dim=1)
    return spread * feature.abs().sum(dim=1)


def reference_gradients(id_train: FactorSource, n_classes: int, *, class_conditional: bool) -> Float[Tensor, "c k d"]:
    """∇̄ (Eq. 4), or one ∇̄_k for each class (Remark 2)."""
    if not class_conditional:
        return mean_gradient(id_train)[None]
    return torch.stack([mean_gradient(id_train.of_class(k)) for k in range(n_classes)])


def class_agnostic_scores(
    spectrum_of: FactorSource,
    sources: Sequence[FactorSource],
    reference: Float[Tensor, "c k d"],
    n_vectors: int,
    workers: Workers = ALONE,
) -> list[Float[Tensor, " n"]]:
    """τ of every row of every source, projected on the singular vectors of one matrix for all classes.

    Computed on the device that the reference is on.
    """
    V = top_singular_vectors(CentredGradients(spectrum_of, reference, workers), n_vectors)
    return [outlier_scores(CentredGradients(source, reference, workers), V, n_vectors).cpu() for source in sources]


def class_conditional_scores(
    spectrum_of: FactorSource,
    sources: Sequence[FactorSource],
    id_train: FactorSource,
    classes: Iterable[int],
    n_vectors: int,
    *,
    shared_reference: Float[Tensor, "1 k d"] | None = None,
    device: torch.device = CPU,
) -> list[Float[Tensor, " n"]]:
    """Remark 2: every class has its own G_k, its own v_k and, unless one is shared, its own ∇̄_k.

    A row whose class has no row in `spectrum_of` cannot be scored: NaN.
    """
    scores = [torch.full((len(source),), torch.nan, dtype=torch.float64) for source in sources]
    for k in classes:
        own_class = spectrum_of.of_class(k)
        if len(own_class) == 0:
            continue
        reference = mean_gradient(id_train.of_class(k))[None] if shared_reference is None else shared_reference
        reference = reference.to(device)
        own_sources = [own_class if source is spectrum_of else source.of_class(k) for source in sources]
        own_scores = class_agnostic_scores(own_class, own_sources, reference, n_vectors)
        for values, source, own in zip(scores, sources, own_scores, strict=True):
            values[source.label == k] = own
    return scores
