"""τ as the filter's params say: of wild and held-out samples in `filter`, of test samples in `evaluate`."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import torch

from salcli.compute.processes import processes
from salcli.sal.scores import CPU, class_agnostic_scores, class_conditional_scores, reference_gradients
from salcli.seeding import generator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from salcli.artifacts.gradients import GradientFile
    from salcli.params import FilterParams
    from salcli.progress import Task
    from salcli.sal.gradients import Factors


def unknown_labels(predicted: Tensor, n_classes: int, params: FilterParams, seed: int, what: str) -> Tensor:
    """The labels of samples whose true one is not known: predicted, or random. `what` names the samples."""
    if params.labels == "predicted":
        return predicted
    return torch.from_numpy(generator(seed, f"random-labels, {what}").integers(n_classes, size=len(predicted)))


def unlabeled(file: GradientFile, params: FilterParams, seed: int, what: str) -> GradientFile:
    """Gradients as if nobody knew the labels: held-out ID samples are treated just as wild ones are."""
    return file.relabelled(unknown_labels(file.predicted, file.n_classes, params, seed, what))


def tau(
    spectrum_of: GradientFile,
    sources: Sequence[GradientFile | Factors],
    id_train: GradientFile,
    params: FilterParams,
    device: torch.device,
    task: Task,
) -> list[Tensor]:
    """τ of every source (Eq. 6), with ∇̄ of the ID training data and v of the wild data, or of what stands for it.

    All of it in float64: on a CPU, or on a GPU that has it.
    Class-conditional scores of samples whose class does not occur in `spectrum_of` are NaN.
    """
    n_classes, per_class_reference = id_train.n_classes, params.reference == "class-conditional"
    device = device if device.type == "cuda" else CPU
    if params.gradient == "predicted-row":
        spectrum_of, id_train = spectrum_of.predicted_row(), id_train.predicted_row()
        sources = [source.predicted_row() for source in sources]
    if params.svd == "class-agnostic":
        reference = reference_gradients(id_train, n_classes, class_conditional=per_class_reference)
        return class_agnostic_scores(spectrum_of, sources, reference.to(device), params.n_vectors, processes())
    shared = None if per_class_reference else reference_gradients(id_train, n_classes, class_conditional=False)
    scores = class_conditional_scores(
        spectrum_of,
        sources,
        id_train,
        _own_classes(n_classes, task),
        params.n_vectors,
        shared_reference=shared,
        device=device,
    )
    return [_first_defined(processes().collect(own)) for own in scores]


def _own_classes(n_classes: int, task: Task) -> Iterator[int]:
    """Each class is a problem of its own, so of several processes each takes some."""
    for k in range(processes().rank, n_classes, processes().size):
        yield k
        task.advance(processes().size)


def _first_defined(scores: list[Tensor]) -> Tensor:
    """What each process scored; the rest of its scores is NaN."""
    return reduce(lambda first, second: torch.where(first.isnan(), second, first), scores)
