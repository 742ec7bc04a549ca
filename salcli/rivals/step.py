"""STEP (Zhou et al., 2021): a linear projection that keeps neighbours close and draws everything else apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator


def whitening(id_features: Float[Tensor, "m d"], ridge: float) -> Float[Tensor, "d d"]:
    """W with WᵀW = (Σ + ridge · I)⁻¹, Σ the covariance of the labeled data: ‖Wx − Wy‖ is a Mahalanobis distance."""
    exact = id_features.double()
    centred = exact - exact.mean(0)
    covariance = centred.T @ centred / max(1, len(exact) - 1)
    factor = torch.linalg.cholesky(covariance + ridge * torch.eye(len(covariance), dtype=torch.float64))
    matrix: Tensor = torch.linalg.solve_triangular(factor, torch.eye(len(factor), dtype=torch.float64), upper=False)
    return matrix


@dataclass(frozen=True)
class NeighbourGraph:
    """The nearest neighbours of each point, itself left out, and how far they are."""

    index: Int[Tensor, "n k"]
    distance: Float[Tensor, "n k"]

    @classmethod
    def of(cls, points: Float[Tensor, "n d"], k: int) -> NeighbourGraph:
        """Exact, and in bounded memory: scikit-learn goes block by block. Few points have fewer neighbours."""
        from sklearn.neighbors import NearestNeighbors  # slow to load, and scores do without it

        found = NearestNeighbors(n_neighbors=min(k, len(points) - 1), algorithm="brute").fit(points.double().numpy())
        distance, index = found.kneighbors()
        return cls(torch.from_numpy(index), torch.from_numpy(distance))


def structure_loss(
    anchor: Float[Tensor, "b d"],
    neighbour: Float[Tensor, "b d"],
    other: Float[Tensor, "b d"],
    limit: Float[Tensor, " b"],
    margin: float,
) -> Float[Tensor, ""]:
    """Of projected points: anchors, each with one of its neighbours and with any other point.

    Keep: the squared distance to a neighbour shall not exceed its limit. Unzip: any two points shall be far apart,
    until the mean over all pairs and coordinates of their squared difference reaches the margin.
    """
    keep = ((anchor - neighbour).square().sum(1) - limit).clamp(min=0).mean()
    unzip = (margin - (anchor - other).square().mean()).clamp(min=0)
    return keep + unzip


@dataclass(frozen=True)
class ProjectionSchedule:
    """How the projection is fitted: Adam, so many steps."""

    steps: int
    batch_size: int
    lr: float
    weight_decay: float
    margin: float


def projection_steps(
    projection: nn.Linear,
    features: Float[Tensor, "n d"],
    graph: NeighbourGraph,
    schedule: ProjectionSchedule,
    generator: torch.Generator,
) -> Iterator[Tensor]:
    """Fit the projection to all points, labeled and wild; gives the loss of each step as it is done.

    Draws on the CPU, so that the same seed gives the same triples on every device.
    """
    n, k = graph.index.shape
    # the authors' index gives squared distances, and their loss squares what it is given
    limit = graph.distance.pow(4)
    optimiser = torch.optim.Adam(projection.parameters(), lr=schedule.lr, weight_decay=schedule.weight_decay)
    for _ in range(schedule.steps):
        anchor, other = torch.randint(0, n, (2, schedule.batch_size), generator=generator)
        place = torch.randint(0, k, (schedule.batch_size,), generator=generator)
        neighbour = graph.index[anchor, place]
        near, joined, far = (projection(features[which.to(features.device)]) for which in (anchor, neighbour, other))
        loss = structure_loss(near, joined, far, limit[anchor, place].to(features), schedule.margin)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        yield loss.detach()


def class_centres(points: Float[Tensor, "m d"], labels: Int[Tensor, " m"], n_classes: int) -> Float[Tensor, "c d"]:
    """The mean of each class. A class without a sample is nobody's nearest: its centre is not a number."""
    count = labels.bincount(minlength=n_classes)
    total = points.double().new_zeros(n_classes, points.shape[1]).index_add(0, labels, points.double())
    return (total / count[:, None]).to(points)


def centre_scores(points: Float[Tensor, "n d"], centres: Float[Tensor, "c d"]) -> Float[Tensor, "n c"]:
    """Minus the distance to each centre: the nearest class scores highest, and its score is how ID-like a point is."""
    distance = torch.cdist(points, centres, compute_mode="donot_use_mm_for_euclid_dist")
    return -torch.where(distance.isnan() & points.isfinite().all(1)[:, None], torch.inf, distance)
