"""The one forward pass of calibration and prediction: the same code, so that their scores can be compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from salcli.errors import DeviceError

if TYPE_CHECKING:
    from torch import Tensor

    from salcli.models.network import OodClassifier

BATCH_SIZE = 256
Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Scored:
    """What the network says of some images."""

    label: np.ndarray[Any, np.dtype[np.int64]]  # n, the predicted class
    probability: Floats  # n, of that class
    score: Floats  # n, the OOD logit, higher = more ID-like


NOTHING = Scored(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.float32))


@dataclass(frozen=True)
class Scorer:
    """g_θ on a device. Always in float32, so that a score means the same on every machine and in an exported graph."""

    network: OodClassifier
    device: torch.device
    batch_size: int = BATCH_SIZE

    def __post_init__(self) -> None:
        self.network.to(self.device).eval()

    def __call__(self, images: Tensor) -> Scored:
        """Images (n, C, H, W), as many at a time as the batch size says."""
        parts = [self._score(batch) for batch in images.split(self.batch_size) if len(batch)]  # type: ignore[no-untyped-call]
        if not parts:
            return NOTHING
        columns = zip(*((part.label, part.probability, part.score) for part in parts), strict=True)
        return Scored(*(np.concatenate(column) for column in columns))

    def _score(self, batch: Tensor) -> Scored:
        try:
            with torch.inference_mode():
                logits, score = self.network(batch.to(self.device))
                probability, label = logits.softmax(1).max(1)
                return Scored(label.cpu().numpy(), probability.cpu().numpy(), score.cpu().numpy())
        except torch.OutOfMemoryError:
            raise DeviceError(
                f"{len(batch)} images at a time do not fit in the memory of {self.device}; use a smaller batch size"
            ) from None
