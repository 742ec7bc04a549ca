"""What a preset will cost, from its params and published sizes. Estimates, nothing here was measured.

Work counts the images that go through a network, in M (millions):

- train-id: ID training images × epochs, for each seed;
- train-ood: twice that (as many outliers as ID images), for each seed, OOD set and method, SAL or a rival;
- train-encoder: two views of the ID training images × epochs for KNN+, eight for CSI; then one and four for the heads;
- STEP: two views of the ID training and wild images × epochs, for each seed and OOD set;
- one pass over training, calibration and wild images for the gradients, one of each network over every test image.

GPU memory is that of the largest training step, train-encoder's, STEP's or else train-ood's:

    0.5 GB + weights × 12 bytes + activations of an image × images in a step × 4 bytes

for CUDA itself, for weights with their gradients and momenta, and for what the backward pass needs. The activations are
a sum over layers for 32×32 images in float32; a lower precision needs less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from salcli.errors import unknown_name
from salcli.fetching.registry import data_source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from salcli.fetching.data_source import DataSource

GIGA = 10**9
ENCODER_VIEWS = {"knn-plus": (2, 1), "csi": (8, 4)}  # of an image in a step: for the features, for the heads
CUDA_BYTES = 0.5 * GIGA


@dataclass(frozen=True)
class NetworkFacts:
    """n_weights, and the numbers that one image leaves behind for the backward pass."""

    n_weights: float
    n_activations: float


NETWORKS = {
    "mlp": NetworkFacts(1.3e3, 200),
    "small-cnn": NetworkFacts(1e5, 5e4),
    "wrn-40-2": NetworkFacts(2.2e6, 2.4e6),
    "resnet18": NetworkFacts(11.2e6, 1.5e6),
    "resnet34": NetworkFacts(21.3e6, 2.7e6),
}


def estimated_gigabytes(params: Mapping[str, Any]) -> float:
    """GPU memory of a training step."""
    name = params["model"]["backbone"]
    if name not in NETWORKS:
        raise unknown_name("network of a preset", name, NETWORKS)
    network = NETWORKS[name]
    of_encoders = [ENCODER_VIEWS[name][0] * params["train_encoder"][name]["batch_size"] for name in params["encoders"]]
    of_step = [2 * params["train_rival"]["step"]["batch_size"]] if "step" in params["rivals"] else []
    of_train = params["train_id"]["batch_size"], 2 * params["train_ood"]["batch_size"]
    n_images: int = max(*of_train, *of_encoders, *of_step)
    return (CUDA_BYTES + 12 * network.n_weights + 4 * network.n_activations * n_images) / GIGA


@dataclass(frozen=True)
class SetSize:
    """Of a set of the user's own; published ones are known."""

    n_images: int
    n_test: int = 0

    @property
    def n_for_training(self) -> int:
        """The images that are not for testing."""
        return self.n_images - self.n_test


def estimated_images(params: Mapping[str, Any], sizes: Mapping[str, SetSize] | None = None) -> int:
    """Images that go through a network, over all seeds and OOD sets; `sizes` are those of the user's own sets."""
    data, shares, sizes = params["data"], params["data"]["id_shares"], sizes or {}
    n_id, n_id_test = _id_sizes(data, sizes)
    n_train = shares["train"] * n_id
    train_id = n_train * params["train_id"]["epochs"]
    one_seed: float = train_id + (shares["train"] + shares["calibration"]) * n_id
    for name in params["encoders"]:
        own, (n_views, n_head_views) = params["train_encoder"][name], ENCODER_VIEWS[name]
        one_seed += n_train * (n_views * own["epochs"] + n_head_views * own["head"]["epochs"])
    for ood in data["ood"]:
        n_pool, n_ood_test = _ood_sizes(ood, data, sizes)
        n_unseen = sum(_unseen_size(name, sizes) for name in data["test_ood"] if name != ood)
        train_ood = 2 * n_train * params["train_ood"]["epochs"]
        n_wild = _wild_size(shares["wild"] * n_id, n_pool, data["pi"])
        others = [rival for rival in params["rivals"] if rival != "step"]
        one_seed += (1 + len(others)) * train_ood + n_wild
        if "step" in params["rivals"]:
            one_seed += 2 * (n_train + n_wild) * params["train_rival"]["step"]["epochs"]
        n_networks = 2 + len(params["rivals"]) + len(params["encoders"])
        one_seed += n_networks * (n_id_test + n_ood_test + n_unseen)
    return round(one_seed * len(params["seeds"]))


def _size(name: str, sizes: Mapping[str, SetSize]) -> SetSize | DataSource:
    return sizes[name] if name in sizes else data_source(name)


def _id_sizes(data: Mapping[str, Any], sizes: Mapping[str, SetSize]) -> tuple[float, float]:
    """What the shares are shares of, and the test set."""
    source, share = _size(data["id"], sizes), data["id_shares"]["test"]
    if share == "official":
        return source.n_for_training, source.n_test
    return source.n_images, share * source.n_images


def _ood_sizes(name: str, data: Mapping[str, Any], sizes: Mapping[str, SetSize]) -> tuple[float, float]:
    """For the wild, and for the test."""
    source, wild_share = _size(name, sizes), data["ood_wild_share"]
    if data["pi"] == "unknown":
        return source.n_images, 0
    if source.n_test:
        return source.n_for_training, source.n_test
    return wild_share * source.n_images, (1 - wild_share) * source.n_images


def _unseen_size(name: str, sizes: Mapping[str, SetSize]) -> int:
    """Nothing of such a set is in the wild: all of it can be tested on, or its official test split."""
    source = _size(name, sizes)
    return source.n_test or source.n_images


def _wild_size(n_id: float, n_ood: float, pi: float | str) -> float:
    """The largest mixture with a share pi of OOD data; all of them, where nothing is mixed."""
    if isinstance(pi, str):
        return n_ood
    return n_ood / pi if pi == 1 else min(n_id / (1 - pi), n_ood / pi)
