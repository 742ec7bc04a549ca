"""ODIN's own pass over images: for `evaluate`, and for `filter` where ODIN separates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from salcli.inference import in_batches
from salcli.rivals.logit_scores import msp
from salcli.rivals.odin import odin_logits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from salcli.compute.image_rows import ImageRows
    from salcli.compute.numerics import Compute
    from salcli.models.network import Classifier
    from salcli.params import EvaluateParams
    from salcli.progress import Task


def odin_scores(
    network: Classifier,
    image_sets: Sequence[ImageRows],
    params: EvaluateParams,
    batch_size: int,
    compute: Compute,
    task: Task,
) -> Tensor:
    """Scores of all images, set after set; higher = more ID-like."""

    def logits(images: Tensor) -> Tensor:
        return odin_logits(
            network.logits_of_normalised,
            network.normalised(images),
            network.spec.std,
            params.odin_temperature,
            params.odin_epsilon,
        )

    passes = (in_batches(network, logits, images, batch_size, compute, task) for images in image_sets)
    return msp(torch.cat([part for batches in passes for (part,) in batches]), params.odin_temperature)
