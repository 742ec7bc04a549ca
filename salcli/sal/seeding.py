"""Random generators: one independent stream for each purpose, so that no step disturbs another."""

from __future__ import annotations

import hashlib

import numpy as np


def derived_seed(seed: int, purpose: str) -> int:
    """A 63-bit seed that depends on the run's seed and on what it is for."""
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(seed: int, purpose: str) -> np.random.Generator:
    """A numpy generator for one purpose."""
    return np.random.default_rng(derived_seed(seed, purpose))
