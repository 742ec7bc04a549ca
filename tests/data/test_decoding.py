"""Decoding: every kind of image file to one size and number of channels, against a slow truth."""

import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.compute import Watched
from helpers.fake_data import decoded
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import CenterCrop, InterpolationMode, Resize

from salcli.data import decoding
from salcli.data.decoding import BadPictureError, Block, Shape, decode, fit_picture, one_ahead, read_picture
from salcli.data.folders import image_files
from salcli.data.sets import Samples
from salcli.errors import SalError


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def read(path: Path, size: int = 8, channels: int = 3) -> np.ndarray:
    return read_picture(path, Shape(channels, size))


@given(*[st.integers(1, 70)] * 2, st.integers(1, 40), st.sampled_from([1, 3]), st.sampled_from(["bilinear", "bicubic"]))
def test_other_sizes_are_brought_down_as_torchvision_does_it(
    height: int, width: int, size: int, channels: int, how: Any
) -> None:
    image = Image.fromarray(noise(height, width)).convert("L" if channels == 1 else "RGB")
    expected = np.asarray(CenterCrop(size)(Resize(size, InterpolationMode(how))(image)))
    found = fit_picture(image, Shape(channels, size, how))
    np.testing.assert_array_equal(found, expected[None] if channels == 1 else expected.transpose(2, 0, 1))


@given(st.integers(8, 40), st.integers(8, 40))
def test_a_set_to_be_cropped_only_keeps_its_pixels(height: int, width: int) -> None:
    pixels = noise(height, width)
    found = fit_picture(Image.fromarray(pixels), Shape(3, 8), "crop")
    top, left = round((height - 8) / 2), round((width - 8) / 2)
    np.testing.assert_array_equal(found.transpose(1, 2, 0), pixels[top : top + 8, left : left + 8])
    small = Image.fromarray(noise(4, 6))  # too small to crop
    np.testing.assert_array_equal(fit_picture(small, Shape(3, 8), "crop"), fit_picture(small, Shape(3, 8)))


def test_arrays_go_through_the_same_code() -> None:
    pixels = np.stack([noise(20, 30, seed=i) for i in range(5)])
    found = decoded(Samples(array=pixels.transpose(0, 3, 1, 2)), size=8)
    for image, expected in zip(found, pixels, strict=True):
        np.testing.assert_array_equal(image, fit_picture(Image.fromarray(expected), Shape(3, 8)))


def test_a_folder_may_mix_sizes_formats_and_modes_and_keeps_its_order(tmp_path: Path) -> None:
    expected = []
    for i in range(60):
        image = Image.fromarray(noise(10 + i % 7, 12 + i % 5, seed=i)).convert(["RGB", "L", "P", "CMYK"][i % 4])
        path = tmp_path / f"{i:02}{['.png', '.webp', '.gif', '.tif'][i % 4]}"
        image.save(path)
        with Image.open(path) as stored:
            expected.append(CenterCrop(8)(Resize(8)(stored.convert("RGB"))))
    found = decoded(Samples(files=image_files(tmp_path)), size=8)
    np.testing.assert_array_equal(found, np.stack(expected).transpose(0, 3, 1, 2))


# --- kinds of files


def test_transparent_pixels_are_black_whatever_color_they_hide(tmp_path: Path) -> None:
    pixels = noise(8, 8, 4)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    found = read(tmp_path / "image.png").transpose(1, 2, 0)
    np.testing.assert_allclose(found, pixels[..., :3] * (pixels[..., 3:] / 255), atol=1)


def test_sixteen_bits_are_scaled_not_cut_off(tmp_path: Path) -> None:
    values = np.array([0, 128, 129, 257 * 100, 65535, 65406, 65407, 300] * 8, np.uint16).reshape(8, 8)
    expected = np.rint(values / 257)
    for suffix in (".png", ".tif"):
        Image.fromarray(values).save(tmp_path / f"image{suffix}")
        np.testing.assert_array_equal(read(tmp_path / f"image{suffix}", channels=1)[0], expected)


def test_a_turned_photograph_is_upright(tmp_path: Path) -> None:
    upright, exif = noise(8, 8), Image.Exif()
    for orientation, stored in {1: upright, 3: upright[::-1, ::-1], 6: np.rot90(upright)}.items():
        exif[0x0112] = orientation
        Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / "image.png", exif=exif)
        np.testing.assert_array_equal(read(tmp_path / "image.png").transpose(1, 2, 0), upright)


# --- bad files


def test_every_bad_picture_is_refused_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "foreign.jpg").write_bytes(b"<html>not found</html>")
    for kind in ("png", "jpeg", "webp", "gif", "tiff"):
        path = tmp_path / f"cut.{kind}"
        Image.fromarray(noise(64, 64)).save(path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(BadPictureError):
            read(path)
    Image.fromarray(np.ones((8, 8), np.float32)).save(tmp_path / "float.tif")
    Image.fromarray(noise(120, 120)).save(tmp_path / "bomb.png")  # PIL only warns up to twice its limit
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    for name, reason in {
        "nowhere.png": "no such file or directory",
        "foreign.jpg": "it is not an image of a known format",
        "float.tif": r"its values have 32 bits .* store it with 8 or 16",
        "bomb.png": "it has more than 10,000 pixels, which could fill the mem",
    }.items():
        with pytest.raises(BadPictureError, match=reason):
            read(tmp_path / name, size=32)
    path = tmp_path / "empty.png"
    path.touch()
    fix = "replace or remove it, or skip such files with data.on_bad_image: skip"
    with pytest.raises(SalError, match=f"^{path} cannot be decoded: it is empty; {fix}$"):
        decoded(Samples(files=(path,)), size=8)


# --- in blocks


@pytest.mark.parametrize("ahead", [False, True])
def test_blocks_are_small_in_order_without_bad_images_and_no_thread_outlives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    for i in range(11):
        Image.fromarray(np.full((8, 8, 3), i, np.uint8)).save(tmp_path / f"{i:02}.png")
    (tmp_path / "04.png").write_bytes(b"bad")
    monkeypatch.setattr(decoding, "BLOCK_BYTES", 3 * 3 * 8 * 8)
    task, n_threads = Watched(), threading.active_count()

    def blocks() -> Generator[Block]:
        found = decode(Samples(files=image_files(tmp_path)), Shape(3, 8), task, skip_bad=True)
        return one_ahead(found) if ahead else found

    found, good = list(blocks()), [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert [len(block.images) for block in found] == [3, 2, 3, 2]
    assert task.seen == 11
    assert np.concatenate([block.images for block in found])[:, 0, 0, 0].tolist() == good
    assert np.concatenate([block.index for block in found]).tolist() == good
    unfinished = blocks()
    next(unfinished)
    unfinished.close()
    assert threading.active_count() == n_threads
