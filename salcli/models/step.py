"""STEP's network: features of all depths, a linear projection of them, and the centre of each class there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from salcli.models.network import Classifier
from salcli.rivals.step import centre_scores, class_centres

if TYPE_CHECKING:
    from salcli.models.network import NetworkSpec


class StepNetwork(Classifier):
    """Its head is the projection. Its class logits are minus the distances to the centres, so the highest is the score.

    The projection is as wide as the backbone's last features (the authors' choice).
    """

    centres: Tensor

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        width = self.backbone.n_features
        self.head = nn.Linear(sum(self.backbone.level_widths), width, bias=False)
        self.register_buffer("centres", torch.zeros(spec.n_classes, width))

    @classmethod
    def on_top_of(cls, classifier: Classifier) -> StepNetwork:
        """Take the backbone of a trained network; the projection starts from random weights."""
        network = cls(classifier.spec)
        network.backbone.load_state_dict(classifier.backbone.state_dict())
        return network

    def set_centres(self, id_features: Tensor, labels: Tensor) -> None:
        """The mean of each class of the labeled data, projected."""
        with torch.no_grad():
            projected = self.head(id_features).cpu()  # sums in double precision, which not every device has
            self.centres.copy_(class_centres(projected, labels.cpu(), self.spec.n_classes))

    def features(self, images: Tensor) -> Tensor:
        """What is projected: the features of all depths side by side (n × D)."""
        return self._features_of_normalised(self.normalised(images))

    def features_and_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features (n × D) and minus the distance to each class centre (n × K)."""
        features = self.features(images)
        return features, self.class_scores(features)

    def logits_of_normalised(self, normalised: Tensor) -> Tensor:
        """Minus the distance to each class centre (n × K) of images that are normalised already."""
        return self.class_scores(self._features_of_normalised(normalised))

    def _features_of_normalised(self, normalised: Tensor) -> Tensor:
        return torch.cat(self.backbone.levels(normalised), dim=1)

    def class_scores(self, features: Tensor) -> Tensor:
        """Minus the distance to each class centre (n × K)."""
        return centre_scores(self.head(features).float(), self.centres)
