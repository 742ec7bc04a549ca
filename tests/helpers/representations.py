"""Random features, heads, logits and gradients, and methods that are fitted to them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from salcli.methods.base import Head, Known, PostHoc
from salcli.sal.gradients import Factors, Representation, last_layer_residual


def random_factors(n: int, n_classes: int, n_features: int, seed: int = 0) -> Factors:
    """Of a random head on random features, in float64, with labels that need not be the predicted ones."""
    rng = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, n_classes, generator=rng, dtype=torch.float64)
    feature = torch.randn(n, n_features, generator=rng, dtype=torch.float64)
    label = torch.randint(n_classes, (n,), generator=rng)
    return Factors(last_layer_residual(logits, label), feature, label)


def random_representation(n: int, n_classes: int, n_features: int, seed: int = 0) -> Representation:
    """In single precision, as a file holds it."""
    rng = torch.Generator().manual_seed(seed)
    logits, feature = 2 * torch.randn(n, n_classes, generator=rng), torch.randn(n, n_features, generator=rng)
    return Representation(feature, logits, torch.randint(n_classes, (n,), generator=rng))


class InFours(Representation):
    """Read four rows at a time, as a file would be."""

    def chunks(self) -> Iterator[Representation]:
        yield from (self.take(rows) for rows in torch.arange(len(self)).split(4) if len(rows))


def random_matrix(seed: int, n: int, size: int, scale: float = 1.0) -> Tensor:
    """In float64."""
    return scale * torch.randn(n, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def activations(seed: int, n: int, n_features: int = 7) -> Tensor:
    """In float32, as after a ReLU: half of them are zero."""
    return random_matrix(seed, n, n_features).clamp(min=0).float()


def random_head(seed: int, n_classes: int = 4, n_features: int = 7) -> Head:
    return Head(random_matrix(seed, n_classes, n_features), random_matrix(seed + 1, 1, n_classes)[0])


def represented(head: Head, features: Tensor, labels: Tensor | None = None) -> Representation:
    """Features with the logits of a head."""
    logits = head.logits(features)
    return Representation(features, logits, logits.argmax(1) if labels is None else labels)


def score_of(
    kind: type[PostHoc],
    head: Head,
    features: Tensor,
    known: Tensor,
    labels: Tensor | None = None,
    notes: list[str] | None = None,
    **numbers: Any,
) -> Tensor:
    """Scores of features by a post-hoc method that is fitted to ID training features."""
    method, heard = kind(kind.Params(**numbers)), [] if notes is None else notes
    method.fit(Known(head, represented(head, known, labels), note=heard.append))
    return method.scores(represented(head, features))
