"""Decoding: every kind of image file to one size and number of channels, against a slow truth."""

import io
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.compute import Watched
from helpers.fake_data import decoded
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import CenterCrop, Resize

from salcli.data import decoding
from salcli.data.catalogue import load_source
from salcli.data.decoding import BadPictureError, Shape, decode, fit_picture, look, read_picture
from salcli.data.folders import image_files
from salcli.data.samples import Source
from salcli.errors import DataError
from salcli.progress import Silent


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def read(path: Path, size: int = 8, channels: int = 3) -> np.ndarray:
    return read_picture(path, size, channels, "resize")


@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 40), st.sampled_from([1, 3]))
def test_other_sizes_are_brought_down_as_torchvision_does_it(height: int, width: int, size: int, channels: int) -> None:
    image = Image.fromarray(noise(height, width)).convert("L" if channels == 1 else "RGB")
    expected = np.asarray(CenterCrop(size)(Resize(size)(image)))
    found = fit_picture(image, size, channels, "resize")
    np.testing.assert_array_equal(found, expected[None] if channels == 1 else expected.transpose(2, 0, 1))


@given(st.integers(8, 40), st.integers(8, 40))
def test_a_set_to_be_cropped_only_keeps_its_pixels(height: int, width: int) -> None:
    pixels = noise(height, width)
    found = fit_picture(Image.fromarray(pixels), 8, 3, "crop")
    top, left = round((height - 8) / 2), round((width - 8) / 2)
    np.testing.assert_array_equal(found.transpose(1, 2, 0), pixels[top : top + 8, left : left + 8])
    small = Image.fromarray(noise(4, 6))  # too small to crop
    np.testing.assert_array_equal(fit_picture(small, 8, 3, "crop"), fit_picture(small, 8, 3, "resize"))


