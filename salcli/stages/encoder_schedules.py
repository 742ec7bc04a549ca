"""How long the authors of KNN+ and CSI train, so that tables can say when a network had less."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

AUTHORS_EPOCHS = {"knn-plus": (500, 100), "csi": (700, 100)}  # of the features, of the heads


def is_short(encoder: str, params: Mapping[str, Any]) -> bool:
    """Whether these params of train_encoder have fewer epochs than the authors'."""
    of_features, of_heads = AUTHORS_EPOCHS[encoder]
    return bool(params["epochs"] < of_features or params["head"]["epochs"] < of_heads)
