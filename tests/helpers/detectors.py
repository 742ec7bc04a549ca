"""Detectors and images for tests."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from salcli import Detector
from salcli.detector.images import ImageFormat
from salcli.models.network import NetworkSpec, OodClassifier
from salcli.store.formats import read_id_split, read_samples
from salcli.store.layout import Experiment, Workspace, prepared_set

SEED = 0
EXPERIMENT = Experiment(SEED, "digits-8-9", 0.1)


def random_detector(
    backbone: str, channels: int = 3, size: int = 8, dtype: str = "uint8", head: str | None = None
) -> Detector:
    """With random weights, and batch norms that change something."""
    torch.manual_seed(SEED)
    network = OodClassifier(NetworkSpec(backbone, 3, (0.4,) * channels, (0.3,) * channels, head=head))
    for tensor in network.state_dict().values():
        if tensor.ndim == 1 and tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape) + 0.2)
    calibration = np.sort(np.random.default_rng(SEED).standard_normal(30)).astype(np.float32)
    image_format = ImageFormat(channels, size, "resize", dtype)  # type: ignore[arg-type]
    return Detector(network, image_format, ("ä", "b", "c"), calibration, {"made": "by hand"}, device="cpu")


def id_images(built: Path, part: str) -> np.ndarray:
    """A part of the ID set, in the order of the split: calibration or test."""
    workspace = Workspace(built)
    samples = read_samples(workspace.find(prepared_set("digits-0-7")))
    return np.asarray(samples.array[getattr(read_id_split(workspace.find(EXPERIMENT.split)), part)])


def stored_scores(detector: Path) -> np.ndarray:
    return load_file(detector)["calibration_scores"].numpy()


def write_pngs(folder: Path, images: np.ndarray) -> list[Path]:
    """Gray images as numbered files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{i:04}.png" for i in range(len(images))]
    for path, image in zip(paths, images, strict=True):
        Image.fromarray(image[0]).save(path)
    return paths
