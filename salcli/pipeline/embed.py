"""Frozen backbones: `prepare` embeds every image once, and everything after it works on the vectors.

Only projects with a frozen backbone run this code. Its fingerprint is `embedder`, so that other changes of networks do
not make DVC prepare all sets again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from salcli.data.decoding import Block
from salcli.engine.device import computing
from salcli.errors import BadArtifactError, ModelError
from salcli.models.pretrained import PRETRAINED, Embedder, build_embedder
from salcli.params.schema import Params
from salcli.progress import Task
from salcli.store.files import Found, read_arrays, write_arrays
from salcli.store.layout import Workspace

EMBEDDED = "embedded-block"
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
    name: str, embedder: Embedder, device: torch.device, blocks: Iterable[Block], task: Task, done: Path
) -> Iterator[NDArray[np.float32]]:
    """The features of all images, block by block. Blocks that an interrupted run left in the folder `done` are read.

    Such a block is named after its pixels and after the features of the first images, so that no other backbone and no
    other images can find it.
    """
    embedder.to(device).eval()
    first = b""
    for block in blocks:
        images = block.images
        name_of_block = hashlib.blake2b(first + block.digests.tobytes(), digest_size=16).hexdigest()
        kept, features = done / f"{name_of_block}.h5", None
        if first and kept.exists():
            with suppress(BadArtifactError):
                features = read_arrays(Found(kept), EMBEDDED)["features"]
                task.skip(len(images))
        if features is None:
            features = _features(name, embedder, device, images, task)
            if first:
                write_arrays(kept, EMBEDDED, {"features": features}, {})
        first = first or features[:ON_A_CPU].tobytes()
        yield features


def _features(
    name: str, embedder: Embedder, device: torch.device, images: NDArray[Any], task: Task
) -> NDArray[np.float32]:
    """A network may round differently for another number of images, so it always gets the same number: then the
    features of an image depend neither on its position nor on the others.
    """
    at_once = ON_A_CPU if device.type == "cpu" else ON_A_GPU
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
    return features
