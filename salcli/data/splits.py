"""Splits: disjoint parts of the ID and OOD data, and the wild mixture. Index arrays only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from salcli.errors import SalError
from salcli.sal.seeding import generator

Index = NDArray[np.int64]


@dataclass(frozen=True)
class IdSplit:
    """Four disjoint parts of the ID data, each an index into it."""

    train: Index
    calibration: Index
    wild: Index
    test: Index


ALL_PARTS = [field.name for field in fields(IdSplit)]
OFFICIAL = "official"
# A wild set: indices that count through the ID data, then through the OOD data; and which are OOD, if that is known
Wild = tuple[Index, NDArray[np.bool_] | None]


def split_id(
    labels: Index,
    shares: Mapping[str, float | str],
    seed: int,
    is_test: NDArray[np.bool_] | None = None,
    class_names: Sequence[str] = (),
) -> IdSplit:
    """Split the samples of every class into four parts, by the given shares. A part with a share of 0 stays empty.

    Where the test share is `official`, the published test samples are the test part, and the rest is
    split into the other three parts. With a number, it does not matter what a sample was published for.
    """
    if shares["test"] != OFFICIAL:
        names, test, pool = ALL_PARTS, [], np.arange(len(labels))
    elif is_test is None or not is_test.any() or is_test.all():
        raise SalError(
            "the ID set has no official split into training and test samples; "
            "give data.id_shares.test a number, such as 0.2, and let all four shares add up to 1"
        )
    else:
        names, test, pool = ALL_PARTS[:-1], [np.flatnonzero(is_test)], np.flatnonzero(~is_test)
    parts = _split_classes(labels, pool, {name: float(shares[name]) for name in names}, seed, class_names)
    return IdSplit(*parts, *test)


def _split_classes(
    labels: Index, pool: Index, shares: Mapping[str, float], seed: int, class_names: Sequence[str]
) -> list[Index]:
    """Split the samples `pool`, class by class, into parts of the given shares."""
    rng = generator(seed, "split-id")
    cuts = np.cumsum(list(shares.values()))[:-1]
    parts: list[list[Index]] = [[] for _ in shares]
    for k in np.unique(labels):
        own = rng.permutation(pool[labels[pool] == k])
        for part, members in zip(parts, np.split(own, np.rint(cuts * len(own)).astype(int)), strict=True):
            part.append(members)
        empty = [name for name, part in zip(shares, parts, strict=True) if len(part[-1]) == 0 and shares[name] > 0]
        if empty:
            name = class_names[k] if class_names else k
            raise SalError(
                f"class {name} has {len(own)} samples, too few to give some to {', '.join(empty)}; "
                "raise its share in data.id_shares or add samples"
            )
    return [np.sort(np.concatenate(part)) for part in parts]


def split_ood(n: int, is_test: NDArray[np.bool_] | None, wild_share: float, seed: int) -> tuple[Index, Index]:
    """For the wild set and for the test: by what the set itself keeps for tests, else at random."""
    if is_test is not None and (is_test.all() or not is_test.any()):
        raise SalError(
            f"of {n} OOD samples, {'all' if is_test.all() else 'none'} are for testing; "
            "give some to each side, or leave the official split out"
        )
    if is_test is not None:
        return np.flatnonzero(~is_test), np.flatnonzero(is_test)
    order = generator(seed, "split-ood").permutation(n)
    n_wild = round(wild_share * n)
    if not 0 < n_wild < n:
        raise SalError(f"{n} OOD samples cannot be split into wild and test with data.ood_wild_share {wild_share:g}")
    return np.sort(order[:n_wild]), np.sort(order[n_wild:])


def mix_wild(id_pool: Index, ood_pool: Index, n_id: int, pi: float, seed: int) -> Wild:
    """The largest wild set with a share π of OOD that both pools can fill, without replacement.

    id_pool indexes the ID data, which has n_id samples; ood_pool indexes the OOD data.
    """
    low, high = 1 / (len(id_pool) + 1), len(ood_pool) / (len(ood_pool) + 1)  # one sample of either kind
    if not (low <= pi <= high or pi == 1):
        raise SalError(
            f"data.pi {pi:g}: {len(id_pool)} ID and {len(ood_pool)} OOD samples cannot be mixed in that ratio; "
            f"choose a value from {np.ceil(low * 1e4) / 1e4:g} to {np.floor(high * 1e4) / 1e4:g}, or 1"
        )
    n_wild = largest_mixture(len(id_pool), len(ood_pool), pi)
    n_ood = round_half_up(pi * n_wild)
    rng = generator(seed, "mix-wild")
    chosen_id = rng.permutation(id_pool)[: n_wild - n_ood]
    chosen_ood = rng.permutation(ood_pool)[:n_ood]
    source = np.concatenate([chosen_id, n_id + chosen_ood])
    is_ood = np.arange(n_wild) >= len(chosen_id)
    order = rng.permutation(n_wild)
    return source[order], is_ood[order]


def recycle_wild(id_pool: Index, ood_pool: Index, n_id: int, pi: float, seed: int) -> Wild:
    """The wild set of the authors' code: every OOD sample once, and for each of them (1 − π) / π draws of ID samples.

    ID samples are drawn pass after pass through the shuffled pool, so they recur where the OOD pool is large. At π = 1
    there is still one ID sample to 120 OOD samples, as in their batches.
    """
    n_draws = round_half_up(len(ood_pool) * ((1 - pi) / pi if pi < 1 else 1 / 120))
    rng = generator(seed, "mix-wild")
    passes = [rng.permutation(id_pool) for _ in range(-(-n_draws // len(id_pool)))]
    source = np.concatenate([*passes, id_pool[:0]])[:n_draws]
    source = np.concatenate([source, n_id + ood_pool])
    order = rng.permutation(len(source))
    return source[order], order >= n_draws


def wild_as_it_is(pool: Index, n_id: int) -> Wild:
    """Wild data that come as they are, in their own order: nothing is mixed in, and the truth is not known."""
    if len(pool) == 0:
        raise SalError("all wild samples are ID samples, too, so there is nothing to find; add other wild samples")
    return n_id + pool, None


def hold_out(n: int, share: float, seed: int, equal: Index) -> NDArray[np.bool_]:
    """Which of n wild samples are held out: a random share.

    Samples with the same number in `equal` are copies of each other, and go together.
    """
    order = generator(seed, "wild-holdout").permutation(int(equal.max()) + 1)
    n_up_to = np.cumsum(np.bincount(equal)[order])
    is_held = np.isin(equal, order[: np.searchsorted(n_up_to, share * n - 0.5) + 1])
    if share * n < 0.5 or is_held.all():
        samples = f"{n:,} wild samples" + (f" ({len(order):,} different ones)" if len(order) < n else "")
        raise SalError(
            f"data.wild_holdout {share:g} of {samples} is {'none' if share * n < 0.5 else 'all'} of them; "
            "choose another share, or 0 to hold out nothing"
        )
    return is_held


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