def test_published_crops_are_cropped_and_other_sets_resized(tmp_path: Path) -> None:
    pixels = noise(36, 36)
    for folder in ("LSUN", "LSUN_resize", "Imagenet", "Imagenet_resize"):
        (tmp_path / folder).mkdir()
        Image.fromarray(pixels).save(tmp_path / folder / "1.png")
    small = np.asarray(Image.fromarray(pixels).resize((32, 32), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    for name in ("lsun-c", "tin-crop", "lsun-r", "tin-resize"):
        found = decoded(load_source(name, tmp_path))[0]
        is_crop = name in ("lsun-c", "tin-crop")
        np.testing.assert_array_equal(found, pixels[2:34, 2:34].transpose(2, 0, 1) if is_crop else small)


@pytest.mark.parametrize("shape", [(20, 30), (8, 8)])
def test_arrays_go_through_the_same_code_and_what_fits_is_not_touched(shape: tuple[int, int]) -> None:
    pixels = np.stack([noise(*shape, seed=i) for i in range(5)])
    found = decoded(Source(array=pixels.transpose(0, 3, 1, 2)), size=8)
    for image, expected in zip(found, pixels, strict=True):
        np.testing.assert_array_equal(image, fit_picture(Image.fromarray(expected), 8, 3, "resize"))
    assert shape == (20, 30) or np.array_equal(found, pixels.transpose(0, 3, 1, 2))


def test_a_folder_may_mix_sizes_formats_and_modes_and_keeps_its_order(tmp_path: Path) -> None:
    expected = []
    for i in range(60):
        image = Image.fromarray(noise(10 + i % 7, 12 + i % 5, seed=i)).convert(["RGB", "L", "P", "CMYK"][i % 4])
        path = tmp_path / f"{i:02}{['.png', '.webp', '.gif', '.tif'][i % 4]}"
        image.save(path)
        with Image.open(path) as stored:
            expected.append(CenterCrop(8)(Resize(8)(stored.convert("RGB"))))
    found = decoded(Source(image_files(tmp_path)), size=8)
    np.testing.assert_array_equal(found, np.stack(expected).transpose(0, 3, 1, 2))


# --- kinds of files


def test_transparent_pixels_are_black_whatever_color_they_hide(tmp_path: Path) -> None:
    pixels = noise(8, 8, 4)
    pixels[:4, :, 3] = 0
    pixels[4:6, :, 3] = 255
    pixels[6:, :, 3] = 128
    Image.fromarray(pixels).save(tmp_path / "image.png")
    found = read(tmp_path / "image.png").transpose(1, 2, 0)
    assert (found[:4] == 0).all()
    np.testing.assert_array_equal(found[4:6], pixels[4:6, :, :3])
    np.testing.assert_allclose(found[6:], pixels[6:, :, :3] * (128 / 255), atol=1)
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([255, 255, 255, 10, 200, 30])
    palette.paste(0, (0, 0, 4, 8))
    palette.save(tmp_path / "palette.png", transparency=0)
    found = read(tmp_path / "palette.png")
    assert (found[:, :, :4] == 0).all()
    assert (found[:, :, 4:] == np.array([10, 200, 30])[:, None, None]).all()


def test_sixteen_bits_are_scaled_not_cut_off(tmp_path: Path) -> None:
    values = np.array([0, 128, 129, 257 * 100, 65535, 65406, 65407, 300] * 8, np.uint16).reshape(8, 8)
    expected = np.rint(values / 257)
    for suffix in (".png", ".tif"):
        Image.fromarray(values).save(tmp_path / f"image{suffix}")
        np.testing.assert_array_equal(read(tmp_path / f"image{suffix}", channels=1)[0], expected)
    (tmp_path / "image.pgm").write_bytes(b"P5 8 8 65535\n" + values.astype(">u2").tobytes())
    np.testing.assert_array_equal(read(tmp_path / "image.pgm", channels=1)[0], expected)


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "1", "L", "RGB"])
def test_other_color_models_look_as_they_do_elsewhere(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "image.tif"
    Image.fromarray(noise(8, 8)).convert(mode).save(path)
    with Image.open(path) as stored:
        color, gray = np.asarray(stored.convert("RGB")), np.asarray(stored.convert("L"))
    np.testing.assert_array_equal(read(path).transpose(1, 2, 0), color)
    assert abs(read(path, channels=1)[0].astype(int) - gray).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_photograph_is_upright(tmp_path: Path, orientation: int) -> None:
    upright = noise(8, 8)
    stored = {
        1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1], 5: upright.transpose(1, 0, 2),
        6: np.rot90(upright), 7: np.rot90(upright[::-1]), 8: np.rot90(upright, -1),
    }[orientation]  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / "image.png", exif=exif)
    np.testing.assert_array_equal(read(tmp_path / "image.png").transpose(1, 2, 0), upright)


# --- bad files


