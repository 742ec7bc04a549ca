"""A pass over image files: threads decode what comes next while the network computes."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from salcli.data.decoding import Shape, decode
from salcli.data.image_set import Source
from salcli.detector.prefetch import one_ahead
from salcli.detector.scorer import NOTHING
from salcli.progress import Silent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from salcli.artifacts.detector import ImageFormat
    from salcli.data.decoding import Block
    from salcli.detector.scorer import Scored, Scorer


@dataclass(frozen=True)
class Part:
    """Some files that follow each other, and what came of them."""

    files: tuple[Path, ...]
    scored: Scored  # of those that gave an image, in their order
    failed: dict[int, str] = field(default_factory=dict)  # place in `files` → why it gave none


def score_files(files: tuple[Path, ...], wanted: ImageFormat, scorer: Scorer) -> Iterator[Part]:
    """All files in their order. Decoded by the code of `prepare`, so the network sees what it would be trained on."""
    source, shape = Source(files, fit=wanted.fit), Shape(wanted.channels, wanted.size)
    with closing(one_ahead(decode(source, shape, Silent(), skip_bad=True))) as blocks:
        start = 0
        for block in blocks:
            stop = start + len(block.index) + len(block.bad)
            yield from _score_block(block, files, start, stop, scorer)
            start = stop


def _score_block(block: Block, files: tuple[Path, ...], start: int, stop: int, scorer: Scorer) -> Iterator[Part]:
    places = np.setdiff1d(np.arange(start, stop), block.index)  # of the bad files, which come in order
    reasons = {int(place): reason for place, (_, reason) in zip(places, block.bad, strict=True)}
    ends = [*(block.index[scorer.batch_size :: scorer.batch_size]), stop]  # a part ends where the next batch begins
    batches = scorer.batches(torch.from_numpy(block.images)) if len(block.index) else iter([NOTHING])
    for end, scored in zip(ends, batches, strict=True):
        failed = {place - start: reasons[place] for place in range(start, end) if place in reasons} if reasons else {}
        yield Part(files[start:end], scored, failed)
        start = end
