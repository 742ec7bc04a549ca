"""From image files of any kind to arrays of one shape, block by block, so that a set may be larger than the memory.

`decode` makes the arrays, `look` only describes a set: sizes, channels, and which files cannot be read.
"""

import os
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from salcli.data.duplicates import Digests, sample_digests
from salcli.data.sets import Fit, Samples, file_size
from salcli.errors import SalError, printable
from salcli.progress import Task

BLOCK_BYTES = 2**25
MOST_IN_BLOCK = 1024
MOST_THREADS = 16
MOST_LOOKED_AT = 20_000  # files; larger sets are sampled at equal distances
MOST_DECODED = 1 << 27  # bytes; of larger sets, `look` reads only the headers
# What PIL's plug-ins raise for broken files, besides its own two errors
BROKEN = (
    OSError, SyntaxError, ValueError, TypeError, IndexError, EOFError, OverflowError, MemoryError, ArithmeticError,
)  # fmt: skip
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
GRAY = {"1", "L", "LA", "La", "I", *SIXTEEN_BITS}

Interpolation = Literal["bilinear", "bicubic"]
RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
T = TypeVar("T")


# --- a whole set


@dataclass(frozen=True)
class Shape:
    """The shape that every image is brought to."""

    channels: int
    size: int  # height and width
    interpolation: Interpolation = "bilinear"
    crop: int | None = None  # what a network takes of the middle; decides how the square is placed

    @property
    def axes(self) -> tuple[int, int, int]:
        """C, H, W."""
        return self.channels, self.size, self.size


@dataclass(frozen=True)
class Block:
    """Some decoded samples, their index in the source, and the files that could not be decoded, with the reason."""

    images: NDArray[Any]  # b, C, H, W; of vectors b, D
    index: NDArray[np.int64]  # b
    bad: tuple[tuple[Path, str], ...] = ()

    @cached_property
    def digests(self) -> Digests:
        return sample_digests(self.images)


def check_kind(name: str, source: Samples, shape: Shape | None) -> None:
    """Without a shape the project works on vectors; images and vectors do not mix."""
    if source.is_vectors and shape is not None:
        raise SalError(
            f"{name} holds vectors, but this project works on images; give images, or, where all sets are vectors, set "
            "data.image_size and data.channels to null, model.frozen to false and model.backbone to linear or mlp"
        )
    if not source.is_vectors and shape is None:
        raise SalError(
            f"{name} holds images, but this project works on vectors; give vectors, or, where all sets are images, set "
            "data.image_size, data.channels and a model.backbone for images, or a frozen one"
        )


