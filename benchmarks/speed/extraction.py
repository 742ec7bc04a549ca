"""extract-grads beside a bare forward pass, and beside per-sample gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.speed.clock import seconds_of, shown, side_by_side
from benchmarks.speed.made_up import OOD, SEED, image_experiment
from benchmarks.speed.memory import peak_of
from benchmarks.speed.other_ways import bare_forward, best_batch, per_sample_gradients, ready
from benchmarks.speed.rows import Goal, Row, Sizes
from salcli.stages import extract_grads
from salcli.stages.inputs import classifier_of, wild_images

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PER_SAMPLE_BATCH = 32  # a gradient of all weights for each sample takes memory
N_PER_SAMPLE_BATCHES = 4
MEMORY_BACKBONE = "small-cnn"  # images pass quickly; what is held of them is the same


def rows(sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Three lines of the table."""
    made = image_experiment(folder / "images", sizes.images, sizes.backbone, sizes.device)
    images = wild_images(made.workspace, made.params.data.id, OOD, SEED).read(slice(None))
    network, _ = classifier_of(made.workspace, SEED)
    batches = ready(network, images, best_batch(made.params.extract_grads.batch_size, sizes.device), sizes.device)

    def ours() -> None:
        extract_grads.run_wild(made.workspace, made.params, OOD, SEED)

    timed = side_by_side(ours, lambda: bare_forward(network, batches), sizes.repeats + 2)  # near one: noise counts
    rate, of_the_limit = len(images) / min(timed.ours), timed.times_faster
    yield Row(
        f"extract-grads / bare forward pass ({sizes.backbone}, {len(images):,} images)",
        Goal(0.95), of_the_limit, shown(timed.ours), shown(timed.other), note=f"{rate:,.0f} images/s",
    )  # fmt: skip

    some = [batch[:PER_SAMPLE_BATCH] for batch in batches][:N_PER_SAMPLE_BATCHES]
    n_some = sum(len(batch) for batch in some)
    whole = _of_normalised(network)
    timed = side_by_side(ours, lambda: per_sample_gradients(whole, some, of=""), sizes.repeats)
    head_alone = seconds_of(lambda: per_sample_gradients(whole, some, of="head."))
    times_faster = timed.times_faster * len(images) / n_some
    yield Row(
        "extract-grads / per-sample vmap(grad) of all weights",
        Goal(6), times_faster,
        f"{min(timed.ours) / len(images) * 1e3:.3g} ms", f"{min(timed.other) / n_some * 1e3:.3g} ms",
        note=f"an image; the limit, a bare forward pass: {times_faster / of_the_limit:.3g} ×; "
        f"of the head's weights alone, vmap(grad) takes {head_alone / n_some * 1e3:.3g} ms",
    )  # fmt: skip

    many, few = 8 * sizes.images, 2 * sizes.images
    peaks = [peak_of("extract", n, MEMORY_BACKBONE, repeats=3).own for n in (many, few)]
    yield Row(
        f"extract-grads, peak memory, {many:,} images / {few:,}",
        Goal(1.1, at_most=True), peaks[0] / peaks[1], f"{peaks[0]:.0f} MB", f"{peaks[1]:.0f} MB",
    )  # fmt: skip


def _of_normalised(network):  # type: ignore[no-untyped-def]
    """The same network, called with images that are normalised already."""
    bare = type("Bare", (type(network),), {"forward": lambda self, batch: self.logits_of_normalised(batch)})
    network.__class__ = bare
    return network
