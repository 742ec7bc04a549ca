"""Who goes where: disjoint parts of the ID and OOD data, and the wild mixture. Index arrays only."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from salcli.errors import DataError
from salcli.seeding import generator

if TYPE_CHECKING:
    from collections.abc import Mapping

Index = NDArray[np.int64]


@dataclass(frozen=True)
class IdSplit:
    """Four disjoint parts of the ID data, each an index into it."""

    train: Index
    calibration: Index
    wild: Index
    test: Index


@dataclass(frozen=True)
class OodSplit:
    """Two disjoint parts of the OOD data."""

    wild: Index
    test: Index


@dataclass(frozen=True)
class WildMixture:
    """The wild set in random order. `source` counts through the ID data, then through the OOD data."""

    source: Index
    is_ood: NDArray[np.bool_]


def split_id(labels: Index, shares: Mapping[str, float], seed: int) -> IdSplit:
    """Deal the samples of every class to the four parts, in the given shares."""
    names = [field.name for field in fields(IdSplit)]
    rng = generator(seed, "split-id")
    cuts = np.cumsum([shares[name] for name in names])[:-1]
    dealt: list[list[Index]] = [[] for _ in names]
    for k in np.unique(labels):
        own = rng.permutation(np.flatnonzero(labels == k))
        for part, members in zip(dealt, np.split(own, np.rint(cuts * len(own)).astype(int)), strict=True):
            part.append(members)
        empty = [name for name, part in zip(names, dealt, strict=True) if len(part[-1]) == 0]
        if empty:
            raise DataError(
                f"class {k} has {len(own)} images, too few to give some to {', '.join(empty)}; "
                "raise its share in data.id_shares or add images"
            )
    return IdSplit(*(np.sort(np.concatenate(part)) for part in dealt))


def split_ood(n: int, region: NDArray[np.bool_] | None, wild_share: float, seed: int) -> OodSplit:
    """By the set's own regions where it has them, else at random."""
    if region is not None:
        return OodSplit(np.flatnonzero(region), np.flatnonzero(~region))
    order = generator(seed, "split-ood").permutation(n)
    n_wild = round(wild_share * n)
    if not 0 < n_wild < n:
        raise DataError(f"{n} OOD images cannot be dealt to wild and test with data.ood_wild_share {wild_share:g}")
    return OodSplit(np.sort(order[:n_wild]), np.sort(order[n_wild:]))


def mix_wild(id_pool: Index, ood_pool: Index, n_id: int, pi: float, seed: int) -> WildMixture:
    """The largest wild set with a share π of OOD that both pools can fill, without replacement.

    id_pool indexes the ID data, which has n_id samples; ood_pool indexes the OOD data.
    """
    n_wild = largest_mixture(len(id_pool), len(ood_pool), pi)
    n_ood = round_half_up(pi * n_wild)
    if n_ood == 0 or (n_ood == n_wild and pi < 1):
        low, high = 1 / (len(id_pool) + 1), len(ood_pool) / (len(ood_pool) + 1)
        raise DataError(
            f"data.pi {pi:g}: {len(id_pool)} ID and {len(ood_pool)} OOD images cannot be mixed in that ratio; "
            f"choose a value from {low:.4f} to {high:.4f}, or 1"
        )
    rng = generator(seed, "mix-wild")
    chosen_id = rng.permutation(id_pool)[: n_wild - n_ood]
    chosen_ood = rng.permutation(ood_pool)[:n_ood]
    source = np.concatenate([chosen_id, n_id + chosen_ood])
    is_ood = np.arange(n_wild) >= len(chosen_id)
    order = rng.permutation(n_wild)
    return WildMixture(source[order], is_ood[order])


def largest_mixture(n_id: int, n_ood: int, pi: float) -> int:
    """The largest size whose OOD part, π of it to the nearest sample, and ID part both fit their pools."""

    def fits(size: int) -> bool:
        n_out = round_half_up(pi * size)
        return n_out <= n_ood and size - n_out <= n_id

    low, high = 0, n_id + n_ood
    while low < high:  # both parts only grow with the size
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def round_half_up(value: float) -> int:
    """Python rounds halves to even, which would make the OOD part jump back and forth."""
    return int(np.floor(value + 0.5))
