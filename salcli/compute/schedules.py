"""How a learning rate goes through a run, as a factor of its largest value."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from torch.optim.lr_scheduler import LambdaLR

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

DROPS = (0.6, 0.75, 0.9)  # of the run: where a stepwise schedule drops


def warm_up_then_cosine(optimiser: Optimizer, n_steps: int, warm_up_share: float, start: float) -> LambdaLR:
    """A cosine down to 0, whose first part is a straight line from `start` (a factor) to where the cosine then is."""
    return LambdaLR(optimiser, _by_share(partial(_warm_up_then_cosine, warm_up=warm_up_share, start=start), n_steps))


def drops(optimiser: Optimizer, n_steps: int, factor: float) -> LambdaLR:
    """The learning rate times `factor` at 60 %, 75 % and 90 % of the run."""
    return LambdaLR(optimiser, _by_share(partial(_drops, factor=factor), n_steps))


def _by_share(of_share: Callable[[float], float], n_steps: int) -> Callable[[int], float]:
    return lambda step: of_share(step / max(1, n_steps))


def _warm_up_then_cosine(done: float, warm_up: float, start: float) -> float:
    if done >= warm_up:
        return _cosine(done)
    return start + done / warm_up * (_cosine(warm_up) - start)


def _cosine(done: float) -> float:
    return (1 + math.cos(math.pi * done)) / 2


def _drops(done: float, factor: float) -> float:
    return factor ** sum(done >= place for place in DROPS)
