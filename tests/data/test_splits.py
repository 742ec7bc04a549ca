"""Split discipline: every part is disjoint from every other, and no sample is used twice."""

import hashlib
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from salcli.data.catalogue import load_source
from salcli.data.splits import (
    largest_mixture,
    mix_wild,
    recycle_wild,
    round_half_up,
    split_id,
    split_ood,
    wild_as_it_is,
)
from salcli.errors import SalError

PINNED: dict[str, Any] = {
    "images": ["da69e58d195cc7af", "979e21161cd4c802", "5bcf96981f52f159"],
    "labels": "8ec70f5e2b70b029",
    "splits": {0: ("68b01fc1d5009af6", "0eead3c54937846a"), 1: ("7f4fb1e72b867c3d", "9ca2bcec0e6b9349")},
    "patches": "e3b09d8b17d70a03",
}
SHARES: dict[str, float | str] = {"train": 0.32, "calibration": 0.08, "wild": 0.4, "test": 0.2}
OFFICIAL_SHARES: dict[str, float | str] = {"train": 0.4, "calibration": 0.1, "wild": 0.5, "test": "official"}


@given(
    shares=st.sampled_from([SHARES, OFFICIAL_SHARES]),
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(20, 60), min_size=2, max_size=5),
    data=st.data(),
)
def test_the_id_parts_are_disjoint_complete_and_stratified(
    shares: dict[str, float | str], seed: int, sizes: list[int], data: st.DataObject
) -> None:
    """With an official test set, the rest is dealt class by class."""
    order = np.random.default_rng(seed)
    labels, is_test = order.permutation(np.repeat(np.arange(len(sizes)), sizes)), None
    n_test = [data.draw(st.integers(0 if k else 1, 9)) for k in range(len(sizes))]
    if shares is OFFICIAL_SHARES:
        is_test = np.zeros(len(labels), bool)
        for k, n in enumerate(n_test):
            is_test[order.permutation(np.flatnonzero(labels == k))[:n]] = True
    parts = asdict(split_id(labels, shares, seed, is_test))
    for one, other in combinations(parts.values(), 2):
        assert not set(one) & set(other)
    assert sorted(np.concatenate(list(parts.values()))) == list(range(len(labels)))
    if is_test is not None:
        np.testing.assert_array_equal(parts["test"], np.flatnonzero(is_test))
    for name, share in shares.items():
        for k, size in enumerate(sizes):
            if share != "official":
                n_dealt = size - n_test[k] if is_test is not None else size
                assert abs((labels[parts[name]] == k).sum() - float(share) * n_dealt) <= 1


@pytest.mark.parametrize("is_test", [None, np.zeros(40, bool), np.ones(40, bool)])
def test_an_official_test_set_that_is_not_there_is_refused_with_the_cure(is_test: np.ndarray | None) -> None:
    with pytest.raises(SalError, match=r"no official split .* give data.id_shares.test a number, such as 0.2"):
        split_id(np.arange(40) % 2, OFFICIAL_SHARES, 0, is_test)


@given(st.lists(st.booleans(), min_size=2, max_size=50), st.floats(0.2, 0.8), st.integers(0, 1000))
def test_ood_sets_are_split_by_their_part_for_tests_or_else_at_random(
    marks: list[bool], share: float, seed: int
) -> None:
    if 0 < round(share * len(marks)) < len(marks):
        assert sorted(np.concatenate(split_ood(len(marks), None, share, seed))) == list(range(len(marks)))
    if len(set(marks)) == 1:
        with pytest.raises(
            SalError, match=f"of {len(marks)} OOD samples, {'all' if marks[0] else 'none'} are for test"
        ):
            split_ood(len(marks), np.array(marks), 0.5, 0)
        return
    wild, test = split_ood(len(marks), np.array(marks), 0.5, 0)
    assert [i in test for i in range(len(marks))] == marks
    assert [i in wild for i in range(len(marks))] == [not mark for mark in marks]


def test_a_class_too_small_for_a_part_is_named() -> None:
    labels = np.array([0] * 50 + [1] * 2)
    with pytest.raises(SalError, match="class cats & co has 2 samples, too few to give some to calibration"):
        split_id(labels, SHARES, 0, class_names=("a", "cats & co"))


