"""What an experiment will cost: work and memory from its params and published sizes, time from a short measurement.

Work is the number of samples that go through a network:

- train-id: ID training images × epochs, per seed;
- train-ood: twice that (as many outliers as ID images), per seed, OOD set, π and method (a variant of SAL or a rival);
- train-encoder: two views of the ID training images × epochs for KNN+, eight for CSI; then one and four for the heads;
- STEP: two views of the ID training and wild images × epochs, per seed, OOD set and π;
- one pass over training, calibration and wild images for the gradients, and one of each network over all test images.

GPU memory is that of the largest training step:

    0.5 GB + 12 bytes × weights + 4 bytes × activations of an image × images in a step

for CUDA itself, for weights with gradients and momenta, and for the backward pass. Activations are summed over the
layers for 32×32 images in float32; a lower precision needs less.

Time is work × seconds for one sample, timed on a few batches of what will really run, plus the start of a process for
every stage, timed on one.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from salcli.data.catalogue import DataSet, data_set
from salcli.errors import unknown_name
from salcli.params.reading import lookup, read_yaml

# views of an image in a step: for the features, for the heads
ENCODER_VIEWS = {"knn-plus": (2, 1), "csi": (8, 4), "all-id": (1, 0)}
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
    if params["model"]["frozen"]:  # linear heads
        return CUDA_BYTES / 1e9
    if name not in NETWORKS:
        raise unknown_name("network of a preset", name, NETWORKS)
    in_a_step: list[int] = [params["train_id"]["batch_size"], 2 * params["train_ood"]["batch_size"]]
    in_a_step += [ENCODER_VIEWS[encoder][0] * methods[encoder]["batch_size"] for encoder in params["encoders"]]
    if STEP in params["rivals"]:
        in_a_step.append(2 * methods[STEP]["batch_size"])
    n_weights, n_activations = NETWORKS[name]
    return (CUDA_BYTES + 12 * n_weights + 4 * n_activations * max(in_a_step)) / 1e9


class Work(NamedTuple):
    """Samples through a network, over all seeds, OOD sets and π."""

    n_trained: float  # there and back, once for each epoch and view
    n_passed: float  # without gradients


def estimated_images(params: Mapping[str, Any]) -> int:
    """Images through a network, in all."""
    if params["model"]["frozen"]:  # embedded once; then only heads are trained
        data = params["data"]
        return sum(data_set(name).n_images for name in {data["id"], *data["ood"], *data["test_ood"]})
    return round(sum(estimated_work(params)))


def estimated_work(params: Mapping[str, Any], sizes: Mapping[str, SetSize] | None = None) -> Work:
    """`sizes` are those of custom data sets."""

    def size(name: str) -> SetSize | DataSet:
        return sizes[name] if sizes and name in sizes else data_set(name)

    data, methods = params["data"], params["methods"]
    shares, rivals, encoders = data["id_shares"], params["rivals"], params["encoders"]
    id_set, is_official = size(data["id"]), isinstance(shares["test"], str)
    n_id = id_set.n_for_training if is_official else id_set.n_images  # what the other shares are shares of
    n_id_test = id_set.n_test if is_official else shares["test"] * n_id
    n_train = shares["train"] * n_id
    n_fine_tuned = len(params["variants"]) + sum(rival != STEP for rival in rivals)  # by the schedule of train_ood
    n_networks = 1 + len(params["variants"]) + len(rivals) + len(encoders)
    trained: float = n_train * params["train_id"]["epochs"]
    passed: float = (shares["train"] + shares["calibration"]) * n_id
    if data["calibration"] is not None:
        passed += size(data["calibration"]).n_images
    for name in encoders:
        n_views, n_head_views = ENCODER_VIEWS[name]
        own, n_own = methods[name], shares["train"] * n_id
        if own.get("images", "all") == "all":
            n_own += (shares["calibration"] + shares["wild"]) * n_id
        trained += n_own * (n_views * own["epochs"] + (n_head_views * own["head"]["epochs"] if n_head_views else 0))
    for ood in data["ood"]:
        n_unseen = sum(size(name).n_test or size(name).n_images for name in data["test_ood"] if name != ood)
        for pi in data["pi"]:
            n_pool, n_ood_test = _ood_sizes(size(ood), pi, data["ood_wild_share"])
            # the largest mixture with a share pi of OOD data; all of the OOD set where pi is unknown
            n_id_pool, n_wild = float("inf") if data["mixing"] == "recycle" else shares["wild"] * n_id, n_pool
            if not isinstance(pi, str) and pi < 1:
                n_wild = min(n_id_pool / (1 - pi), n_pool / pi)
            trained += n_fine_tuned * 2 * n_train * params["train_ood"]["epochs"]
            passed += n_wild + n_networks * (n_id_test + n_ood_test + n_unseen)
            if STEP in rivals:
                trained += 2 * (n_train + n_wild) * methods[STEP]["epochs"]
    return Work(trained * len(params["seeds"]), passed * len(params["seeds"]))


def _ood_sizes(source: SetSize | DataSet, pi: float | str, wild_share: float) -> tuple[float, float]:
    """For the wild set, and for the test."""
    if isinstance(pi, str):  # unknown: all of it is wild
        return source.n_images, 0
    if source.n_test:
        return source.n_for_training, source.n_test
    return wild_share * source.n_images, (1 - wild_share) * source.n_images


# --- time


def n_processes(params: Mapping[str, Any]) -> int:
    """How many stages `dvc repro` starts, each in a process of its own."""
    stages = read_yaml(Path(__file__).with_name("pipeline.yaml"))["stages"]
    axes = [[str(axis)[2:-1] for axis in stage.get("matrix", {}).values()] for stage in stages.values()]  # ${KEY}
    return sum(prod(len(lookup(params, key)) for key in keys) for keys in axes)


def n_separations(params: Mapping[str, Any]) -> int:
    """How often SAL+ is fitted: in evaluations once, in filters with five folds."""
    data = params["data"]
    n_experiments = len(params["seeds"]) * len(data["ood"]) * len(data["pi"])
    in_evaluations = 1 + len(data["test_ood"]) if params["evaluate"]["methods"] == "all" else 0
    return n_experiments * (6 * len(params["filters"]) + in_evaluations)


@cache
def start_up_seconds() -> float:
    """From the start of a process until a stage works: most of it is the import of torch."""
    start = time.perf_counter()
    code = "import salcli.pipeline.evaluate, salcli.report.console"
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    return time.perf_counter() - start


def seconds_each(step: Callable[[int], object], most: int, budget: float = 2.0) -> float:
    """Time for one sample, where step(n) works on a batch of n.

    Batches double up to `most`, because a large one may take minutes; it stops where the next one would exceed the
    budget (in seconds).
    """
    n, spent, each = min(2, most), 0.0, float("inf")
    step(n)  # the first batch pays for what is done once
    while n <= most and (spent == 0 or spent + n * each <= budget):
        start = time.perf_counter()
        step(n)
        took = time.perf_counter() - start
        spent, each, n = spent + took, min(each, took / n), 2 * n
    return each


def shown_time(seconds: float) -> str:
    """`about 40 s`, `about 3 min`, `about 2.5 h`."""
    if seconds < 55:
        return f"about {max(5, 5 * round(seconds / 5))} s"
    if seconds < 90 * 60:
        return f"about {max(1, round(seconds / 60))} min"
    hours = seconds / 3600
    return f"about {hours:.1f} h" if hours < 10 else f"about {hours:,.0f} h"
