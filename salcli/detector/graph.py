"""The detector as one module, from images to decisions: what is exported."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from salcli.artifacts.detector import ImageFormat
    from salcli.detector.detector import Detector

INPUT = "images"
OUTPUTS = ("logits", "score", "is_ood", "p_value")


class DetectorGraph(nn.Module):
    """Images (n, C, H, W) to class logits, OOD score, decision and p-value. Normalisation is inside."""

    calibration: Tensor
    threshold: Tensor

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        # a copy: weights in the order of an export, not in that which convolutions are fast in
        self.network = copy.deepcopy(detector.stored.network).cpu().to(memory_format=torch.contiguous_format)
        self.register_buffer("calibration", torch.from_numpy(detector.stored.calibration.copy()))
        self.register_buffer("threshold", torch.tensor(detector.threshold, dtype=torch.float32))
        self.eval()

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The names of the outputs are OUTPUTS."""
        logits, score = self.network(images)
        n_at_most = (self.calibration <= score[:, None]).sum(1)
        p_value = (1 + n_at_most).to(torch.float32) / (len(self.calibration) + 1)
        return logits, score, ~(score >= self.threshold), p_value


def random_images(n: int, wanted: ImageFormat, seed: int) -> Tensor:
    """A batch of the kind that the detector takes."""
    generator, axes = torch.Generator().manual_seed(seed), (n, wanted.channels, wanted.size, wanted.size)
    if wanted.dtype == "uint8":
        return torch.randint(0, 256, axes, dtype=torch.uint8, generator=generator)
    return torch.randn(axes, generator=generator)


def description(detector: Detector) -> dict[str, Any]:
    """What a program must know that feeds the graph: written into the exported file."""
    wanted = detector.stored.images
    resize = (
        "shorter side to `size`, bilinear with antialiasing as Pillow does it, then " if wanted.fit == "resize" else ""
    )
    return {
        "input": {
            "name": INPUT,
            "axes": "batch, channels, height, width",
            "channels": "gray" if wanted.channels == 1 else "RGB" if wanted.channels == 3 else "coordinates",
            "size": wanted.size,
            "dtype": wanted.dtype,
            "range": [0, 255] if wanted.dtype == "uint8" else None,
            "fit": f"{resize}the square in the middle" if wanted.dtype == "uint8" else None,
            "orientation": "upright, as EXIF says; transparent pixels on black" if wanted.dtype == "uint8" else None,
            "normalisation": "inside the graph",
        },
        "outputs": {
            "logits": "of the classes, before softmax",
            "score": "OOD score, higher = more like ID data",
            "is_ood": "whether the score is below the threshold",
            "p_value": "conformal, against the calibration scores",
        },
        "class_names": detector.class_names,
        "id_quantile": detector.id_quantile,
        "threshold": detector.threshold,
        "n_calibration": len(detector.stored.calibration),
        "provenance": dict(detector.stored.provenance),
    }
