"""One picture: read a file, and bring it to the asked-for size and channels."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

# What PIL makes of broken files, besides its own two errors: its plug-ins are not of one mind.
BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    IndexError,
    EOFError,
    OverflowError,
    MemoryError,
    ArithmeticError,
)
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
GRAY = ("1", "L", "LA", "La", "I", *SIXTEEN_BITS)


class BadPictureError(Exception):
    """A file that gives no picture; the message is the reason."""


def read_picture(path: Path, size: int, channels: int, fit: Literal["resize", "crop"]) -> NDArray[np.uint8]:
    """C, H, W of one file. The caller turns PIL's warning of decompression bombs into an error."""
    with _opened(path) as image:
        return fit_picture(plain(image), size, channels, fit)


@dataclass(frozen=True)
class PictureFacts:
    """What a file says of its picture."""

    width: int
    height: int
    is_gray: bool


def picture_facts(path: Path, *, decode: bool) -> PictureFacts:
    """From the header alone, or once it is sure that the rest can be decoded as well."""
    with _opened(path) as image:
        if decode:
            plain(image).load()
        return PictureFacts(*image.size, is_gray=image.mode in GRAY)


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """Whatever goes wrong with the picture inside is a BadPictureError."""
    try:
        if not path.is_file() and path.exists():  # to open a pipe would be to wait for somebody to write into it
            raise BadPictureError("it is no regular file")
        with Image.open(path) as image:
            yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        limit = f"{Image.MAX_IMAGE_PIXELS or 0:,}"
        raise BadPictureError(f"it has more than {limit} pixels, which could fill the memory") from None
    except UnidentifiedImageError:
        reason = "it is empty" if path.stat().st_size == 0 else "it is no image of a known format"
        raise BadPictureError(reason) from None
    except BROKEN as error:
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise BadPictureError(text[0].lower() + text[1:]) from None


def fit_picture(image: Image.Image, size: int, channels: int, fit: Literal["resize", "crop"]) -> NDArray[np.uint8]:
    """Shorter side to `size`, then the square in the middle, as torchvision's Resize and CenterCrop do it.

    A picture that has the size is left as it is; one to be cropped only is resized where it is too small to crop.
    """
    image = image.convert("L" if channels == 1 else "RGB")
    shorter = min(image.size)
    if shorter != size and (fit == "resize" or shorter < size):
        width, height = (size if side == shorter else int(size * side / shorter) for side in image.size)
        if Image.MAX_IMAGE_PIXELS and width * height > Image.MAX_IMAGE_PIXELS:
            raise ValueError(f"its sides are too unequal to resize it: {image.width} × {image.height} pixels")
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    if image.size != (size, size):
        left, top = (round((side - size) / 2) for side in image.size)
        image = image.crop((left, top, left + size, top + size))
    pixels: NDArray[np.uint8] = np.asarray(image)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def fit_array(pixels: NDArray[np.uint8], size: int, channels: int, fit: Literal["resize", "crop"]) -> NDArray[np.uint8]:
    """The same for an image that is an array already: C, H, W."""
    plane = pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
    return fit_picture(Image.fromarray(np.ascontiguousarray(plane)), size, channels, fit)


def plain(image: Image.Image) -> Image.Image:
    """Upright, in 8 bits, without transparency."""
    has_16_bits = image.mode in SIXTEEN_BITS or (image.mode == "I" and image.format in ("PNG", "PPM"))
    image = ImageOps.exif_transpose(image)
    if has_16_bits:
        return Image.fromarray(_eight_bits(np.asarray(image)))
    if image.mode in ("I", "F"):
        raise ValueError(f"its values have 32 bits ({image.mode}) and no known white; store it with 8 or 16 bits")
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        return _on_black(image.convert("RGBA"))
    return image


def _eight_bits(values: NDArray[np.integer]) -> NDArray[np.uint8]:
    """65535 is 255. PIL itself would cut off all above 255."""
    return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)


def _on_black(image: Image.Image) -> Image.Image:
    """To drop the alpha channel would show what its author has hidden. Black is also what crops are padded with."""
    ground = Image.new("RGBA", image.size, (0, 0, 0, 255))
    return Image.alpha_composite(ground, image)
