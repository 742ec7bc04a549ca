"""How KNN+ and CSI learn: which views of the ID images they compare, and which heads they fit afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from salcli.compute.lars import Lars
from salcli.compute.sgd import Sgd
from salcli.models.contrastive import ContrastiveClassifier, Heads, RotationClassifier
from salcli.rivals.contrast import nearest_is_alike, supervised_contrast
from salcli.rivals.rotations import joint_labels, rotated, rotation_labels
from salcli.training import Batch, BatchResult

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.optim import Optimizer

    from salcli.compute.distortions import Distortions
    from salcli.models.network import Classifier
    from salcli.params_rivals import EncoderParams
    from salcli.params_section import SgdParams

SUPCON_TEMPERATURE = 0.07  # the temperature that SupCon's authors scale the loss of all others to


def momentum_sgd(weights: Iterable[nn.Parameter], params: SgdParams) -> Optimizer:
    """What KNN+ and all heads are trained by."""
    return Sgd(weights, params.lr, params.momentum, weight_decay=params.weight_decay)


@dataclass(frozen=True)
class KnnPlus:
    """SupCon (Khosla et al., 2020): two views of each image; then a linear head for the classes."""

    params: EncoderParams
    distort: Distortions
    network: ContrastiveClassifier

    @staticmethod
    def optimiser(weights: Iterable[nn.Parameter], params: SgdParams) -> Optimizer:
        """Momentum that is not Nesterov's."""
        return momentum_sgd(weights, params)

    def views(self, images: Tensor, labels: Tensor) -> Batch:
        """What is compared, and what should be alike."""
        return self.distort(self.distort.mirrored(images.repeat(2, 1, 1, 1))), labels.repeat(2)

    def contrast(self, network: nn.Module, batch: Batch) -> BatchResult:
        """The loss, and for how many images the nearest other one is of the same class."""
        result = _contrast(network, batch, 2, self.params.temperature)
        return BatchResult(result.loss * self.params.temperature / SUPCON_TEMPERATURE, result.n_correct)

    def heads(self) -> Heads:
        """What is fitted on the frozen features."""
        return Heads(self.network.head)

    def head_views(self, images: Tensor, labels: Tensor) -> Batch:
        """Images to fit them on: no change of colours."""
        return self.distort.cropped(self.distort.mirrored(images)), labels

    def classify(self, heads: nn.Module, batch: Batch) -> BatchResult:
        """`batch`: features and labels."""
        features, labels = batch
        (logits,) = heads(features)
        return BatchResult(cross_entropy(logits, labels), (logits.argmax(1) == labels).sum())


@dataclass(frozen=True)
class Csi:
    """CSI with labels (Tack et al., 2020): two views of each image in all four rotations, as if those were classes."""

    params: EncoderParams
    distort: Distortions
    network: RotationClassifier

    @staticmethod
    def optimiser(weights: Iterable[nn.Parameter], params: SgdParams) -> Optimizer:
        """For large batches."""
        return Lars(weights, params.lr, params.momentum, params.weight_decay)

    def views(self, images: Tensor, labels: Tensor) -> Batch:
        """What is compared, and what should be alike."""
        one, other = self.distort.mirrored(images.repeat(2, 1, 1, 1)).chunk(2)
        label = joint_labels(labels, self.network.spec.n_classes)
        return self.distort(torch.cat([rotated(one), rotated(other)])), label.repeat(2)

    def contrast(self, network: nn.Module, batch: Batch) -> BatchResult:
        """The loss, and for how many images the nearest other one is of the same class and rotation."""
        return _contrast(network, batch, 8, self.params.temperature)

    def heads(self) -> Heads:
        """What is fitted on the frozen features: classes, rotations, and both."""
        return Heads(self.network.head, self.network.rotation_head, self.network.joint_head)

    def head_views(self, images: Tensor, labels: Tensor) -> Batch:
        """Images to fit them on."""
        return self.distort(rotated(self.distort.mirrored(images))), labels

    def classify(self, heads: nn.Module, batch: Batch) -> BatchResult:
        """`batch`: features of all rotations, and labels. Only images as they are count for the classes alone."""
        features, labels = batch
        n = len(labels)
        of_class, of_rotation, of_both = heads(features)
        loss = (
            cross_entropy(of_class[:n], labels)
            + cross_entropy(of_rotation, rotation_labels(n, labels.device))
            + cross_entropy(of_both, joint_labels(labels, self.network.spec.n_classes))
        )
        return BatchResult(loss, (of_class[:n].argmax(1) == labels).sum())


EncoderMethod = KnnPlus | Csi


def method_for(network: Classifier, params: EncoderParams, distort: Distortions) -> EncoderMethod:
    """How such a network is trained."""
    if isinstance(network, RotationClassifier):
        return Csi(params, distort, network)
    assert isinstance(network, ContrastiveClassifier)
    return KnnPlus(params, distort, network)


def _contrast(network: nn.Module, batch: Batch, n_views: int, temperature: float) -> BatchResult:
    views, labels = batch
    features = network(views)
    is_alike = nearest_is_alike(features, labels, len(labels) // n_views)
    return BatchResult(supervised_contrast(features, labels, temperature), is_alike.sum() / n_views)
