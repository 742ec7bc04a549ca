"""Detectors and images for tests."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from salcli import Detector
from salcli.data.vectors import ANY, Columns
from salcli.detector.images import ImageFormat
from salcli.detector.vectors import VectorFormat
from salcli.methods.base import Method
from salcli.models.backbones import takes_vectors
from salcli.models.network import NetworkSpec, OodClassifier
from salcli.models.pretrained import Embedder
from salcli.store.formats import read_id_split, read_samples
from salcli.store.layout import Experiment, Workspace, prepared_set

SEED = 0
EXPERIMENT = Experiment(SEED, "digits-8-9", 0.1)


def random_detector(
    backbone: str,
    channels: int = 3,  # or dimensions
    size: int = 8,
    head: str | None = None,
    columns: Columns = ANY,
    embedder: Embedder | None = None,
    float16: bool = False,
    method: Method | None = None,
) -> Detector:
    """With random weights, and batch norms that change something. With an embedder, it is a network on its features."""
    torch.manual_seed(SEED)
    n_inputs = channels if embedder is None else embedder.n_features
    network = OodClassifier(NetworkSpec(backbone, 3, (0.4,) * n_inputs, (0.3,) * n_inputs, head=head))
    for tensor in network.state_dict().values():
        if tensor.ndim == 1 and tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape) + 0.2)
    calibration = np.sort(np.random.default_rng(SEED).standard_normal(30)).astype(np.float32)
    takes: ImageFormat | VectorFormat = ImageFormat(channels, size)
    if embedder is not None:
        wanted = embedder.spec.preprocessing
        takes = ImageFormat(wanted.channels, wanted.resize, "resize", wanted.interpolation)
    elif takes_vectors(backbone):
        takes = VectorFormat(channels, columns)
    made, names = {"made": "by hand"}, ("ä", "b", "c")
    about = {"method": method, "embedder": embedder, "float16": float16, "device": "cpu"}
    return Detector(network, takes, names, calibration, made, **about)  # type: ignore[arg-type]


def id_images(built: Path, part: str) -> np.ndarray:
    """A part of the ID set, in the order of the split: calibration or test."""
    workspace = Workspace(built)
    samples = read_samples(workspace.find(prepared_set("digits-0-7")))
    return np.asarray(samples.array[getattr(read_id_split(workspace.find(EXPERIMENT.split)), part)])


def write_pngs(folder: Path, images: np.ndarray) -> list[Path]:
    """Gray images as numbered files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{i:04}.png" for i in range(len(images))]
    for path, image in zip(paths, images, strict=True):
        Image.fromarray(image[0]).save(path)
    return paths
