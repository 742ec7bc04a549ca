"""Random features, heads and logits, and methods that are fitted to them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from salcli.methods.base import Head, Known, PostHoc
from salcli.sal.gradients import Representation


def _random_matrix(seed: int, n: int, size: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(n, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _represented(head: Head, features: Tensor, labels: Tensor | None = None) -> Representation:
    logits = head.logits(features)
    return Representation(features, logits, logits.argmax(1) if labels is None else labels)


@pytest.fixture(scope="session")
def random_matrix() -> Callable[..., Tensor]:
    """In float64, by seed and shape."""
    return _random_matrix


@pytest.fixture(scope="session")
def activations() -> Callable[..., Tensor]:
    """In float32, as after a ReLU: half of them are zero."""
    return lambda seed, n, n_features=7: _random_matrix(seed, n, n_features).clamp(min=0).float()


@pytest.fixture(scope="session")
def random_head() -> Callable[..., Head]:
    def make(seed: int, n_classes: int = 4, n_features: int = 7) -> Head:
        return Head(_random_matrix(seed, n_classes, n_features), _random_matrix(seed + 1, 1, n_classes)[0])

    return make


@pytest.fixture(scope="session")
def represented() -> Callable[..., Representation]:
    """Features with the logits of a head."""
    return _represented


@pytest.fixture(scope="session")
def score_of() -> Callable[..., Tensor]:
    """Scores of features by a post-hoc method that is fitted to ID training features."""

    def score(
        kind: type[PostHoc],
        head: Head,
        features: Tensor,
        known: Tensor,
        labels: Tensor | None = None,
        notes: list[str] | None = None,
        **numbers: Any,
    ) -> Tensor:
        method, heard = kind(kind.Params(**numbers)), [] if notes is None else notes
        method.fit(Known(head, _represented(head, known, labels), note=heard.append))
        return method.scores(_represented(head, features))

    return score
