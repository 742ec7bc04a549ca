"""filter beside dense SVDs; how its time and its memory grow."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.speed.clock import seconds_of, shown, side_by_side
from benchmarks.speed.made_up import OOD, SEED, gradient_experiment
from benchmarks.speed.memory import peak_of
from benchmarks.speed.other_ways import dense_scores, dense_svd
from benchmarks.speed.rows import Goal, Row, Sizes
from salcli.sal.gradients import Factors
from salcli.stages import filter as filter_stage
from salcli.stages.separators import Gradients

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.speed.made_up import Experiment
    from salcli.artifacts.gradients import GradientFile

SAME = 1e-5  # of the largest score
SMALLER = 8  # each side of the dense SVD that a whole one is extrapolated from


def rows(sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Six lines of the table."""
    shape = sizes.classes, sizes.features
    size = f"m {sizes.wild:,}, K {sizes.classes}, D {sizes.features}"
    made = gradient_experiment(folder / "m", sizes.wild, *shape)
    yield _against_dense_classes(made, sizes, size)

    agnostic = gradient_experiment(folder / "agnostic", sizes.wild, *shape, filter__svd="class-agnostic")
    ours = [seconds_of(lambda: _filter(agnostic)) for _ in range(sizes.repeats)]
    m, width = sizes.wild // SMALLER, sizes.classes * sizes.features // SMALLER
    dense = seconds_of(lambda: dense_svd(m, width)) * SMALLER**3
    yield Row(
        f"filter, class-agnostic, {size} / one dense SVD",
        Goal(200), dense / min(ours), shown(ours), f"{dense:,.0f} s",
        note=f"extrapolated from {m:,} × {width:,}, whose time grows with the cube of the sides",
    )  # fmt: skip

    double = gradient_experiment(folder / "2m", 2 * sizes.wild, *shape)
    timed = side_by_side(lambda: _filter(double), lambda: _filter(made), sizes.repeats)
    yield Row(
        "filter, time at 2m / at m", Goal(2.1, at_most=True), timed.times_longer, shown(timed.ours), shown(timed.other)
    )

    for svd in ("class-conditional", "class-agnostic"):
        peaks = [peak_of("filter", n, *shape, svd, repeats=2).own for n in (4 * sizes.wild, sizes.wild)]
        yield Row(
            f"filter, {svd}, peak memory at 4m / at m",
            Goal(1.1, at_most=True), peaks[0] / peaks[1], f"{peaks[0]:.0f} MB", f"{peaks[1]:.0f} MB",
        )  # fmt: skip

    big = sizes.big_wild, sizes.big_classes, sizes.big_features
    started = time.perf_counter()
    peak = peak_of("filter", *big).whole
    dense_gb = 4 * big[0] * big[1] * big[2] / 1e9
    yield Row(
        f"filter, m {big[0]:,}, K {big[1]:,}, D {big[2]:,}, peak memory",
        Goal(1.5, at_most=True), peak / 1024, f"{peak:.0f} MB", f"{dense_gb:,.0f} GB dense",
        unit="GB", note=f"{time.perf_counter() - started:.0f} s with making up its {big[0]:,} gradients",
    )  # fmt: skip


def _filter(made: Experiment) -> tuple[np.ndarray, np.ndarray]:
    found = filter_stage.run(made.workspace, made.params, OOD, SEED).candidates
    return found.wild_score, found.calibration_score


def _against_dense_classes(made: Experiment, sizes: Sizes, size: str) -> Row:
    ours = [seconds_of(lambda: _filter(made)) for _ in range(sizes.repeats)]
    gradients = Gradients.open(made.workspace, OOD, SEED)
    wild, calibration, id_train = (
        _in_memory(file) for file in (gradients.wild, gradients.calibration, gradients.id_train)
    )
    started = time.perf_counter()
    by_the_book = dense_scores(wild, calibration, id_train, range(sizes.classes))
    dense = time.perf_counter() - started
    apart = max(np.abs(own - exact).max() / exact.max() for own, exact in zip(_filter(made), by_the_book, strict=True))
    if apart > SAME:
        raise AssertionError(f"scores differ from the dense ones by {apart:.1e} of the largest")
    return Row(
        f"filter, class-conditional, {size} / dense SVDs",
        Goal(40), dense / min(ours), shown(ours), f"{dense:.3g} s",
        note=f"scores differ by at most {apart:.0e} of the largest",
    )  # fmt: skip


def _in_memory(file: GradientFile) -> Factors:
    chunks = list(file.chunks())
    return Factors(
        *(torch.cat([getattr(chunk, name) for chunk in chunks]) for name in ("residual", "feature", "label"))
    )
