"""All post-hoc scores beside one forward pass, and all metrics beside one sort."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.speed.clock import shown, side_by_side
from benchmarks.speed.made_up import ID, OOD, SEED, image_experiment, write_gradients
from benchmarks.speed.other_ways import bare_forward, best_batch, ready
from benchmarks.speed.rows import Goal, Row, Sizes
from salcli.artifacts import layout
from salcli.artifacts.fingerprint import fingerprint
from salcli.metrics import ood_metrics
from salcli.stages import evaluate
from salcli.stages.inputs import classifier_of, id_images, ood_test_images

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

POST_HOC = ("sal-posthoc", "msp", "mahalanobis", "energy", "knn", "react", "dice", "ash", "gradnorm", "vim")
ID_TRAIN, WILD = 22_500, 27_778  # of the CIFAR-10 protocol, whatever the number of test images


def rows(sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Two lines of the table."""
    made = image_experiment(folder / "images", 4 * sizes.images, sizes.backbone, sizes.device)
    network, found = classifier_of(made.workspace, SEED)
    for place, n in ((layout.id_gradients("train", SEED), ID_TRAIN), (layout.wild_gradients(OOD, SEED), WILD)):
        mixture = fingerprint(made.workspace.find(layout.wild_mixture(OOD, SEED)))
        path = made.workspace.target(place)
        write_gradients(path, n, 10, network.n_features, fingerprint(found), wild=mixture)
    chosen = made.params.evaluate.model_copy(update={"methods": POST_HOC})
    params = made.params.model_copy(update={"evaluate": chosen})
    batches = [
        batch
        for images in (id_images(made.workspace, ID, "test", SEED).images, ood_test_images(made.workspace, OOD, SEED))
        for batch in ready(network, images.read(slice(None)), best_batch(chosen.batch_size, sizes.device), sizes.device)
    ]
    n_images = sum(len(batch) for batch in batches)
    timed = side_by_side(
        lambda: evaluate.run(made.workspace, params, OOD, SEED), lambda: bare_forward(network, batches), sizes.repeats
    )
    yield Row(
        f"evaluate, {len(POST_HOC)} post-hoc scores / one forward pass ({sizes.backbone}, {n_images:,} images)",
        Goal(1.3, at_most=True), timed.times_longer, shown(timed.ours), shown(timed.other),
        note=f"with {ID_TRAIN:,} ID training samples, {WILD:,} wild ones, metrics and files",
    )  # fmt: skip

    rng = np.random.default_rng(0)
    half = sizes.scores // 2
    of_id, of_ood = rng.standard_normal(half) + 1, rng.standard_normal(sizes.scores - half)
    both = np.concatenate([of_id, of_ood])
    timed = side_by_side(lambda: ood_metrics(of_id, of_ood), lambda: np.sort(both), sizes.repeats)
    yield Row(
        f"FPR95, AUROC, both AUPR of {sizes.scores:,} scores / one numpy.sort",
        Goal(4, at_most=True), timed.times_longer, shown(timed.ours), shown(timed.other),
    )  # fmt: skip
