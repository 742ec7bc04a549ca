"""KNN in float32, beside all distances in float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from salcli.errors import ParamsError
from salcli.methods.base import Head, Known
from salcli.methods.features import SPARE, Knn, Neighbours
from salcli.sal.gradients import Representation

N_KNOWN, N_QUERIES, D = 600, 200, 96


def slow_kth_distances(features: Tensor, known: Tensor, k: int) -> np.ndarray:
    """Every difference in float64. Lengths are taken in float32, as features are stored."""
    sphere = [(rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-12)).double().numpy() for rows in (features, known)]
    differences = sphere[0][:, None] - sphere[1][None]  # n, m, d
    return np.sort(np.sqrt((differences**2).sum(axis=2)), axis=1)[:, k - 1]


def cloud(kind: str, n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    centre = torch.rand(D, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(n, D, generator=generator)
    match kind:
        case "spread":
            return (centre + noise).relu()
        case "float32 cannot tell apart":  # squared distances of 1e-8, at a rounding error of 1e-7
            return centre + 1e-5 * noise
        case "some equal, some zero":
            rows = (centre + noise).relu()
            rows[: n // 3], rows[n // 3 : n // 2] = rows[0], 0.0
            return rows
    return centre.expand(n, D).clone()


@pytest.mark.parametrize("kind", ["spread", "float32 cannot tell apart", "some equal, some zero", "all equal"])
@pytest.mark.parametrize("k", [1, 50, N_KNOWN - SPARE, N_KNOWN])
def test_float32_finds_the_neighbours_that_float64_finds(kind: str, k: int) -> None:
    known, queries = cloud(kind, N_KNOWN, 1), torch.cat([cloud(kind, N_QUERIES, 2), cloud(kind, 20, 1)])
    found = Neighbours.of(known, k).score(queries, queries_at_once=64, known_at_once=250)
    # Which of two neighbours that differ by less than 1e-13 is taken is chance: 1e-9 of a distance of 1e-5
    atol = 1e-8 if kind == "float32 cannot tell apart" else 1e-12
    np.testing.assert_allclose(-found, slow_kth_distances(queries, known, k), rtol=1e-12, atol=atol)


def test_the_neighbours_of_a_training_sample_are_the_other_samples() -> None:
    """Else each would be its own nearest neighbour, and training data would look too much like ID data."""
    known = cloud("spread", 12, 1)
    x = Representation(known, torch.zeros(12, 2), torch.zeros(12, dtype=torch.int64))
    head = Head(torch.zeros(2, D), torch.zeros(2))
    knn = Knn(Knn.Params(k=3))
    knn.fit(Known(head, x))
    np.testing.assert_allclose(-knn.scores(x, fitted_on=True), slow_kth_distances(known, known, 3 + 1))
    with pytest.raises(ParamsError, match=r"methods\.knn\.k is 13, but there are only 12 ID training samples"):
        Knn(Knn.Params(k=13)).fit(Known(head, x))


def test_most_queries_need_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    in_float64 = Neighbours._distance_to_the_kth
    monkeypatch.setattr(
        Neighbours, "_distance_to_the_kth", lambda self, x, n: (compared.append(len(x)), in_float64(self, x, n))[1]
    )
    Neighbours.of(cloud("spread", N_KNOWN, 1), 10).score(cloud("spread", N_QUERIES, 2))
    assert sum(compared) <= N_QUERIES // 100
    Neighbours.of(cloud("all equal", N_KNOWN, 1), 10).score(cloud("all equal", N_QUERIES, 2))
    assert sum(compared) >= N_QUERIES
