"""Small folders of custom images, and the source of a custom network."""

from pathlib import Path

import numpy as np
from PIL import Image

SIZE = 8
NETWORK = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes=7):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.squeeze = nn.Linear(8 * 4 * 4, 16)
        self.out = nn.Linear(16, num_classes)

    def forward(self, x):
        x = self.layers(x).view(len(x), -1)
        return self.out(torch.relu(self.squeeze(x)))
"""


def picture(kind: str, rng: np.random.Generator) -> np.ndarray:
    """Bright on the left (a), on the right (b), or striped (odd), with noise, so that no two are equal."""
    base = np.full((SIZE, SIZE), 40.0)
    if kind == "odd":
        base[::2] = 220
    else:
        base[:, slice(0, 4) if kind == "a" else slice(4, 8)] = 200
    return np.clip(base + rng.normal(0, 12, base.shape), 0, 255).astype(np.uint8)


def save(path: Path, pixels: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def lay_out(root: Path, n_labeled: int = 20, n_wild: int = 24, n_odd: int = 8) -> Path:
    """photos/labeled/{a,b}, photos/unlabeled (a quarter of it odd) and photos/known-odd."""
    rng = np.random.default_rng(0)
    photos = root / "photos"
    for kind in ("a", "b"):
        for i in range(n_labeled):
            save(photos / "labeled" / kind / f"{i}.png", picture(kind, rng))
    for i in range(n_wild):
        save(photos / "unlabeled" / f"day {i % 3}" / f"{i}.png", picture(("a", "b", "a", "odd")[i % 4], rng))
    for i in range(n_odd):
        save(photos / "known-odd" / f"{i}.png", picture("odd", rng))
    return photos


def options(photos: Path) -> list[str]:
    """Arguments of `salcli init`."""
    return ["--id", str(photos / "labeled"), "--wild", str(photos / "unlabeled"), "--no-dvc"]
