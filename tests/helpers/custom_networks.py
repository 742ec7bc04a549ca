"""Custom networks for tests: source code in files, importable until the test ends."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.custom_images import NETWORK

from salcli.models.custom import make_importable

SHAPE = (1, 8, 8)
ODD_ONES = """
import torch
from torch import nn

class Softmaxed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.last = nn.Linear(64, 5), nn.Linear(5, 3, bias=False)
    def forward(self, x):
        return {"logits": self.last(self.body(x.flatten(1)).relu()).log_softmax(1)}

class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(64, 3), nn.Linear(64, 3)
    def forward(self, x):
        return self.one(x.flatten(1)) + self.other(x.flatten(1))

class PerPixel(nn.Module):
    def __init__(self):
        super().__init__()
        self.point = nn.Linear(8, 3)
    def forward(self, x):
        return self.point(x).mean((1, 2))

class Colour(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.fc = nn.Linear(3 * 64, num_classes)
    def forward(self, x):
        return self.fc(x.flatten(1))

def tied():
    first = nn.Linear(64, 64)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), first, nn.Linear(64, 2))

def broken():
    raise OSError("no such luck")

def five():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))

number = 3
"""


@contextmanager
def fresh_imports() -> Iterator[None]:
    """What is made importable inside is forgotten afterwards."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.split(".")[0] in ("nets", "odd_ones", "mypkg"):
            del sys.modules[name]


def write_networks(folder: Path) -> Path:
    """nets.py and odd_ones.py, importable."""
    (folder / "nets.py").write_text(NETWORK)
    (folder / "odd_ones.py").write_text(ODD_ONES)
    make_importable(folder)
    return folder
