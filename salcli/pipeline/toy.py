"""toy: the paper's example in the plane (Section 3.1, Appendix Q), without any file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from salcli.data import readers
from salcli.data.sets import Samples
from salcli.engine.training import Sgd, reproducible
from salcli.models.network import Classifier, NetworkSpec
from salcli.progress import Progress, Silent
from salcli.sal.gradients import Factors, last_layer_residual, mean_gradient
from salcli.sal.metrics import threshold_that_keeps
from salcli.sal.seeding import generator
from salcli.sal.spectrum import CentredGradients, top_directions
from salcli.sal.tau import SeparationErrors, Spectrum, class_conditional_tau, separation_errors

Scenario = Literal["ring", "cluster"]
OUTLIERS: dict[Scenario, Callable[[], Samples]] = {"ring": readers.ring_2d, "cluster": readers.cluster_2d}
# As `filter.calibration` has them: the paper's text, our default, the authors' code.
CALIBRATIONS = ("train", "holdout", "id-svd")
QUANTILE = 0.95
# Training as in the authors' code: plain SGD on the points as they are.
EPOCHS, BATCH_SIZE, LR, WEIGHT_DECAY = 3, 32, 0.01, 0.4
MEAN, STD = (0.0, 0.0), (1.0, 1.0)


@dataclass(frozen=True)
class ToySizes:
    """How many points there are of each class, and how many outliers. The defaults are the paper's."""

    training: int = readers.N_TRAINING
    calibration: int = readers.N_CALIBRATION
    wild: int = readers.N_WILD
    outliers: int = readers.N_OUTLIERS


@dataclass(frozen=True)
class GradientPlane:
    """Centred gradients of the wild points that are predicted as one class, on the plane of v and the next vector."""

    predicted: int
    projection: Tensor  # n, 2; on v first, with the outliers on the positive side
    is_ood: Tensor


@dataclass(frozen=True)
class ToyRun:
    """One scenario with one seed."""

    scenario: Scenario
    seed: int
    wild: Tensor  # m, 2: inliers, then outliers
    is_ood: Tensor
    inlier_class: Tensor  # of the wild inliers; the filter does not see it
    tau: Tensor
    thresholds: dict[str, float]  # by calibration
    plane: GradientPlane
    accuracy: float  # on training points

    def errors(self, calibration: str) -> SeparationErrors:
        """ERR_in and ERR_out at the threshold of a calibration."""
        return separation_errors(self.tau > self.thresholds[calibration], self.is_ood)


@dataclass(frozen=True)
class _Points:
    """n points with labels."""

    vectors: Tensor  # n, 2
    labels: Tensor


def run(seeds: Sequence[int], sizes: ToySizes | None = None, progress: Progress | None = None) -> list[ToyRun]:
    """Both scenarios with every seed, seed by seed: a seed's two scenarios share their classifier."""
    sizes, results = sizes or ToySizes(), []
    inliers = readers.gaussians_2d()
    outliers = {scenario: torch.from_numpy(load().array) for scenario, load in OUTLIERS.items()}
    with (progress or Silent()).task("toy", len(seeds), "seeds") as task:
        for seed in seeds:
            training, calibration, wild = _split(inliers, sizes, seed)
            network = _train(training, seed)
            for scenario, vectors in outliers.items():
                chosen = generator(seed, f"toy, {scenario}").permutation(len(vectors))[: sizes.outliers]
                results.append(_filter(network, training, calibration, wild, vectors[chosen], scenario, seed))
            task.advance(1)
    return results


def _split(inliers: Samples, sizes: ToySizes, seed: int) -> list[_Points]:
    """Disjoint parts, each with the same number of points of every class."""
    assert inliers.labels is not None
    rng = generator(seed, "toy, deal")
    ends = np.cumsum([sizes.training, sizes.calibration, sizes.wild])
    parts_of_class = [
        np.split(rng.permutation(np.flatnonzero(inliers.labels == k)), ends)[:3]
        for k in range(len(inliers.class_names))
    ]
    parts = [np.concatenate(part) for part in zip(*parts_of_class, strict=True)]
    return [_Points(torch.from_numpy(inliers.array[part]), torch.from_numpy(inliers.labels[part])) for part in parts]


def _train(training: _Points, seed: int) -> Classifier:
    n = len(training.labels)
    with reproducible(seed, "toy") as order:
        network = Classifier(NetworkSpec("mlp", len(readers.MEANS), MEAN, STD))
        optimizer = Sgd(network.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
        for _ in range(EPOCHS):
            for batch in torch.randperm(n, generator=order).split(BATCH_SIZE):  # type: ignore[no-untyped-call]
                optimizer.zero_grad()
                loss = cross_entropy(network(training.vectors[batch]), training.labels[batch])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return network.eval()


def _factors(network: Classifier, vectors: Tensor, labels: Tensor | None = None) -> Factors:
    """Gradients with the given labels, else with the predicted ones."""
    with torch.inference_mode():
        feature, logits = network.features_and_logits(vectors)
    label = logits.argmax(1) if labels is None else labels
    return Factors(last_layer_residual(logits, label), feature, label)


def _filter(
    network: Classifier,
    training: _Points,
    calibration: _Points,
    inliers: _Points,
    outliers: Tensor,
    scenario: Scenario,
    seed: int,
) -> ToyRun:
    """Class-conditional ∇̄ and v (Remark 2), and the threshold that each way to calibrate leads to."""
    wild = torch.cat([inliers.vectors, outliers])
    is_ood = torch.arange(len(wild)) >= len(inliers.vectors)
    id_train, held_out, wild_factors = (
        _factors(network, training.vectors, training.labels),
        _factors(network, calibration.vectors),
        _factors(network, wild),
    )
    classes = range(len(readers.MEANS))
    on_wild, on_own = (
        Spectrum(id_train, [one], contrast=False).of_classes(classes, class_conditional_reference=True)
        for one in (wild_factors, id_train)
    )
    tau, train_tau, held_out_tau = class_conditional_tau(on_wild, [wild_factors, id_train, held_out])
    (own_tau,) = class_conditional_tau(on_own, [id_train])
    calibrated = dict(zip(CALIBRATIONS, (train_tau, held_out_tau, own_tau), strict=True))
    predicted = network(training.vectors).argmax(1)
    return ToyRun(
        scenario=scenario,
        seed=seed,
        wild=wild,
        is_ood=is_ood,
        inlier_class=inliers.labels,
        tau=tau,
        thresholds={
            name: threshold_that_keeps(one[~one.isnan()].numpy(), QUANTILE) for name, one in calibrated.items()
        },
        plane=_plane(wild_factors, id_train, is_ood),
        accuracy=float((predicted == training.labels).double().mean()),
    )


def _plane(wild: Factors, id_train: Factors, is_ood: Tensor) -> GradientPlane:
    """Of the class that most outliers are taken for."""
    k = int(wild.label[is_ood].mode().values)
    G = CentredGradients(wild.of_class(k), mean_gradient(id_train.of_class(k))[None])
    projection = G.project(top_directions([(G, 1.0)], 2))
    own_ood = is_ood[wild.label == k]
    projection = projection * torch.where(projection[own_ood].mean(0) < 0, -1, 1)  # the sign of v is arbitrary
    return GradientPlane(k, projection, own_ood)
