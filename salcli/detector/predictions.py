"""What a detector says of images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Predictions:
    """One entry for each image, in the order in which they were given."""

    classes: tuple[str, ...]  # the predicted class's name
    probabilities: NDArray[np.float32]  # n, that the network gives to this class
    scores: NDArray[np.float32]  # n, higher = more ID-like
    is_ood: NDArray[np.bool_]  # n, whether the score is below the detector's threshold
    p_values: NDArray[np.float64]  # n, against the calibration scores
    names: tuple[str, ...] = ()  # of the files, where there are any

    def __len__(self) -> int:
        return len(self.classes)

    def columns(self) -> dict[str, Any]:
        """By the names that they have in every output."""
        own = {
            "class": list(self.classes),
            "probability": self.probabilities,
            "score": self.scores,
            "is_ood": self.is_ood,
            "p_value": self.p_values,
        }
        return {"path": list(self.names), **own} if self.names else own

    def to_frame(self) -> pd.DataFrame:
        """A pandas table with one row for each image."""
        import pandas as pd  # takes half a second, and most callers do without it

        return pd.DataFrame(self.columns())


def joined(parts: list[Predictions]) -> Predictions:
    """Several results as one."""
    return Predictions(
        tuple(name for part in parts for name in part.classes),
        np.concatenate([part.probabilities for part in parts]),
        np.concatenate([part.scores for part in parts]),
        np.concatenate([part.is_ood for part in parts]),
        np.concatenate([part.p_values for part in parts]),
        tuple(name for part in parts for name in part.names),
    )
