"""A pass over image files: threads decode what comes next while the network computes."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from salcli.data.decoding import Shape, decode
from salcli.data.image_set import Source
from salcli.detector.prefetch import one_ahead
from salcli.progress import Silent

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from numpy.typing import NDArray

    from salcli.artifacts.detector import ImageFormat
    from salcli.detector.scorer import Scored, Scorer

# enough for all threads, and few enough that even large photographs show progress
FEWEST_AT_ONCE = 64


@dataclass(frozen=True)
class Decoded:
    """Some files that follow each other, and what came of them."""

    files: tuple[Path, ...]
    images: NDArray[Any]  # b, C, H, W, of those that gave an image, in their order
    failed: dict[int, str]  # place in `files` → why it gave none


def decoded(files: tuple[Path, ...], wanted: ImageFormat, batch_size: int) -> Generator[Decoded]:
    """All files in their order. Read by the code of `prepare`, so the network sees what it would be trained on."""
    shape = Shape(wanted.channels, wanted.size)
    at_once = batch_size * max(1, FEWEST_AT_ONCE // batch_size)
    for first in range(0, len(files), at_once):
        some, start = files[first : first + at_once], 0
        for block in decode(Source(some, fit=wanted.fit), shape, Silent(), skip_bad=True):
            stop = start + len(block.index) + len(block.bad)
            places = np.setdiff1d(np.arange(start, stop), block.index) - start  # of the bad files, which come in order
            failed = {int(place): reason for place, (_, reason) in zip(places, block.bad, strict=True)}
            yield Decoded(some[start:stop], block.images, failed)
            start = stop


def scored(files: tuple[Path, ...], wanted: ImageFormat, scorer: Scorer) -> Generator[tuple[Decoded, Scored]]:
    """The same with what the network says of the images."""
    with closing(one_ahead(decoded(files, wanted, scorer.batch_size))) as parts:
        for part in parts:
            yield part, scorer(torch.from_numpy(part.images))
