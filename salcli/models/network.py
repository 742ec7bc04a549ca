"""The ID classifier h_w and the OOD classifier g_θ on top of any backbone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from salcli.errors import ModelError
from salcli.models.backbone_names import is_hooked
from salcli.models.backbones import build_backbone
from salcli.models.hooked_backbone import HookedBackbone

if TYPE_CHECKING:
    from collections.abc import Mapping

    from salcli.models.backbone import Backbone


@dataclass(frozen=True)
class NetworkSpec:
    """All that is needed to build a network again. Mean and std are of the ID training images, in [0, 1]."""

    backbone: str
    n_classes: int
    mean: tuple[float, ...]  # one for each channel
    std: tuple[float, ...]
    drop_rate: float = 0.0
    head: str | None = None  # what a network of somebody else calls its last linear layer

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> NetworkSpec:
        """The inverse of dataclasses.asdict and JSON."""
        mean, std = tuple(content["mean"]), tuple(content["std"])
        drop_rate, head = content.get("drop_rate", 0.0), content.get("head")
        return cls(content["backbone"], content["n_classes"], mean, std, drop_rate, head)


class Classifier(nn.Module):
    """h_w: images (n, C, H, W) in [0, 255] to class logits, through features that the head is linear in."""

    mean: Tensor
    std: Tensor

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__()
        self.spec = spec
        if is_hooked(spec.backbone):
            self.backbone: Backbone = HookedBackbone(spec.backbone, len(spec.mean), spec.n_classes, spec.head)
        else:
            self.backbone = build_backbone(spec.backbone, len(spec.mean), spec.drop_rate)
        self.head = self.backbone.new_head(spec.n_classes)
        # part of the spec, so not of the weights
        self.register_buffer("mean", torch.tensor(spec.mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(spec.std)[:, None, None], persistent=False)
        self.to(memory_format=self.backbone.memory_format)

    @property
    def n_features(self) -> int:
        """The width of the features."""
        return self.head.in_features

    def normalised(self, images: Tensor) -> Tensor:
        """What the backbone sees (n, C, H, W)."""
        return (images.float() / 255 - self.mean) / self.std

    def features(self, images: Tensor) -> Tensor:
        """What the head sees (n × D)."""
        features: Tensor = self.backbone(self.normalised(images))
        return features

    def logits_of_normalised(self, normalised: Tensor) -> Tensor:
        """Class logits (n × K) of images that are normalised already, for what takes gradients w.r.t. them."""
        logits: Tensor = self.head(self.backbone(normalised))
        return logits

    def features_and_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features (n × D) and class logits (n × K)."""
        features = self.features(images)
        return features, self.head(features)

    def forward(self, images: Tensor) -> Tensor:
        """Class logits (n × K)."""
        return self.features_and_logits(images)[1]


class OodClassifier(Classifier):
    """g_θ: a classifier with one more linear output, positive for ID data (Section 3.2)."""

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self.ood_head = nn.Linear(self.n_features, 1)

    @classmethod
    def on_top_of(cls, classifier: Classifier) -> OodClassifier:
        """Start from a trained classifier; only the new output starts from random weights."""
        network = cls(classifier.spec)
        network.load_state_dict(classifier.state_dict(), strict=False)
        return network

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Class logits (n × K) and the OOD logit (n), higher = more ID-like."""
        features = self.features(images)
        return self.head(features), self.ood_head(features).squeeze(1)


class EnergyClassifier(Classifier):
    """A classifier whose OOD output is a line in its energy, as WOODS and SCONE train it."""

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self.outlier_line = nn.Linear(1, 1)  # positive for OOD data

    @classmethod
    def on_top_of(cls, classifier: Classifier, threshold: float) -> EnergyClassifier:
        """Start from a trained classifier: OOD is what has a lower energy (logsumexp) than the threshold."""
        network = cls(classifier.spec)
        network.load_state_dict(classifier.state_dict(), strict=False)
        with torch.no_grad():
            network.outlier_line.weight.fill_(-1)
            network.outlier_line.bias.fill_(threshold)
        return network

    def ood_logit(self, class_logits: Tensor) -> Tensor:
        """The OOD logit (n), higher = more ID-like."""
        outlier_logit: Tensor = self.outlier_line(class_logits.logsumexp(1, keepdim=True)).squeeze(1)
        return -outlier_logit


def check_own_head(network: Classifier) -> None:
    """That a network which is to be used as it is has a head for just these classes, not a new one."""
    backbone, n_classes = network.backbone, network.spec.n_classes
    if isinstance(backbone, HookedBackbone) and backbone.n_own_classes != n_classes:
        raise ModelError(
            f"{network.spec.head}, the head of {backbone.name}, is for {backbone.n_own_classes} classes, the data have "
            f"{n_classes}, so it cannot be used without training; set train_id.epochs to 1 or more"
        )
