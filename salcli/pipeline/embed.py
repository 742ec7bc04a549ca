"""Frozen backbones: `prepare` embeds every image once, and everything after it works on the vectors.

Only projects with a frozen backbone run this code. Its fingerprint is `embedder`, so that other changes of networks do
not make DVC prepare all sets again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from salcli.engine.device import computing
from salcli.errors import ModelError
from salcli.models.pretrained import PRETRAINED, Embedder, build_embedder
from salcli.params.schema import Params
from salcli.progress import Task
from salcli.store.layout import Workspace

ON_A_CPU, ON_A_GPU = 8, 128  # images at once; activations of more of them do not fit in a CPU's caches


def embedder_for(params: Params, workspace: Workspace) -> Embedder | None:
    """The frozen backbone of params.yaml; None where nothing is frozen."""
    if not params.model.frozen:
        return None
    model, weights = params.model, params.model.weights
    return build_embedder(
        model.backbone,
        weights="pretrained" if weights == PRETRAINED else workspace.given(weights) if weights else None,
        head=model.head,
        mean=model.mean,
        std=model.std,
        image_size=params.data.image_size,
        code_folder=workspace.given(model.code),
    )


@contextmanager
def computing_vectors(params: Params) -> Iterator[torch.device]:
    """The device to embed on, always in float32: everything later rests on these vectors."""
    with computing(params.device, params.numerics.model_copy(update={"precision": "float32"})) as compute:
        yield compute.device


def embedded(
    name: str, embedder: Embedder, device: torch.device, blocks: Iterable[NDArray[Any]], task: Task
) -> Iterator[NDArray[np.float32]]:
    """The features of all images, block by block.

    A network may round differently for another number of images, so it always gets the same number: then the features
    of an image depend neither on its position nor on the others.
    """
    embedder.to(device).eval()
    at_once = ON_A_CPU if device.type == "cpu" else ON_A_GPU
    for images in blocks:
        features = np.empty((len(images), embedder.n_features), np.float32)
        for start in range(0, len(images), at_once):
            some = images[start : start + at_once]
            filled = np.zeros((at_once, *some.shape[1:]), some.dtype)
            filled[: len(some)] = some
            with torch.inference_mode():
                found = embedder(torch.from_numpy(filled).to(device))[: len(some)]
            features[start : start + len(some)] = found.float().cpu().numpy()
            task.advance(len(some))
        bad = int((~np.isfinite(features).all(axis=1)).sum())
        if bad:
            raise ModelError(
                f"{embedder.spec.backbone} gives NaN or infinite features for {bad} images of {name}; check its "
                "weights, model.mean and model.std"
            )
        yield features
