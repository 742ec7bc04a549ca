"""Which of several processes this one is, as torchrun tells it through the environment. Knows nothing of torch."""

from __future__ import annotations

import os


def world_size() -> int:
    """How many processes work together; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The number of this process among all of them."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """The number of this process on its machine: which GPU is its own."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def was_started_by_torchrun() -> bool:
    """Whether somebody has started this process as one of a group, be it of one."""
    return "WORLD_SIZE" in os.environ and "LOCAL_RANK" in os.environ


def is_main() -> bool:
    """Whether this process is the one that prints and writes."""
    return rank() == 0
