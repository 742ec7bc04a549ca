"""Augmented batches against slow code for one image, and views against torchvision's functions for one image."""

import math

import numpy as np
import pytest
import torch
from helpers.compute import DEVICES
from helpers.compute import some_images as numpy_images
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms import functional as slow

from salcli.engine import augmentation
from salcli.engine.augmentation import (
    SHIFT,
    Augmentation,
    Distortions,
    draw_boxes,
    grays,
    mirror_and_shift,
    resized_crops,
)
from salcli.errors import SalError


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_images(n: int, channels: int = 3, side: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (n, channels, side, side), dtype=torch.uint8, generator=seeded(seed))


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_batch_is_mirrored_and_shifted_as_each_image_would_be(device: torch.device) -> None:
    images = numpy_images(60, (3, 7, 9))
    rng = np.random.default_rng(1)
    mirrored, shift = rng.random(60) < 0.5, rng.integers(0, 2 * SHIFT + 1, (60, 2))
    batch = mirror_and_shift(
        torch.from_numpy(images).to(device), torch.from_numpy(mirrored).to(device), torch.from_numpy(shift).to(device)
    )
    for image, flip, (down, right), changed in zip(images, mirrored, shift, batch.cpu().numpy(), strict=True):
        padded = np.pad(image[:, :, ::-1] if flip else image, ((0, 0), (SHIFT, SHIFT), (SHIFT, SHIFT)))
        np.testing.assert_array_equal(changed, padded[:, down : down + 7, right : right + 9])


def test_augmentation_draws_every_shift_and_both_sides_evenly() -> None:
    dot = torch.zeros(20_000, 1, 11, 11, dtype=torch.uint8)
    dot[:, :, 5, 4] = 255  # one pixel, left of the middle, that no shift can push out
    position = Augmentation("flip-crop", torch.Generator().manual_seed(0))(dot).flatten(1).argmax(1)
    rows, columns = position // 11, position % 11
    shares = torch.bincount(rows, minlength=11) / 20_000
    assert (shares[1:10] - 1 / 9).abs().max() < 0.01  # 4.5 standard deviations
    assert shares[0] == shares[10] == 0
    # columns 0 to 8 as it was, 2 to 10 mirrored
    expected = torch.tensor([1, 1, 2, 2, 2, 2, 2, 2, 2, 1, 1]) / 18
    assert (torch.bincount(columns, minlength=11) / 20_000 - expected).abs().max() < 0.01


def test_no_augmentation_draws_nothing_and_vectors_cannot_be_mirrored() -> None:
    generator, images = seeded(), some_images(4)
    state = generator.get_state()
    assert Augmentation("none", generator)(images) is images
    assert torch.equal(generator.get_state(), state)
    with pytest.raises(SalError, match="the shape 512; use none"):
        Augmentation("flip-crop", seeded())(torch.zeros(4, 512))


@given(side=st.sampled_from([4, 8, 9, 32]), smallest=st.sampled_from([0.08, 0.2, 1.0]), seed=st.integers(0, 99))
def test_crops_are_torchvisions(side: int, smallest: float, seed: int) -> None:
    images = some_images(6, side=side, seed=seed)
    boxes = draw_boxes(6, side, smallest, seeded(seed))
    expected = [
        slow.resized_crop(image.float(), *box.tolist(), [side, side], antialias=True)
        for image, box in zip(images, boxes, strict=True)
    ]
    torch.testing.assert_close(resized_crops(images, boxes), torch.stack(expected), atol=2e-3, rtol=0)


def test_boxes_are_drawn_as_torchvision_draws_them() -> None:
    n, side, smallest = 4000, 32, 0.08
    ours = draw_boxes(n, side, smallest, seeded()).double()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        image = torch.zeros(1, side, side)
        params = [RandomResizedCrop.get_params(image, [smallest, 1.0], [3 / 4, 4 / 3]) for _ in range(n)]
    theirs = torch.tensor(params).double()
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, :2] + ours[:, 2:] <= side).all()
    for of_boxes in (
        lambda boxes: boxes[:, 0], lambda boxes: boxes[:, 1], lambda boxes: boxes[:, 2:].prod(1),
        lambda boxes: (boxes[:, 3] / boxes[:, 2]).log(), lambda boxes: (boxes[:, 3] / boxes[:, 2]).log().abs(),
    ):  # fmt: skip
        one, other = of_boxes(ours), of_boxes(theirs)
        error = math.hypot(float(one.std()), float(other.std())) / math.sqrt(n)
        assert abs(float(one.mean() - other.mean())) < 4 * error
        assert float(one.std()) == pytest.approx(float(other.std()), rel=0.06)


COLOURS = {"brightness": (0.0, 2.0), "contrast": (0.0, 2.0), "saturation": (0.0, 2.0), "hue": (-0.5, 0.5)}


@pytest.mark.parametrize(("name", "channels"), [*((name, 3) for name in COLOURS), ("brightness", 1), ("contrast", 1)])
def test_colours_change_as_torchvision_changes_them(name: str, channels: int) -> None:
    ours, theirs = getattr(augmentation, name), getattr(slow, f"adjust_{name}")
    images = some_images(40, channels).float() / 255
    images[0], images[1], images[2] = 0, 1, 0.3  # without any colour
    factor = torch.linspace(*COLOURS[name], 40)
    expected = [theirs(image, float(own)) for image, own in zip(images, factor, strict=True)]
    torch.testing.assert_close(ours(images, factor), torch.stack(expected), atol=1e-5, rtol=0)
    torch.testing.assert_close(grays(images), slow.rgb_to_grayscale(images), atol=1e-5, rtol=0)


def test_shares_of_gray_and_of_jittered_images() -> None:
    images = some_images(2000, side=2)
    before, views = images.clone(), Distortions(1.0, seeded()).recoloured(images)
    assert torch.equal(images, before)
    assert 0 <= views.min() <= views.max() <= 255.001
    is_gray = (views - views.mean(dim=1, keepdim=True)).abs().amax(dim=(1, 2, 3)) < 1e-3
    assert float(is_gray.double().mean()) == pytest.approx(0.2, abs=0.03)
    stays = (views - images.float()).abs().amax(dim=(1, 2, 3)) < 1e-3
    assert float(stays.double().mean()) == pytest.approx(0.2 * 0.8, abs=0.03)  # neither jittered nor gray
