"""Resizing and cropping give the pixels of torchvision's and timm's own transforms, to the last one."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor
from torchvision import models

from salcli.data.decoding import fit_picture
from salcli.models import pretrained
from salcli.models.pretrained import Embedder, EmbedderSpec, Preprocessing

SIZES = (501, 333), (334, 501), (427, 640), (601, 600), (300, 300)  # width, height
PLAIN = {"mean": (0.0,) * 3, "std": (1.0,) * 3}


def ways_of_torchvision() -> dict[tuple[int, int, str], Any]:
    """A transform for every (resize, crop, interpolation) that some weights of a classifier use."""
    found = {}
    for name in models.list_models(module=models):
        for weights in models.get_model_weights(name):
            used = weights.transforms()
            found[used.resize_size[0], used.crop_size[0], used.interpolation.value] = used
    return found


WAYS = ways_of_torchvision()


@cache
def photo(size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(load_sample_images().images[0]).resize(size)


def pixels(way: Preprocessing, image: Image.Image) -> Tensor:
    """What a frozen backbone gets."""
    whole = fit_picture(image, way.resize, 3, "resize", way.interpolation, way.crop)
    assert whole.shape == (3, way.resize, way.resize)
    frozen = Embedder(EmbedderSpec("small-cnn", None, way))
    return frozen.normalised(torch.from_numpy(np.array(whole))[None])[0].mul(255).round()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_crop_is_torchvisions(way: tuple[int, int, str]) -> None:
    theirs = WAYS[way]
    theirs.mean, theirs.std = map(list, PLAIN.values())
    for size in SIZES:
        expected = theirs(photo(size)).mul(255).round()
        assert torch.equal(pixels(Preprocessing(*way, **PLAIN), photo(size)), expected), size  # type: ignore[arg-type]


@pytest.mark.parametrize("crop_pct", [0.875, 0.9, 0.96, 0.97, 1.0])
def test_the_crop_is_timms(crop_pct: float) -> None:
    config = {"input_size": (3, 224, 224), "crop_pct": crop_pct, "interpolation": "bicubic", **PLAIN}
    theirs = timm.data.create_transform(**config)
    for size in SIZES:
        expected = theirs(photo(size)).mul(255).round()
        assert torch.equal(pixels(Preprocessing(**pretrained._of_config(config)), photo(size)), expected), size
