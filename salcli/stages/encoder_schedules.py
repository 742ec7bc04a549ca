"""How long the authors of KNN+, CSI and STEP train, so that tables can say when a network had less."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

AUTHORS_EPOCHS = {"knn-plus": (500, 100), "csi": (700, 100)}  # of the features, of the heads
STEP_EPOCHS, STEP_STEPS = 500, 1500  # of the features, of the projection


def is_short(encoder: str, params: Mapping[str, Any]) -> bool:
    """Whether these params of train_encoder have fewer epochs than the authors'."""
    of_features, of_heads = AUTHORS_EPOCHS[encoder]
    return bool(params["epochs"] < of_features or params["head"]["epochs"] < of_heads)


def is_short_step(params: Mapping[str, Any]) -> bool:
    """Whether these params of train_rival.step train less than the authors do."""
    return bool(params["epochs"] < STEP_EPOCHS or params["structure"]["steps"] < STEP_STEPS)
