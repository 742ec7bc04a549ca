"""The filter against dense SVDs, SAL+ against τ, their growth, and the price of storing logits."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from benchmarks.speed.made_up import Setup, filter_project
from benchmarks.speed.measuring import (
    Goal,
    Peak,
    Row,
    Sizes,
    Timed,
    in_new_process,
    lowest_peak,
    peak_during,
    seconds_of,
    side_by_side,
)
from salcli.methods.base import Known
from salcli.methods.combined import CombinedParams, SalPlus
from salcli.methods.logits import Energy, GradNorm, Msp
from salcli.pipeline import filter as filter_stage
from salcli.pipeline.loading import classifier, id_representation, wild_representation
from salcli.sal.gradients import Factors, FactorSource, Gradients, Representation
from salcli.sal.tau import Spectrum, class_conditional_tau
from salcli.store.formats import CHUNK_BYTES, RepresentationFile

TOLERANCE = 1e-5  # of the largest score
SHRINK = 8  # each side of the dense SVD that the time of the whole one is extrapolated from
Scores = tuple[np.ndarray, np.ndarray]  # of the wild samples, of the calibration samples
Item = TypeVar("Item", Factors, Representation)


def filtering(sizes: Sizes, folder: Path) -> Iterator[Row]:
    shape = sizes.classes, sizes.features
    size = f"m {sizes.wild:,}, K {sizes.classes}, D {sizes.features}"
    conditional = filter_project(folder / "m", sizes.wild, *shape)
    yield _against_dense_svds(conditional, sizes, size)

    agnostic = filter_project(folder / "agnostic", sizes.wild, *shape, "class-agnostic")
    yield _against_one_dense_svd(agnostic, sizes, size)
    yield _against_residuals_in_memory(agnostic, sizes, size)

    double = filter_project(folder / "2m", 2 * sizes.wild, *shape)
    timed = side_by_side(lambda: _filter(double), lambda: _filter(conditional), sizes.repeats)
    yield Row.of_times("filter, time at 2m / at m", Goal(2.1, at_most=True), timed)

    # the rows of fewer are read once and kept
    peaks = [lowest_peak(peak_of_filter, n, *shape, repeats=2) for n in (8 * sizes.wild, 2 * sizes.wild)]
    yield Row.of_memory("filter, class-agnostic, peak memory at 8m / at 2m", *peaks)

    yield _learning_against_tau(conditional, sizes, size)


def _learning_against_tau(setup: Setup, sizes: Sizes, size: str) -> Row:
    """The fit and all scores."""
    gradients, n_calibration = _gradients(setup), max(sizes.classes, sizes.wild // 10)

    def once() -> None:
        _tau(*gradients, setup)

    timed = side_by_side(lambda: _learn(setup, n_calibration), once, sizes.repeats)
    return Row.of_times(f"SAL+ of three scores, {size} / τ", Goal(20, at_most=True), timed)


def scale(sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Against a quarter of the samples. `--big-wild 400000` is closer to ImageNet-1K, and takes 10 minutes."""
    m, shape = sizes.big_wild, (sizes.big_classes, sizes.big_features)
    n_calibration = max(shape[0], m // 40)
    (*large, stored, read, computed), (*small, _, _, _) = (
        in_new_process(costs_at_scale, n, n_calibration, *shape) for n in (m, m // 4)
    )
    size = f"m {m:,} / {m // 4:,}, K {shape[0]:,}, D {shape[1]:,}"
    for what, (seconds, peak), (less, lower) in zip(("filter", "SAL+ of three scores"), large, small, strict=True):
        yield Row.of_times(f"{what}, {size}, time", Goal(4.2, at_most=True), Timed([seconds], [less]))
        yield Row.of_memory(f"{what}, {size}, peak memory", peak, lower)
    whole = large[0][1].whole
    yield Row(
        what=f"filter, m {m:,}, K {shape[0]:,}, D {shape[1]:,}, peak memory",
        goal=Goal(1.5, at_most=True),
        value=whole / 1024,
        ours=f"{whole:.0f} MB",
        baseline=f"{4 * m * shape[0] * shape[1] / 1e9:,.0f} GB dense",
        unit="GB",
    )
    numbers = 4 * sum(shape)
    yield Row(
        what=f"bytes of a sample on disk / its features and logits, K {shape[0]:,}, D {shape[1]:,}",
        goal=Goal(1.01, at_most=True),
        value=stored / numbers,
        ours=f"{stored:,.0f} B",
        baseline=f"{numbers:,} B",
        note=f"to read both takes {1e6 * read:.3g} µs a sample, to compute its logits from the features and the head "
        f"{1e6 * computed:.3g} µs, so logits are stored",
    )


def costs_at_scale(n_wild: int, n_calibration: int, n_classes: int, n_features: int) -> tuple[Any, ...]:
    """Seconds and peak of the filter, then of SAL+, whose calibration data do not grow.

    Then of a stored sample: bytes, seconds to read it, and seconds to compute its logits instead.
    """
    with tempfile.TemporaryDirectory() as folder:
        small = filter_project(Path(folder, "small"), 4 * n_classes, n_classes, n_features)
        _filter(small), _learn(small, n_classes)  # all code is loaded
        setup = filter_project(Path(folder, "large"), n_wild, n_classes, n_features)
        costs = []
        for run in (lambda: _filter(setup), lambda: _learn(setup, n_calibration)):
            start = time.perf_counter()
            peak = peak_during(run)
            costs.append((time.perf_counter() - start, peak))
        wild = wild_representation(setup.workspace, setup.experiment)
        read = seconds_of(lambda: [len(chunk) for chunk in wild.chunks()]) / n_wild
        features, weight = next(iter(wild.chunks())).feature, torch.rand(n_features, n_classes)
        computed = min(seconds_of(lambda: features @ weight) for _ in range(3)) / len(features)
        return *costs, wild.found.path.stat().st_size / n_wild, read, computed


def peak_of_filter(n_wild: int, n_classes: int, n_features: int) -> Peak:
    """After a small run, so that all code is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        _filter(filter_project(Path(folder, "small"), 4 * n_classes, n_classes, n_features, "class-agnostic"))
        large = filter_project(Path(folder, "large"), n_wild, n_classes, n_features, "class-agnostic")
        return peak_during(lambda: _filter(large))


def _against_dense_svds(setup: Setup, sizes: Sizes, size: str) -> Row:
    factors = [_factors(gradients) for gradients in _gradients(setup)]
    expected: list[Scores] = []
    ours = [seconds_of(lambda: _filter(setup)) for _ in range(sizes.repeats)]
    some = range(0, sizes.classes, 10)
    dense = seconds_of(lambda: expected.append(_dense_scores(*factors, some))) * sizes.classes / len(some)
    difference = _check_same(_filter(setup), expected[0])
    return Row.of_times(
        f"filter, class-conditional, {size} / dense SVDs",
        Goal(40),
        Timed(ours, [dense]),
        note=f"extrapolated from {len(some)} classes, whose scores differ by at most {difference:.0e} of the largest",
    )


def _against_one_dense_svd(setup: Setup, sizes: Sizes, size: str) -> Row:
    ours = [seconds_of(lambda: _filter(setup)) for _ in range(sizes.repeats)]
    m, width = sizes.wild // SHRINK, sizes.classes * sizes.features // SHRINK
    noise = np.random.default_rng(0).standard_normal((m, width))
    dense = seconds_of(lambda: np.linalg.svd(noise, full_matrices=False)) * SHRINK**3
    return Row.of_times(
        f"filter, class-agnostic, {size} / one dense SVD",
        Goal(200),
        Timed(ours, [dense]),
        note=f"extrapolated from {m:,} × {width:,}: the time grows with the cube of the sides",
    )


def _against_residuals_in_memory(setup: Setup, sizes: Sizes, size: str) -> Row:
    """Files hold logits, so every pass of the iteration reads them and computes their softmax again."""
    from_files = _gradients(setup)
    residuals = [ResidualsInMemory(**vars(_factors(gradients))) for gradients in from_files]
    logits = [replace(gradients, source=LogitsInMemory(**vars(_whole(gradients)))) for gradients in from_files]

    def scores(wild: FactorSource, calibration: FactorSource, id_train: FactorSource) -> Scores:
        found = _tau(wild, calibration, id_train, setup)
        return found[0].numpy(), found[1].numpy()

    _check_same(scores(*from_files), scores(*residuals))
    timed = side_by_side(lambda: scores(*from_files), lambda: scores(*residuals), sizes.repeats)
    without_files = Timed([seconds_of(lambda: scores(*logits)) for _ in range(sizes.repeats)], timed.baseline)
    return Row.of_times(
        f"filter, class-agnostic, {size}, τ from files of logits / from residuals in memory",
        Goal(1.5, at_most=True),
        timed,
        note=f"from logits in memory, so without reading files: {without_files.times_longer:.3g} ×",
    )


def _learn(setup: Setup, n_calibration: int) -> torch.Tensor:
    """SAL+ from features, logits and three scores of them: its fit, and the scores of all wild samples."""
    workspace, _, experiment = setup
    calibration = id_representation(workspace, "calibration", experiment).take(torch.arange(n_calibration))
    known = Known.of(
        classifier(workspace, experiment),
        id_representation(workspace, "train", experiment),
        wild=wild_representation(workspace, experiment),
        calibration=calibration,
    )
    method = SalPlus(CombinedParams({one.name: one for one in (Energy(), Msp(), GradNorm())}))
    method.fit(known)
    return method.scores(known.wild)


def _tau(wild: FactorSource, calibration: FactorSource, id_train: FactorSource, setup: Setup) -> list[torch.Tensor]:
    params, n_classes = setup.params.filter, int(id_train.label.max()) + 1
    per_class = params.reference == "class-conditional"
    spectrum, sources = Spectrum(id_train, [wild], contrast=False), [wild, calibration]
    if params.svd == "class-agnostic":
        direction = spectrum.of_all(n_classes, class_conditional_reference=per_class)
        return [direction.tau(one) for one in sources]
    return class_conditional_tau(spectrum.of_classes(range(n_classes), class_conditional_reference=per_class), sources)


# -- the same scores in other ways


def _filter(setup: Setup) -> Scores:
    found = filter_stage.run(*setup).separation.scores
    return found.wild.numpy(), found.calibration.numpy()


def _gradients(setup: Setup) -> tuple[Gradients, Gradients, Gradients]:
    """Of the wild, calibration and ID training samples, from files, as the filter takes them."""
    workspace, _, experiment = setup
    wild = wild_representation(workspace, experiment)
    id_train, calibration = (id_representation(workspace, part, experiment) for part in ("train", "calibration"))
    return (
        *(Gradients(one, one.predicted) for one in (wild, calibration)),
        Gradients(id_train, id_train.label),
    )


def _whole(gradients: Gradients) -> Representation:
    assert isinstance(gradients.source, RepresentationFile)
    return gradients.source.whole()


def _factors(gradients: Gradients) -> Factors:
    """All in one chunk."""
    return next(replace(gradients, source=_whole(gradients)).chunks())


class ResidualsInMemory(Factors):
    """With chunks as large as those of a file: larger ones would not fit in the caches of a CPU."""

    def chunks(self) -> Iterator[Factors]:
        for rows in _chunk_rows(len(self), self.residual, self.feature):
            yield self[rows]


class LogitsInMemory(Representation):
    """With the same chunks."""

    def chunks(self) -> Iterator[Representation]:
        for rows in _chunk_rows(len(self), self.logits, self.feature):
            yield Representation(self.feature[rows], self.logits[rows], self.label[rows])


def _chunk_rows(n: int, *columns: torch.Tensor) -> Iterator[slice]:
    n_at_once = max(1, CHUNK_BYTES // (4 * sum(column.shape[1] for column in columns)))
    for start in range(0, n, n_at_once):
        yield slice(start, start + n_at_once)


def _dense_scores(wild: Factors, calibration: Factors, id_train: Factors, classes: Iterable[int]) -> Scores:
    """Class-conditional τ by its definition: build G of a class, take its SVD, project on the first right vector."""
    sources = wild, calibration
    scores = np.full(len(wild), np.nan), np.full(len(calibration), np.nan)
    for k in classes:
        reference = _dense(id_train.of_class(k)).mean(axis=0)
        G = _dense(wild.of_class(k)) - reference
        v = np.linalg.svd(G, full_matrices=False)[2][0]
        for values, source in zip(scores, sources, strict=True):
            values[source.label.numpy() == k] = ((_dense(source.of_class(k)) - reference) @ v) ** 2
    return scores


def _dense(factors: Factors) -> np.ndarray:
    return factors.to(torch.device("cpu"), torch.float64).dense().numpy()


def _check_same(ours: Scores, expected: Scores) -> float:
    """The largest difference, relative to the largest score; where NaN is expected, nothing was computed."""
    pairs = [(own[~np.isnan(exact)], exact[~np.isnan(exact)]) for own, exact in zip(ours, expected, strict=True)]
    difference = max(float(np.abs(own - exact).max() / exact.max()) for own, exact in pairs)
    if not difference <= TOLERANCE:  # NaN is not the same either
        raise AssertionError(f"scores differ from the expected ones by {difference:.1e} of the largest")
    return difference
