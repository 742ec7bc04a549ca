"""The formulas of the filter (Section 3.1): τ of gradients, the threshold T, and the errors of the separation.

methods/sal.py computes τ as params.yaml says, also of new samples; pipeline/filter.py takes the candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from salcli.sal.gradients import ALONE, FactorSource, Workers, mean_gradient
from salcli.sal.metrics import threshold_that_keeps
from salcli.sal.spectrum import CentredGradients, top_singular_vectors

CPU = torch.device("cpu")


def tau_scores(G: CentredGradients, V: Float[Tensor, "v k d"], n_vectors: int) -> Float[Tensor, " n"]:
    """Eq. 6: τ_i = ⟨g_i − ∇̄, v⟩²; for several vectors the mean of the squared projections.

    The mean is over `n_vectors` even where V has fewer: along the missing directions all wild gradients are zero.
    """
    return G.project(V).square().sum(dim=1) / n_vectors


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
    return [tau_scores(CentredGradients(source, reference, workers), V, n_vectors).cpu() for source in sources]


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


def score_threshold(calibration: Float[Tensor, " n"], quantile: float) -> float:
    """The smallest T with at least a share `quantile` of ID scores at or below it; candidates have τ > T."""
    return -threshold_that_keeps(-calibration.numpy(), quantile)


def released_threshold(calibration: Float[Tensor, " n"], quantile: float) -> float:
    """T as in the authors' code: the quantile of √τ, interpolated between the two nearest scores."""
    return float(np.quantile(calibration.sqrt().numpy(), quantile)) ** 2


def discoveries_threshold(calibration: Float[Tensor, " n"], wild: Float[Tensor, " m"], fdr: float) -> float | None:
    """T by Benjamini and Hochberg on the conformal p-values of the wild scores; None if nothing is found.

    The p-value of a score is (1 + number of calibration scores at or above it) / (n + 1). Of the candidates, an
    expected share of at most `fdr` are ID data, if wild ID data are exchangeable with the calibration data (Bates et
    al., 2023).
    """
    n, m = len(calibration), len(wild)
    ranked = calibration.sort(descending=True).values
    # T at the rank-th largest calibration score: what is above has a p-value of at most rank / (n + 1)
    rank = torch.arange(1, n + 1)
    n_above = m - torch.searchsorted(wild.sort().values, ranked, right=True)
    allowed = torch.nonzero(
        (rank.double() * m <= fdr * (n + 1) * n_above.double() * (1 + 1e-12)) & (n_above > 0)
    ).flatten()
    return float(ranked[allowed[-1]]) if len(allowed) else None


def largest_quantile(calibration: Float[Tensor, " n"], wild: Float[Tensor, " m"]) -> float:
    """The largest quantile whose threshold leaves some candidates; 0 if there is none."""
    return float((calibration < wild.max()).double().mean())


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
