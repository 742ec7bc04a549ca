"""What tests of stages share: params with changes, stored representations, and slow references from dense matrices."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from salcli.models.network import Classifier
from salcli.params.schema import Params, load_params
from salcli.store.files import read_arrays, write_arrays
from salcli.store.formats import REPRESENTATION, RepresentationFile
from salcli.store.layout import Artifact, Workspace

Arrays = dict[str, np.ndarray]


def params_of(workspace: Workspace, values: dict[str, Any] | None = None) -> Params:
    """Of the project, with dotted keys changed."""
    return load_params(workspace.root / "params.yaml", values)[0]


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


class SlowScores:
    """Every post-hoc score by its definition, sample by sample, in float64. Higher = more ID-like."""

    def __init__(self, network: Classifier, known: Arrays, params: Params) -> None:
        self.network = network.eval().double()
        for name in ("mean", "std"):
            setattr(network, name, getattr(network, name).double())
        self.weight, self.bias = network.head.weight.detach().numpy(), network.head.bias.detach().numpy()
        self.known, self.label, self.params = known["feature"].astype(float), known["label"], params.methods

    def __call__(self, name: str, features: np.ndarray, images: torch.Tensor) -> list[float]:
        score: Callable[[Any], float] = getattr(self, name)
        return [score(one) for one in (images if name == "odin" else features.astype(float))]

    def energy(self, feature: np.ndarray) -> float:
        logits = self.weight @ feature + self.bias
        return float(logits.max() + np.log(np.exp(logits - logits.max()).sum()))

    def msp(self, feature: np.ndarray) -> float:
        return float(probabilities((self.weight @ feature + self.bias)[None]).max())

    def gradnorm(self, feature: np.ndarray) -> float:
        weight = torch.tensor(self.weight, requires_grad=True)
        logits = weight @ torch.from_numpy(feature) + torch.from_numpy(self.bias)
        uniform = torch.full((1, len(weight)), 1 / len(weight), dtype=torch.float64)
        (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(logits[None], uniform), weight)
        return float(gradient.abs().sum())

    def knn(self, feature: np.ndarray, known: np.ndarray | None = None) -> float:
        others = self.known if known is None else known
        others = others / np.linalg.norm(others, axis=1, keepdims=True)
        distance = np.linalg.norm(others - feature / np.linalg.norm(feature), axis=1)
        return -float(np.sort(distance)[self.params.of("knn").k - 1])

    def react(self, feature: np.ndarray) -> float:
        return self.energy(np.minimum(feature, np.quantile(self.known, self.params.of("react").percentile / 100)))

    def dice(self, feature: np.ndarray) -> float:
        contribution = self.known.mean(0) * self.weight
        kept = contribution > np.percentile(contribution, self.params.of("dice").percentile)
        return float(np.log(np.exp((self.weight * kept) @ feature + self.bias).sum()))

    def ash(self, feature: np.ndarray) -> float:
        n_kept = len(feature) - round(len(feature) * self.params.of("ash").percentile / 100)
        kept = feature * (feature >= np.sort(feature)[-n_kept])
        return self.energy(kept * np.exp(feature.sum() / kept.sum()))

    def mahalanobis(self, feature: np.ndarray) -> float:
        means = np.stack([self.known[self.label == k].mean(0) for k in range(len(self.weight))])
        centred = self.known - means[self.label]
        inverse = np.linalg.pinv(centred.T @ centred / len(centred), rcond=1e-12, hermitian=True)
        return -min(float((feature - mean) @ inverse @ (feature - mean)) for mean in means)

    def vim(self, feature: np.ndarray) -> float:
        origin = -np.linalg.pinv(self.weight) @ self.bias
        _, vectors = np.linalg.eigh((self.known - origin).T @ (self.known - origin))
        left_over = vectors[:, : len(feature) - len(feature) // 2]
        norms = np.linalg.norm((self.known - origin) @ left_over, axis=1)
        scale = (self.known @ self.weight.T + self.bias).max(1).mean() / norms.mean()
        return self.energy(feature) - float(scale * np.linalg.norm((feature - origin) @ left_over))

    def odin(self, image: torch.Tensor) -> float:
        """A step against the gradient of the largest log-probability w.r.t. the normalised input."""
        own, network = self.params.of("odin"), self.network
        x = ((image[None].double() / 255 - network.mean) / network.std).requires_grad_()
        certainty = (network.head(network.backbone(x)) / own.temperature).log_softmax(1).max()
        (gradient,) = torch.autograd.grad(certainty, x)
        with torch.no_grad():
            logits = network.head(network.backbone(x + own.epsilon * gradient.sign() / network.std))
        return float((logits / own.temperature).softmax(1).max())