def encoded(kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(noise(64, 64)).save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "gif", "bmp", "tiff"])
def test_a_cut_off_file_is_a_bad_picture_wherever_it_ends(tmp_path: Path, kind: str) -> None:
    whole, path = encoded(kind), tmp_path / f"image.{kind}"
    path.write_bytes(whole)
    assert read(path).shape == (3, 8, 8)
    for length in (0, 1, 10, 40, len(whole) // 2):
        path.write_bytes(whole[:length])
        (block,) = decode(Source((path,)), Shape(3, 8), Silent(), skip_bad=True)
        ((_, reason),) = block.bad
        assert reason == ("it is empty" if length == 0 else reason.strip())
        assert len(reason) > 5


@given(st.sampled_from(["png", "jpeg", "webp", "gif", "tiff"]), st.data())
def test_changed_bytes_give_a_picture_or_a_reason(
    tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    content = bytearray(encoded(kind))
    for _ in range(5):
        content[data.draw(st.integers(0, min(len(content) - 1, 400)))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / f"changed.{kind}"
    path.write_bytes(content)
    (block,) = decode(Source((path,)), Shape(3, 8), Silent(), skip_bad=True)
    assert len(block.images) + len(block.bad) == 1


@pytest.mark.parametrize("factor", [0.75, 0.4])
def test_a_decompression_bomb_is_a_bad_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """PIL warns above its limit, and refuses above twice the limit; here both are bad."""
    Image.fromarray(noise(100, 100)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", int(100 * 100 * factor))
    reason = f"bomb.png cannot be decoded: it has more than {int(10_000 * factor):,} pixels, which could fill the mem"
    with pytest.raises(DataError, match=reason):
        decoded(Source((tmp_path / "bomb.png",)), size=8)


def test_a_bad_image_is_refused_with_its_name_a_reason_and_the_fix(tmp_path: Path) -> None:
    paths = tuple(tmp_path / name for name in ("empty.png", "foreign.jpg", "nowhere.png"))
    paths[0].write_bytes(b"")
    paths[1].write_bytes(b"<html>not found</html>")
    paths[2].symlink_to(tmp_path / "nothing")
    with pytest.raises(DataError) as caught:
        decoded(Source(paths), size=8)
    assert str(caught.value) == (
        f"{paths[0]} cannot be decoded: it is empty; replace or remove it, or skip such files with "
        "data.on_bad_image: skip"
    )
    (block,) = decode(Source(paths), Shape(3, 8), Silent(), skip_bad=True)
    assert len(block.images) == 0
    assert [reason for _, reason in block.bad] == [
        "it is empty", "it is not an image of a known format", "no such file or directory",
    ]  # fmt: skip


def test_a_pipe_a_line_and_values_without_a_known_white_are_bad_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    Image.fromarray(noise(1, 900)).save(tmp_path / "line.png")
    Image.fromarray(np.ones((8, 8), np.float32)).save(tmp_path / "float.tif")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    for name, reason in {
        "pipe.png": "it is not a regular file",
        "line.png": "its sides are too unequal to resize it: 900 × 1 pixels",
        "float.tif": r"its values have 32 bits .* store it with 8 or 16",
    }.items():
        with pytest.raises(BadPictureError, match=reason):
            read(tmp_path / name, size=32)


# --- in blocks


def test_blocks_are_small_in_order_and_told_to_the_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.random.default_rng(0).integers(0, 256, (10, 3, 8, 8), dtype=np.uint8)
    monkeypatch.setattr(decoding, "BLOCK_BYTES", 3 * 3 * 8 * 8)
    task = Watched()
    blocks = list(decode(Source(array=images), Shape(3, 8), task, skip_bad=False))
    assert [len(block.images) for block in blocks] == [3, 3, 3, 1]
    assert task.seen == 10
    np.testing.assert_array_equal(np.concatenate([block.images for block in blocks]), images)
    assert np.concatenate([block.index for block in blocks]).tolist() == list(range(10))


def test_bad_images_are_left_out_of_every_block_and_no_thread_outlives_the_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(11):
        Image.fromarray(np.full((8, 8, 3), i, np.uint8)).save(tmp_path / f"{i:02}.png")
    (tmp_path / "04.png").write_bytes(b"bad")
    monkeypatch.setattr(decoding, "MOST_IN_BLOCK", 3)
    n_threads = threading.active_count()
    blocks = list(decode(Source(image_files(tmp_path)), Shape(3, 8), Silent(), skip_bad=True))
    good = [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert np.concatenate([block.images for block in blocks])[:, 0, 0, 0].tolist() == good
    assert np.concatenate([block.index for block in blocks]).tolist() == good
    unfinished = decode(Source(image_files(tmp_path)), Shape(3, 8), Silent(), skip_bad=True)
    next(unfinished)
    unfinished.close()
    assert threading.active_count() == n_threads


# --- a look at a set


def test_a_look_tells_sizes_and_colors_and_what_cannot_be_read_and_samples_many_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i, (height, width) in enumerate([(9, 30), (40, 20), (12, 12)]):
        Image.fromarray(noise(height, width, 1)).save(tmp_path / f"{i}.png")
    (tmp_path / "bad.png").write_bytes(b"bad")
    found = look(Source(image_files(tmp_path)), Silent())
    assert (found.n_looked_at, found.was_decoded, found.is_gray) == (4, True, True)
    assert (found.smallest, found.median_side, found.largest) == ((30, 9), 12, (20, 40))
    assert found.bad == ((tmp_path / "bad.png", "it is not an image of a known format"),)
    monkeypatch.setattr(decoding, "MOST_LOOKED_AT", 2)
    monkeypatch.setattr(decoding, "MOST_DECODED", 0)
    found = look(Source(image_files(tmp_path)), Silent())
    assert (found.n_looked_at, found.was_decoded) == (2, False)
