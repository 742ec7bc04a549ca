"""Networks whose features are learnt by contrast first; linear heads are fitted on the frozen features afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.functional import normalize

from salcli.models.network import Classifier
from salcli.rivals.rotations import N_ROTATIONS, marginal_logits, rotated

if TYPE_CHECKING:
    from salcli.models.network import NetworkSpec


class ContrastiveClassifier(Classifier):
    """KNN+: a classifier on SupCon features. It scores by its features' distance to those of the training data."""


class RotationClassifier(Classifier):
    """CSI: two more heads tell which rotation an image has, and class and rotation together (4 · K)."""

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self.rotation_head = nn.Linear(self.n_features, N_ROTATIONS)
        self.joint_head = nn.Linear(self.n_features, N_ROTATIONS * spec.n_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Class logits (n × K), averaged over all rotations of the images: the authors' marginalised inference."""
        return marginal_logits(self.joint_head(self.features(rotated(images))))


ENCODERS: dict[str, type[ContrastiveClassifier | RotationClassifier]] = {
    "knn-plus": ContrastiveClassifier,
    "csi": RotationClassifier,
}


class Projection(nn.Module):
    """Backbone and, for training alone, two more layers: images to unit vectors that are compared."""

    def __init__(self, classifier: Classifier, width: int) -> None:
        super().__init__()
        self.classifier = classifier
        n = classifier.n_features
        self.layers = nn.Sequential(nn.Linear(n, n), nn.ReLU(), nn.Linear(n, width))

    def forward(self, images: Tensor) -> Tensor:
        """Unit vectors (n × width)."""
        return normalize(self.layers(self.classifier.features(images)).float(), dim=1)


class Heads(nn.Module):
    """Some linear heads of a network, to be trained while the rest of it stays as it is."""

    def __init__(self, *heads: nn.Linear) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        """The logits of each."""
        return tuple(head(features) for head in self.heads)
