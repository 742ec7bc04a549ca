"""What an experiment will cost, from its params and published sizes. Estimates, not measurements.

Work is the number of images that go through a network:

- train-id: ID training images × epochs, per seed;
- train-ood: twice that (as many outliers as ID images), per seed, OOD set, π and method (a variant of SAL or a rival);
- train-encoder: two views of the ID training images × epochs for KNN+, eight for CSI; then one and four for the heads;
- STEP: two views of the ID training and wild images × epochs, per seed, OOD set and π;
- one pass over training, calibration and wild images for the gradients, and one of each network over all test images.

GPU memory is that of the largest training step:

    0.5 GB + 12 bytes × weights + 4 bytes × activations of an image × images in a step

for CUDA itself, for weights with gradients and momenta, and for the backward pass. Activations are summed over the
layers for 32×32 images in float32; a lower precision needs less.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from salcli.data.catalogue import DataSet, data_set
from salcli.errors import unknown_name

ENCODER_VIEWS = {"knn-plus": (2, 1), "csi": (8, 4)}  # of an image in a step: for the features, for the heads
STEP = "step"
CUDA_BYTES = 0.5e9


class NetworkSize(NamedTuple):
    """What decides how much memory a network needs."""

    n_weights: float
    n_activations: float  # values that one image leaves behind for the backward pass


NETWORKS = {
    "mlp": NetworkSize(1.3e3, 200),
    "small-cnn": NetworkSize(1e5, 5e4),
    "wrn-40-2": NetworkSize(2.2e6, 2.4e6),
    "resnet18": NetworkSize(11.2e6, 1.5e6),
    "resnet34": NetworkSize(21.3e6, 2.7e6),
}


@dataclass(frozen=True)
class SetSize:
    """The size of a custom data set; those of published ones are known."""

    n_images: int
    n_test: int = 0

    @property
    def n_for_training(self) -> int:
        return self.n_images - self.n_test


def estimated_gigabytes(params: Mapping[str, Any]) -> float:
    """GPU memory of the largest training step."""
    name, methods = params["model"]["backbone"], params["methods"]
    if name not in NETWORKS:
        raise unknown_name("network of a preset", name, NETWORKS)
    in_a_step: list[int] = [params["train_id"]["batch_size"], 2 * params["train_ood"]["batch_size"]]
    in_a_step += [ENCODER_VIEWS[encoder][0] * methods[encoder]["batch_size"] for encoder in params["encoders"]]
    if STEP in params["rivals"]:
        in_a_step.append(2 * methods[STEP]["batch_size"])
    n_weights, n_activations = NETWORKS[name]
    return (CUDA_BYTES + 12 * n_weights + 4 * n_activations * max(in_a_step)) / 1e9


def estimated_images(params: Mapping[str, Any], sizes: Mapping[str, SetSize] | None = None) -> int:
    """Images through a network, over all seeds, OOD sets and π; `sizes` are those of custom data sets."""

    def size(name: str) -> SetSize | DataSet:
        return sizes[name] if sizes and name in sizes else data_set(name)

    data, methods = params["data"], params["methods"]
    shares, rivals, encoders = data["id_shares"], params["rivals"], params["encoders"]
    n_id, n_id_test = _id_sizes(size(data["id"]), shares["test"])
    n_train = shares["train"] * n_id
    n_fine_tuned = len(params["variants"]) + sum(rival != STEP for rival in rivals)  # by the schedule of train_ood
    n_networks = 1 + len(params["variants"]) + len(rivals) + len(encoders)
    one_seed: float = n_train * params["train_id"]["epochs"] + (shares["train"] + shares["calibration"]) * n_id
    for name in encoders:
        n_views, n_head_views = ENCODER_VIEWS[name]
        one_seed += n_train * (n_views * methods[name]["epochs"] + n_head_views * methods[name]["head"]["epochs"])
    for ood in data["ood"]:
        n_unseen = sum(size(name).n_test or size(name).n_images for name in data["test_ood"] if name != ood)
        for pi in data["pi"]:
            n_pool, n_ood_test = _ood_sizes(size(ood), pi, data["ood_wild_share"])
            n_wild = _wild_size(shares["wild"] * n_id, n_pool, pi)
            one_seed += n_fine_tuned * 2 * n_train * params["train_ood"]["epochs"] + n_wild
            one_seed += n_networks * (n_id_test + n_ood_test + n_unseen)
            if STEP in rivals:
                one_seed += 2 * (n_train + n_wild) * methods[STEP]["epochs"]
    return round(one_seed * len(params["seeds"]))


def _id_sizes(source: SetSize | DataSet, test_share: float | str) -> tuple[float, float]:
    """What the other shares are shares of, and the test set."""
    if isinstance(test_share, str):
        return source.n_for_training, source.n_test
    return source.n_images, test_share * source.n_images


def _ood_sizes(source: SetSize | DataSet, pi: float | str, wild_share: float) -> tuple[float, float]:
    """For the wild set, and for the test."""
    if isinstance(pi, str):  # unknown: all of it is wild
        return source.n_images, 0
    if source.n_test:
        return source.n_for_training, source.n_test
    return wild_share * source.n_images, (1 - wild_share) * source.n_images


def _wild_size(n_id: float, n_ood: float, pi: float | str) -> float:
    """The largest mixture with a share pi of OOD data; all of the OOD set where pi is unknown."""
    if isinstance(pi, str):
        return n_ood
    return n_ood if pi == 1 else min(n_id / (1 - pi), n_ood / pi)
