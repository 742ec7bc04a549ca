"""evaluate: score the ID and OOD test sets once with every method, and compute the metrics."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from salcli.artifacts import layout
from salcli.artifacts.atomic import write_text
from salcli.artifacts.checkpoint import read_header, read_network
from salcli.artifacts.curve import write_curve
from salcli.artifacts.fingerprint import check_made_with
from salcli.artifacts.gradients import GradientFile
from salcli.artifacts.hdf5 import write_arrays
from salcli.compute.numerics import Compute, computing
from salcli.compute.processes import processes
from salcli.errors import ParamsError
from salcli.inference import in_batches
from salcli.metrics import OodMetrics, ood_metrics, roc_points
from salcli.models.network import OodClassifier
from salcli.progress import Silent
from salcli.rivals.posthoc import energy, knn, msp
from salcli.stages.inputs import LabeledImages, classifier_of, id_images, ood_test_images, unseen_ood_images

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from salcli.artifacts.layout import Workspace
    from salcli.compute.image_rows import ImageRows
    from salcli.models.network import Classifier
    from salcli.params import Params
    from salcli.progress import Progress, Task

SCORES_KIND = "test-scores"
N_BINS = 60


@dataclass(frozen=True)
class TestScores:
    """One method's scores (higher = more ID-like) and the accuracy of the network they come from."""

    id: np.ndarray
    ood: np.ndarray
    id_accuracy: float


@dataclass(frozen=True)
class Evaluated:
    """The metrics of every method on one OOD test set. `ood` is the one in the wild data."""

    ood: str
    test_set: str
    seed: int
    metrics: dict[str, OodMetrics]
    id_accuracy: dict[str, float]
    n_id_test: int
    n_ood_test: int
    written: list[Path]


def run(
    workspace: Workspace,
    params: Params,
    ood: str,
    seed: int,
    progress: Progress | None = None,
    *,
    unseen: str | None = None,
) -> Evaluated:
    """Evaluate all methods of params.yaml on the OOD set of the wild data, or on an `unseen` one."""
    methods: tuple[str, ...] = params.evaluate.methods
    id_test = id_images(workspace, params.data.id, "test", seed)
    if unseen:
        ood_test = unseen_ood_images(workspace, params.data, unseen, seed)
    else:
        ood_test = ood_test_images(workspace, ood, seed)
    n_networks = ("sal" in methods) + any(method != "sal" for method in methods)
    n_images = n_networks * (len(id_test) + len(ood_test))
    what = f"{ood}, tested on {unseen}" if unseen else ood
    with (
        computing(params) as compute,
        (progress or Silent()).task(f"evaluate, {what}, seed {seed}", n_images, "images") as task,
    ):
        test = _Test(workspace, params, ood, seed, id_test, ood_test, compute, task)
        found = _rival_scores(test) | (_sal_scores(test) if "sal" in methods else {})
    scores = {method: found[method] for method in methods}
    written = [
        workspace.target(place(ood, seed, unseen))
        for place in (layout.evaluation_scores, layout.metrics, layout.roc, layout.score_histogram)
    ]
    result = Evaluated(
        ood=ood,
        test_set=unseen or ood,
        seed=seed,
        metrics={method: ood_metrics(own.id, own.ood) for method, own in scores.items()},
        id_accuracy={method: own.id_accuracy for method, own in scores.items()},
        n_id_test=len(id_test),
        n_ood_test=len(ood_test),
        written=written,
    )
    if processes().is_main:
        _write(result, scores, params)
    return result


def _write(result: Evaluated, scores: dict[str, TestScores], params: Params) -> None:
    arrays = {f"{method}/{side}": getattr(own, side) for method, own in scores.items() for side in ("id", "ood")}
    made_with = {"ood": result.ood, "test_set": result.test_set, "seed": result.seed}
    made_with |= {"evaluate": params.evaluate.model_dump(), "numerics": params.numerics.model_dump()}
    write_arrays(result.written[0], SCORES_KIND, arrays, made_with)
    write_text(result.written[1], json.dumps(_summary(result), indent=2) + "\n")
    write_curve(result.written[2], [row for method, own in scores.items() for row in _roc_rows(method, own)])
    write_curve(result.written[3], [row for method, own in scores.items() for row in _histogram_rows(method, own)])