def vector_blocks(source: Samples, task: Task) -> Generator[Block]:
    """All vectors in order."""
    step = max(1, BLOCK_BYTES // (4 * source.array.shape[1]))
    for start, stop in pairwise([*range(0, len(source), step), len(source)]):
        yield Block(np.ascontiguousarray(source.array[start:stop]), np.arange(start, stop))
        task.advance(stop - start)


def decode(source: Samples, shape: Shape, task: Task, *, skip_bad: bool) -> Generator[Block]:
    """All images in order. One that cannot be decoded is an error, or is skipped."""
    step = min(MOST_IN_BLOCK, max(1, BLOCK_BYTES // int(np.prod(shape.axes))))
    with _decoding_threads() as pool:
        for start, stop in pairwise([*range(0, len(source), step), len(source)]):
            if source.files:
                block = _from_files(source.files[start:stop], shape, source.fit, pool)
            else:
                block = _from_array(source.array[start:stop], shape, source.fit, pool)
            if block.bad and not skip_bad:
                path, reason = block.bad[0]
                raise SalError(
                    f"{printable(path)} cannot be decoded: {reason}; replace or remove it, or skip such files "
                    "with data.on_bad_image: skip"
                )
            task.advance(stop - start)
            yield Block(block.images, block.index + start, block.bad)


def one_ahead(items: Generator[T]) -> Generator[T]:
    """The same items in the same order; a thread makes the next one while the caller works on the last one.

    Only one thread runs the generator at a time, and the generator is always closed in the end.
    """
    with ThreadPoolExecutor(1, "prefetch") as thread:
        try:
            waiting = thread.submit(lambda: list(islice(items, 1)))
            while found := waiting.result():
                waiting = thread.submit(lambda: list(islice(items, 1)))
                yield from found
        finally:
            thread.submit(items.close).result()


@contextmanager
def _decoding_threads() -> Iterator[ThreadPoolExecutor]:
    # Threads share the warning filters, so they are set once, around all threads. PIL's other warnings are about odd
    # files that it reads anyway.
    with warnings.catch_warnings(), ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_THREADS)) as pool:
        warnings.filterwarnings("ignore", module=r"PIL\.")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield pool


def _from_array(images: NDArray[Any], shape: Shape, fit: Fit, pool: ThreadPoolExecutor) -> Block:
    index = np.arange(len(images))
    if images.shape[1:] == shape.axes:
        return Block(np.ascontiguousarray(images), index)
    return Block(np.stack(list(pool.map(lambda image: fit_array(image, shape, fit), images))), index)


def _from_files(files: Sequence[Path], shape: Shape, fit: Fit, pool: ThreadPoolExecutor) -> Block:
    results = list(pool.map(_or_reason(lambda path: read_picture(path, shape, fit)), files))
    good = [i for i, result in enumerate(results) if not isinstance(result, str)]
    images = np.empty((len(good), *shape.axes), np.uint8)
    for row, i in enumerate(good):
        images[row] = results[i]
    bad = tuple((path, result) for path, result in zip(files, results, strict=True) if isinstance(result, str))
    return Block(images, np.array(good, dtype=np.int64), bad)


def _or_reason(read: Callable[[Path], T]) -> Callable[[Path], T | str]:
    """The same function, but it returns the reason where a file cannot be read."""

    def attempt(path: Path) -> T | str:
        try:
            return read(path)
        except BadPictureError as error:
            return str(error)

    return attempt


# --- one picture


class BadPictureError(Exception):
    """A file that cannot be decoded; the message is the reason."""


def read_picture(path: Path, shape: Shape, fit: Fit = "resize") -> NDArray[np.uint8]:
    """Decode one file to C, H, W. The caller turns PIL's warning about decompression bombs into an error."""
    with _opened(path) as image:
        return fit_picture(plain(image), shape, fit)


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """Any error while the picture is open becomes a BadPictureError."""
    try:
        if not path.is_file() and path.exists():  # opening a pipe would wait for a writer
            raise BadPictureError("it is not a regular file")
        with Image.open(path) as image:
            yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        limit = f"{Image.MAX_IMAGE_PIXELS or 0:,}"
        raise BadPictureError(f"it has more than {limit} pixels, which could fill the memory") from None
    except UnidentifiedImageError:
        reason = "it is empty" if path.stat().st_size == 0 else "it is not an image of a known format"
        raise BadPictureError(reason) from None
    except BROKEN as error:
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise BadPictureError(text[0].lower() + text[1:]) from None


def fit_picture(image: Image.Image, shape: Shape, fit: Fit = "resize") -> NDArray[np.uint8]:
    """Shorter side to the wanted size, then the square in the middle, as torchvision's Resize and CenterCrop do it.

    A picture of that size is left as it is. With `fit="crop"`, only pictures that are too small are resized. With
    `crop`, CenterCrop(crop) of the result gives the same pixels as CenterCrop(crop) of the whole resized picture:
    two crops that round one after the other may be a pixel off.
    """
    size = shape.size
    image = image.convert("L" if shape.channels == 1 else "RGB")
    shorter = min(image.size)
    if shorter != size and (fit == "resize" or shorter < size):
        width, height = (size if side == shorter else int(size * side / shorter) for side in image.size)
        if Image.MAX_IMAGE_PIXELS and width * height > Image.MAX_IMAGE_PIXELS:
            raise ValueError(f"its sides are too unequal to resize it: {image.width} × {image.height} pixels")
        image = image.resize((width, height), RESAMPLING[shape.interpolation])
    if image.size != (size, size):
        inner = shape.crop or size
        left, top = (round((side - inner) / 2) - round((size - inner) / 2) for side in image.size)
        image = image.crop((left, top, left + size, top + size))
    pixels: NDArray[np.uint8] = np.asarray(image)
    return pixels[None] if shape.channels == 1 else pixels.transpose(2, 0, 1)


def fit_array(pixels: NDArray[np.uint8], shape: Shape, fit: Fit = "resize") -> NDArray[np.uint8]:
    """`fit_picture` for an array C, H, W."""
    plane = pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
    return fit_picture(Image.fromarray(np.ascontiguousarray(plane)), shape, fit)


def plain(image: Image.Image) -> Image.Image:
    """Upright, in 8 bits, without transparency."""
    has_16_bits = image.mode in SIXTEEN_BITS or (image.mode == "I" and image.format in ("PNG", "PPM"))
    image = ImageOps.exif_transpose(image)
    if has_16_bits:  # 65535 → 255; PIL would clip everything above 255
        return Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its values have 32 bits ({image.mode}) and no known white; store it with 8 or 16 bits")
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        # Dropping alpha would reveal hidden pixels. Black is also what crops are padded with.
        background = Image.new("RGBA", image.size, (0, 0, 0, 255))
        return Image.alpha_composite(background, image.convert("RGBA"))
    return image


# --- a look at a set before it is decoded


@dataclass(frozen=True)
class Look:
    """What the pictures of a set are like."""

    n_looked_at: int
    was_decoded: bool  # if not, a truncated file still counts as good
    smallest: tuple[int, int]  # width and height, by the shorter side
    largest: tuple[int, int]
    median_side: int  # of the shorter sides
    is_gray: bool  # all of them
    bad: tuple[tuple[Path, str], ...]


def look(source: Samples, task: Task) -> Look:
    """Read what is needed to describe the set."""
    if not source.files:
        task.advance(len(source))
        _, channels, height, width = source.array.shape
        return Look(len(source), True, (width, height), (width, height), min(width, height), channels == 1, ())
    chosen = [source.files[i] for i in np.unique(np.linspace(0, len(source) - 1, MOST_LOOKED_AT).astype(int))]
    decode = sum(file_size(path) for path in chosen) <= MOST_DECODED

    def size_and_mode(path: Path) -> tuple[tuple[int, int], str]:
        with _opened(path) as image:
            if decode:
                plain(image).load()
            return image.size, image.mode

    bad, sizes, modes = [], [], set()
    with _decoding_threads() as pool:
        for path, found in zip(chosen, pool.map(_or_reason(size_and_mode), chosen), strict=True):
            task.advance(1)
            if isinstance(found, str):
                bad.append((path, found))
            else:
                sizes.append(found[0])
                modes.add(found[1])
    sizes = sorted(sizes, key=min) or [(0, 0)]
    return Look(
        n_looked_at=len(chosen),
        was_decoded=decode,
        smallest=sizes[0],
        largest=sizes[-1],
        median_side=min(sizes[len(sizes) // 2]),
        is_gray=bool(modes) and modes <= GRAY,
        bad=tuple(bad),
    )
