"""The paper's example in the plane (its Figure 2 and appendix): three Gaussians, and two kinds of outliers.

Each set holds what the paper states and, where it states nothing, parts of the same kind for calibration and test. With
shares of 0.2 for training, 0.2 for calibration, 0.6 for the wild and the official test, a class has 1,000 points for
training and 3,000 in the wild, and a share π of 0.1 puts just 1,000 outliers beside them: the paper's sizes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from salcli.data.image_set import ImageSet
from salcli.seeding import generator

SEED = 0
MEANS = np.array([[-2, 0], [2, 0], [0, 2 * np.sqrt(3)]])
VARIANCE = 0.25
CENTRE = np.array([0, 2 / np.sqrt(3)])
N_TRAINING, N_CALIBRATION, N_WILD, N_TEST = 1_000, 1_000, 3_000, 1_000  # of each class
N_OUTLIERS = 1_000  # in the wild, and as many for the test
RING_VARIANCE, N_RING_DRAWN = 7, 100_000
CLUSTER_MEAN, CLUSTER_VARIANCE = np.array([10, 2 / np.sqrt(3)]), 0.25

Points = NDArray[np.float64]


def load_gaussians_2d() -> ImageSet:
    """Three classes of points, each a Gaussian."""
    rng = generator(SEED, "gaussians-2d")
    n_dealt = N_TRAINING + N_CALIBRATION + N_WILD
    classes = [_gaussian(rng, mean, VARIANCE, n_dealt + N_TEST) for mean in MEANS]
    return ImageSet(
        _as_images(np.concatenate(classes)),
        np.repeat(np.arange(len(MEANS)), n_dealt + N_TEST),
        ("left", "right", "top"),
        np.tile(np.arange(n_dealt + N_TEST) >= n_dealt, len(MEANS)),
    )


def load_ring_2d() -> ImageSet:
    """Scenario 1: of 100,000 points around the centre of the classes, the 1,000 that lie farthest away."""
    rng = generator(SEED, "ring-2d")
    return _outliers([_farthest(_gaussian(rng, CENTRE, RING_VARIANCE, N_RING_DRAWN)) for _ in range(2)])


def load_cluster_2d() -> ImageSet:
    """Scenario 2: a cluster to the right of all classes."""
    rng = generator(SEED, "cluster-2d")
    return _outliers([_gaussian(rng, CLUSTER_MEAN, CLUSTER_VARIANCE, N_OUTLIERS) for _ in range(2)])


def _gaussian(rng: np.random.Generator, mean: Points, variance: float, n: int) -> Points:
    points: Points = mean + np.sqrt(variance) * rng.standard_normal((n, 2))
    return points


def _farthest(points: Points) -> Points:
    distance = np.linalg.norm(points - CENTRE, axis=1)
    return points[np.sort(np.argsort(distance)[-N_OUTLIERS:])]  # in the order drawn: rank tells nothing


def _outliers(wild_and_test: list[Points]) -> ImageSet:
    return ImageSet(_as_images(np.concatenate(wild_and_test)), is_test=np.arange(2 * N_OUTLIERS) >= N_OUTLIERS)


def _as_images(points: Points) -> NDArray[np.float32]:
    return points.astype(np.float32)[:, :, None, None]