@given(n_id=st.integers(1, 200), n_ood=st.integers(1, 200), pi=st.floats(0.01, 1.0))
def test_the_mixture_is_the_largest_that_both_pools_can_fill(n_id: int, n_ood: int, pi: float) -> None:
    """The slow truth: try every size."""

    def fits(size: int) -> bool:
        return round_half_up(pi * size) <= n_ood and size - round_half_up(pi * size) <= n_id

    assert largest_mixture(n_id, n_ood, pi) == max(size for size in range(n_id + n_ood + 1) if fits(size))


@given(seed=st.integers(0, 1000), pi=st.floats(0.05, 0.95) | st.just(1.0))
def test_the_wild_set_takes_each_sample_once_and_has_the_asked_for_share(seed: int, pi: float) -> None:
    id_pool, ood_pool = np.arange(100, 300), np.arange(50, 120)
    source, is_ood = mix_wild(id_pool, ood_pool, n_id=1000, pi=pi, seed=seed)
    assert is_ood is not None
    assert len(set(source)) == len(source)
    assert set(source[~is_ood]) <= set(id_pool)
    assert set(source[is_ood] - 1000) <= set(ood_pool)
    assert abs(is_ood.sum() - pi * len(source)) <= 0.5
    with pytest.raises(SalError, match=r"data.pi 0.001: 200 ID and 70 OOD samples .* from 0.005 to 0.9859"):
        mix_wild(id_pool, ood_pool, n_id=1000, pi=0.001, seed=seed)
    ranks = np.flatnonzero(is_ood) / len(source)  # the order says nothing
    assert abs(ranks.mean() - 0.5) < 5 / np.sqrt(12 * len(ranks)) + 1e-9


def test_recycled_wild_data_have_every_ood_sample_once_and_id_samples_in_even_passes() -> None:
    """As in the authors' code: Textures has 3,948 wild images there, and about 35,500 draws of 25,000 ID images."""
    id_pool, ood_pool = np.arange(100, 140), np.arange(50, 120)
    for pi, n_draws in ((0.1, 630), (0.9, 8), (1.0, 1)):
        source, is_ood = recycle_wild(id_pool, ood_pool, n_id=1000, pi=pi, seed=0)
        assert is_ood is not None
        assert sorted(source[is_ood] - 1000) == list(ood_pool)
        drawn = np.bincount(source[~is_ood] - 100, minlength=len(id_pool))
        assert drawn.sum() == n_draws
        assert drawn.max() - drawn.min() <= 1
    assert source.tolist() != sorted(source)


def test_wild_data_as_it_is_keeps_its_order_and_nobody_knows_the_truth() -> None:
    source, is_ood = wild_as_it_is(np.array([4, 2, 7]), n_id=100)
    assert (source.tolist(), is_ood) == ([104, 102, 107], None)
    with pytest.raises(SalError, match="all wild samples are ID samples, too"):
        wild_as_it_is(np.array([], dtype=np.int64), n_id=100)


def digest(*arrays: np.ndarray) -> str:
    content = b"".join(f"{array.dtype}, {array.shape}".encode() + array.tobytes() for array in arrays)
    return hashlib.sha256(content).hexdigest()[:16]


def test_the_sets_and_splits_that_stored_results_rest_on_are_still_the_same(tmp_path: Path) -> None:
    """dvc.lock and the README's table were made with them."""
    sets = {name: load_source(name, tmp_path) for name in ("digits-0-7", "digits-8-9", "photo-patches")}
    labels = sets["digits-0-7"].labels
    assert labels is not None
    assert [digest(np.asarray(source.array)) for source in sets.values()] == PINNED["images"]
    assert digest(labels) == PINNED["labels"]
    for seed, (id_digest, ood_digest) in PINNED["splits"].items():
        assert digest(*asdict(split_id(labels, SHARES, seed)).values()) == id_digest
        assert digest(*split_ood(354, None, 0.7, seed)) == ood_digest
    patches = split_ood(2000, sets["photo-patches"].is_test, 0.7, 0)
    assert digest(*patches) == PINNED["patches"]
