"""The detector from Python: load the file, call it with images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from salcli.artifacts.detector import read_detector
from salcli.artifacts.layout import Found
from salcli.calibration import ID_QUANTILE, is_below, p_values, threshold_that_keeps
from salcli.compute.devices import resolve_device
from salcli.data.decoding import printable
from salcli.detector.file_pass import scored
from salcli.detector.image_input import as_array, as_paths, check_takes_pictures
from salcli.detector.predictions import Predictions, joined
from salcli.detector.scorer import BATCH_SIZE, Scorer
from salcli.errors import DataError, DeviceError, MissingArtifactError, UsageMistakeError

if TYPE_CHECKING:
    import os
    from collections.abc import Generator, Sequence

    from salcli.artifacts.detector import StoredDetector
    from salcli.detector.image_input import Images
    from salcli.detector.scorer import Scored

MADE_BY = "salcli detector"


@dataclass(frozen=True)
class Scanned:
    """Some files that follow each other, and what came of them."""

    files: tuple[Path, ...]
    predictions: Predictions  # of those that gave an image, in their order
    failed: dict[int, str]  # place in `files` → why it gave none


class Detector:
    """Tells ID images from OOD images: `detector = Detector.load("detector.safetensors"); detector(images)`."""

    def __init__(
        self,
        stored: StoredDetector,
        *,
        id_quantile: float = ID_QUANTILE,
        device: str = "auto",
        batch_size: int = BATCH_SIZE,
    ) -> None:
        if not 0 < id_quantile < 1:
            raise UsageMistakeError(
                f"the ID quantile must be greater than 0 and less than 1, got {id_quantile:g}; "
                "it is the share of ID data to keep, for example 0.95"
            )
        if batch_size < 1:
            raise UsageMistakeError(f"the batch size must be at least 1, got {batch_size}")
        self.stored, self.id_quantile = stored, id_quantile
        self.threshold = threshold_that_keeps(stored.calibration, id_quantile)
        self._scorer = Scorer(stored.network, _device(device), batch_size)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        id_quantile: float = ID_QUANTILE,
        device: str = "auto",
        batch_size: int = BATCH_SIZE,
        allow_import: bool = False,
    ) -> Detector:
        """Read a file that `salcli detector` made. No code from the file is run.

        `id_quantile`: the share of ID calibration data that `is_ood` keeps. `allow_import`: where the network is of
        somebody's own, import the module that the file names.
        """
        file = Path(path)
        try:
            file.open("rb").close()
        except FileNotFoundError:
            raise MissingArtifactError(f"{file} is not there; make a detector with: {MADE_BY}") from None
        stored = read_detector(Found(file, MADE_BY), allow_import=allow_import)
        return cls(stored, id_quantile=id_quantile, device=device, batch_size=batch_size)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Of the ID classes."""
        return self.stored.class_names

    def __call__(self, images: Images) -> Predictions:
        """Paths, PIL images, or an array or tensor (n, C, H, W) of uint8; several or one. A bad file is an error."""
        files = as_paths(images)
        if files is None:
            return self._judge(self._scorer(torch.from_numpy(as_array(images, self.stored.images))))
        parts = list(self.scan(files))
        for part in parts:
            for place, reason in part.failed.items():
                raise DataError(f"{printable(part.files[place])} cannot be decoded: {reason}; leave it out")
        return joined([part.predictions for part in parts])

    def scan(self, files: Sequence[str | os.PathLike[str]]) -> Generator[Scanned]:
        """Files in their order, part by part, each with its predictions and the files that gave no image.

        Threads decode the next files while the network computes; memory does not grow with their number.
        """
        check_takes_pictures(self.stored.images)
        paths = tuple(file if isinstance(file, Path) else Path(file) for file in files)
        for part, found in scored(paths, self.stored.images, self._scorer):
            good = tuple(str(file) for place, file in enumerate(part.files) if place not in part.failed)
            yield Scanned(part.files, self._judge(found, good), part.failed)

    def _judge(self, found: Scored, names: tuple[str, ...] = ()) -> Predictions:
        return Predictions(
            classes=tuple(self.class_names[k] for k in found.label),
            probabilities=found.probability,
            scores=found.score,
            is_ood=is_below(found.score, self.threshold),
            p_values=p_values(self.stored.calibration, found.score),
            names=names,
        )


def _device(name: str) -> torch.device:
    """params.yaml is checked before a stage sees it; this name comes straight from a caller."""
    try:
        return resolve_device(name)
    except RuntimeError:
        raise DeviceError(f"device {name} is not known; use auto, cpu, cuda, cuda:N or mps") from None
