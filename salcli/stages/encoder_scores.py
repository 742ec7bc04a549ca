"""What the networks of KNN+ and CSI say about test images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from salcli.artifacts import layout
from salcli.artifacts.checkpoint import read_header, read_network
from salcli.artifacts.fingerprint import check_made_with
from salcli.inference import in_batches
from salcli.models.contrastive import ENCODERS, RotationClassifier
from salcli.rivals.logit_scores import msp
from salcli.stages.inputs import id_images, whole_split
from salcli.stages.rival_scores import knn_score

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from salcli.artifacts.layout import Found, Workspace
    from salcli.compute.numerics import Compute
    from salcli.inference import Outputs
    from salcli.models.network import Classifier
    from salcli.params import Params
    from salcli.progress import Task

AUTHORS_EPOCHS = {"knn-plus": (500, 100), "csi": (700, 100)}  # of the features, of the heads


@dataclass(frozen=True)
class EncoderScores:
    """Higher = more ID-like, with the class logits."""

    score: Tensor  # n
    logits: Tensor  # n, K
    is_short: bool  # whether it was trained for fewer epochs than its authors train


@dataclass(frozen=True)
class EncoderScoring:
    """Everything that a trained encoder scores test images with."""

    workspace: Workspace
    params: Params
    seed: int
    compute: Compute
    task: Task
    outputs_on_test: Callable[[Classifier, Callable[[Tensor], Outputs]], list[Tensor]]

    def scores(self, encoder: str) -> EncoderScores:
        """Of all test images."""
        found = self.workspace.find(layout.encoder(encoder, self.seed))
        network = read_network(found, ENCODERS[encoder])
        # of another split it may have seen test samples
        check_made_with(found, str(read_header(found).about.get("split")), whole_split(self.workspace, self.seed))
        is_short = has_short_schedule(encoder, found)
        if isinstance(network, RotationClassifier):
            (logits,) = self.outputs_on_test(network, network.forward)
            return EncoderScores(msp(logits), logits, is_short)
        features, logits = self.outputs_on_test(network, network.features_and_logits)
        return EncoderScores(self._knn(network, features), logits, is_short)

    def _knn(self, network: Classifier, features: Tensor) -> Tensor:
        training = id_images(self.workspace, self.params.data.id, "train", self.seed)
        chosen = self.params.evaluate
        batches = in_batches(network, network.features, training.images, chosen.batch_size, self.compute, self.task)
        known = torch.cat([batch for (batch,) in batches])
        return knn_score(features, known, training.labels, chosen.knn_k)


def has_short_schedule(encoder: str, found: Found) -> bool:
    """Whether a network was trained for fewer epochs than its authors train."""
    own = read_header(found).about["train_encoder"]
    features, heads = AUTHORS_EPOCHS[encoder]
    return bool(own["epochs"] < features or own["head"]["epochs"] < heads)