@dataclass(frozen=True)
class _Test:
    """Everything that the methods score with."""

    workspace: Workspace
    params: Params
    ood: str
    seed: int
    id_test: LabeledImages
    ood_test: ImageRows
    compute: Compute
    task: Task

    def outputs(self, network: Classifier, of_batch: Callable[[Tensor], tuple[Tensor, Tensor]]) -> list[list[Tensor]]:
        """The two outputs of a network on the ID test set, and on the OOD test set."""
        passes = (
            in_batches(network, of_batch, images, self.params.evaluate.batch_size, self.compute, self.task)
            for images in (self.id_test.images, self.ood_test)
        )
        return [[torch.cat(parts) for parts in zip(*batches, strict=True)] for batches in passes]

    def accuracy(self, logits: Tensor) -> float:
        return float((logits.argmax(1) == self.id_test.labels).double().mean())


def _sal_scores(test: _Test) -> dict[str, TestScores]:
    """The OOD classifier's own output."""
    found = test.workspace.find(layout.ood_classifier(test.ood, test.seed))
    network = read_network(found, OodClassifier)
    made_with = read_header(found).about
    # of another mixture it may have seen what is in the OOD test set now
    for link, place in (("network", layout.classifier(test.seed)), ("wild", layout.wild_mixture(test.ood, test.seed))):
        check_made_with(found, str(made_with.get(link)), test.workspace.find(place))
    (id_logits, id_score), (_, ood_score) = test.outputs(network, network.forward)
    return {"sal": TestScores(id_score.double().numpy(), ood_score.double().numpy(), test.accuracy(id_logits))}


def _rival_scores(test: _Test) -> dict[str, TestScores]:
    """Scores of the ID classifier; KNN looks for neighbours among the stored training features."""
    network, _ = classifier_of(test.workspace, test.seed)
    score: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "msp": lambda _, logits: msp(logits),
        "energy": lambda _, logits: energy(logits),
    }
    if "knn" in test.params.evaluate.methods:
        neighbours, labels = _training_features(test)
        score["knn"] = lambda features, _: knn(features, neighbours, labels, test.params.evaluate.knn_k)
    wanted = [method for method in test.params.evaluate.methods if method in score]
    if not wanted:
        return {}
    id_outputs, ood_outputs = test.outputs(network, network.features_and_logits)
    accuracy = test.accuracy(id_outputs[1])
    return {
        method: TestScores(score[method](*id_outputs).numpy(), score[method](*ood_outputs).numpy(), accuracy)
        for method in wanted
    }


def _training_features(test: _Test) -> tuple[Tensor, Tensor]:
    found = test.workspace.find(layout.id_gradients("train", test.seed))
    file = GradientFile.open(found)
    check_made_with(found, file.network, test.workspace.find(layout.classifier(test.seed)))
    k = test.params.evaluate.knn_k
    if k > len(file):
        raise ParamsError(f"evaluate.knn_k is {k}, but there are only {len(file)} ID training samples")
    return torch.cat([chunk.feature for chunk in file.chunks()]), file.label


def _summary(result: Evaluated) -> dict[str, Any]:
    figures = {
        method: {**asdict(own), "id_accuracy": result.id_accuracy[method]} for method, own in result.metrics.items()
    }
    return {**figures, "samples": {"id_test": result.n_id_test, "ood_test": result.n_ood_test}}


def _roc_rows(method: str, scores: TestScores) -> list[dict[str, Any]]:
    fpr, tpr = roc_points(scores.id, scores.ood)
    return [{"method": method, "fpr": float(x), "tpr": float(y)} for x, y in zip(fpr, tpr, strict=True)]


def _histogram_rows(method: str, scores: TestScores) -> list[dict[str, Any]]:
    """Shares of each set in bins that cover all finite scores of both."""
    both = np.concatenate([scores.id, scores.ood])
    edges = np.histogram_bin_edges(both[np.isfinite(both)], bins=N_BINS)
    middles = (edges[:-1] + edges[1:]) / 2
    rows = []
    for side, values in (("ID test", scores.id), ("OOD test", scores.ood)):
        shares = np.histogram(values, bins=edges)[0] / len(values)
        rows += [
            {"method": method, "data": side, "score": float(middle), "share": float(share)}
            for middle, share in zip(middles, shares, strict=True)
        ]
    return rows
