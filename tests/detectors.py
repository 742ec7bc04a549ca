"""Detectors and images for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from salcli.artifacts.detector import ImageFormat, StoredDetector, write_detector
from salcli.artifacts.images import read_image_set
from salcli.artifacts.layout import Found
from salcli.artifacts.splits import read_id_split
from salcli.models.network import NetworkSpec, OodClassifier

if TYPE_CHECKING:
    from pathlib import Path

SEED = 0


def random_detector(
    backbone: str, channels: int = 3, size: int = 8, dtype: str = "uint8", head: str | None = None
) -> StoredDetector:
    """With random weights, and batch norms that do something."""
    torch.manual_seed(SEED)
    network = OodClassifier(NetworkSpec(backbone, 3, (0.4,) * channels, (0.3,) * channels, head=head))
    for tensor in network.state_dict().values():
        if tensor.ndim == 1 and tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape) + 0.2)
    calibration = np.sort(np.random.default_rng(SEED).standard_normal(30)).astype(np.float32)
    wanted = ImageFormat(channels, size, "resize", dtype)  # type: ignore[arg-type]
    return StoredDetector(network.eval(), wanted, ("ä", "b", "c"), calibration, {"made": "by hand"})


def write_random_detector(path: Path, backbone: str = "small-cnn", channels: int = 1) -> Path:
    write_detector(path, random_detector(backbone, channels))
    return path


def calibration_images(built: Path) -> np.ndarray:
    """Of the ID set, in the order of the split."""
    images = read_image_set(Found(built / "data/prepared/digits-0-7.h5")).images
    return np.asarray(images[read_id_split(Found(built / f"data/splits/{SEED}/id.h5")).calibration])


def held_out_images(built: Path) -> np.ndarray:
    """ID images that no stage has trained on."""
    images = read_image_set(Found(built / "data/prepared/digits-0-7.h5")).images
    return np.asarray(images[read_id_split(Found(built / f"data/splits/{SEED}/id.h5")).test])


def stored_scores(detector: Path) -> np.ndarray:
    return load_file(detector)["calibration_scores"].numpy()


def write_pngs(folder: Path, images: np.ndarray) -> list[Path]:
    """Gray images as files, numbered."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{place:04}.png" for place in range(len(images))]
    for path, image in zip(paths, images, strict=True):
        Image.fromarray(image[0]).save(path)
    return paths
