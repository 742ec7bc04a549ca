"""What tests of stages share: params with changes, stored representations, and slow references from dense matrices."""

from functools import cache
from typing import Any

import numpy as np

from salcli.detector import stage as detector
from salcli.params.schema import Params, load_params
from salcli.pipeline import evaluate, extract, prepare, train_id, train_ood
from salcli.pipeline import filter as filter_stage
from salcli.store.files import read_arrays, write_arrays
from salcli.store.formats import REPRESENTATION, RepresentationFile
from salcli.store.layout import Artifact, Experiment, Workspace, unseen_set

Arrays = dict[str, np.ndarray]


def params_of(workspace: Workspace, values: dict[str, Any] | None = None) -> Params:
    """Of the project, with dotted keys changed."""
    return load_params(workspace.root / "params.yaml", values)[0]


def prepare_sets(workspace: Workspace, params: Params) -> Workspace:
    """All sets, and the split of the first seed."""
    for name in (params.data.id, *params.data.ood):
        prepare.prepare_set(workspace, params, name)
    for name in params.data.test_ood:
        prepare.prepare_set(workspace, params, name, artifact=unseen_set(name))
    prepare.prepare_split(workspace, params.data, Experiment(params.seeds[0]))
    return workspace


def run_every_stage(workspace: Workspace, params: Params) -> None:
    """What `dvc repro` does, in one process."""
    prepare_sets(workspace, params)
    data, of_seed = params.data, Experiment(params.seeds[0])
    train_id.run(workspace, params, of_seed)
    extract.run_id(workspace, params, of_seed)
    for encoder in params.encoders:
        train_ood.run_encoder(workspace, params, of_seed, encoder)
    wild_sets: dict[Experiment, list[Experiment]] = {}
    for experiment in params.experiments():
        wild_sets.setdefault(experiment.with_variant("sal"), []).append(experiment)
    for wild, variants in wild_sets.items():
        prepare.prepare_wild(workspace, data, wild)
        extract.run_wild(workspace, params, wild)
        for experiment in variants:
            filter_stage.run(workspace, params, experiment)
            if experiment.variant in params.variants:
                train_ood.run(workspace, params, experiment)
        for rival in params.rivals:
            train_ood.run(workspace, params, wild, rival=rival)
        for unseen in data.test_ood:
            extract.run_unseen(workspace, params, wild, unseen)
        for unseen in ("", *data.test_ood):
            evaluate.run(workspace, params, wild, unseen=unseen)
        detector.run(workspace, params, wild)


def written(workspace: Workspace, *artifacts: Artifact) -> list[bytes]:
    return [(workspace.root / artifact.path).read_bytes() for artifact in artifacts]


def stored(workspace: Workspace, artifact: Artifact) -> Arrays:
    """feature, logits, label and predicted of a representation file."""
    return read_arrays(workspace.find(artifact), REPRESENTATION)


def rewrite(workspace: Workspace, artifact: Artifact, content: Arrays, **about: Any) -> None:
    """Other numbers in the same file, as if the same network had given them."""
    found = workspace.find(artifact)
    write_arrays(found.path, REPRESENTATION, content, {**RepresentationFile.open(found).about, **about})


def dense_gradients(content: Arrays, label: np.ndarray, gradient: str = "full") -> np.ndarray:
    """One flat gradient per sample; the residual is rounded to single precision, as salcli does."""
    residual = probabilities(content["logits"]) - np.eye(content["logits"].shape[1])[label]
    residual = residual.astype(np.float32).astype(float)
    matrices = residual[:, :, None] * content["feature"][:, None, :].astype(float)  # n, K, D
    return matrices[np.arange(len(label)), label] if gradient == "predicted-row" else matrices.reshape(len(label), -1)


def probabilities(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits.astype(float) - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def right_singular_vectors(matrix: np.ndarray, n_vectors: int) -> np.ndarray:
    return _svd(matrix.tobytes(), matrix.shape)[:n_vectors]


@cache
def _svd(content: bytes, shape: tuple[int, int]) -> np.ndarray:
    """Many variants of the filter have the same matrices."""
    _, values, vectors = np.linalg.svd(np.frombuffer(content).reshape(shape), full_matrices=False)
    return vectors[values > 1e-6 * values[0]][:5]
