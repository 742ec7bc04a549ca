"""Estimates of work and memory, counted again by hand."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import process

from salcli.errors import UnknownNameError
from salcli.params.presets import preset, presets, resolved
from salcli.params.reading import read_yaml
from salcli.project import estimate
from salcli.project.estimate import SetSize, estimated_gigabytes, estimated_images
from salcli.project.init import create


def params_of(name: str, **values: Any) -> dict[str, Any]:
    return resolved(preset(name), {key.replace("__", "."): value for key, value in values.items()})


@pytest.mark.parametrize("name", presets())
def test_every_preset_costs_something_and_three_seeds_three_times_as_much(name: str) -> None:
    assert estimated_gigabytes(params_of(name)) > 0
    once, thrice = (estimated_images(params_of(name, seeds=seeds)) for seeds in ([0], [0, 1, 2]))
    assert thrice == pytest.approx(3 * once, rel=1e-6)
    assert once > 0


def test_work_is_counted_as_by_hand() -> None:
    """near-cifar100: 22,500 training images; the wild set is limited by its 25,000 ID images; SAL and WOODS."""
    train_id, train_ood = 22_500 * 100, 2 * (2 * 22_500 * 100)
    passes = 22_500 + 2_500 + round(25_000 / 0.9) + 3 * (10_000 + 10_000)
    one = estimated_images(params_of("near-cifar100"))
    assert one == train_id + train_ood + passes
    two = estimated_images(params_of("near-cifar100", variants=["sal", "sal-2"]))
    assert two - one == 2 * 22_500 * 100 + 20_000, "one more training, and one pass over the test images"
    shares = [0.05, 0.1, 0.5]
    apart = [estimated_images(params_of("near-cifar100", data__pi=[pi])) for pi in shares]
    saved = sum(apart) - estimated_images(params_of("near-cifar100", data__pi=shares))
    assert saved == pytest.approx(2 * (22_500 * 100 + 25_000), abs=2), "the ID classifier is trained once"


def test_custom_sets_have_the_sizes_that_are_given() -> None:
    values = {"data.id": "mine", "data.ood": ["wild"], "data.pi": ["unknown"], "rivals": [], "seeds": [0]}
    shares = {"data.id_shares": {"train": 0.6, "calibration": 0.2, "wild": 0, "test": 0.2}}
    epochs = {"train_id.epochs": 2, "train_ood.epochs": 3}
    params = resolved(preset("default"), {**values, **shares, **epochs})
    work = estimate.estimated_work(params, {"mine": SetSize(100), "wild": SetSize(50)})
    assert work == (60 * 2 + 2 * 60 * 3, (60 + 20) + 50 + 2 * 20)


def test_memory_is_counted_as_by_hand_and_encoders_by_their_views() -> None:
    params = params_of("cifar10", data__ood=["svhn"])
    assert params["encoders"] == ["knn-plus", "csi"]
    for encoders, n_views in (([], 256), (params["encoders"], 1024)):  # 512 images in two views, or 128 in eight
        expected = 0.5 + 12 * 2.2e6 / 1e9 + 4 * 2.4e6 * n_views / 1e9
        assert estimated_gigabytes({**params, "encoders": encoders}) == pytest.approx(expected)
    more = estimated_images(params) - estimated_images({**params, "encoders": []})
    assert more == 5 * (22_500 * (500 * 2 + 100 + 700 * 8 + 100 * 4) + 2 * (10_000 + 26_032))


def test_unknown_sets_and_networks_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="no network of a preset is called mine"):
        estimated_gigabytes(params_of("toy", model__backbone="mine"))
    with pytest.raises(UnknownNameError, match="no data set is called mine"):
        estimated_images(params_of("toy", data__id="mine"))


def test_time_is_that_of_the_largest_batch_within_the_budget() -> None:
    sizes: list[int] = []

    def step(n: int) -> None:
        sizes.append(n)
        time.sleep(0.01 + 0.001 * n)

    assert estimate.seconds_each(step, 32) == pytest.approx(0.001 + 0.01 / 32, rel=0.3)
    assert sizes == [2, 2, 4, 8, 16, 32]
    sizes.clear()
    estimate.seconds_each(step, 10_000, budget=0.1)
    assert max(sizes) <= 64, "a large batch would take minutes"


def test_stages_are_counted_as_dvc_does(tmp_path: Path) -> None:
    create(tmp_path, preset("default"), {"seeds": [0, 1, 2], "data.test_ood": ["textures"], "rivals": ["oe"]})
    listed = process(sys.executable, "-m", "dvc", "stage", "list", "--name-only", cwd=tmp_path).stdout.split()
    assert estimate.n_processes(read_yaml(tmp_path / "params.yaml")) == len(listed)


def test_times_are_for_people() -> None:
    shown = [estimate.shown_time(seconds) for seconds in (1, 38, 56, 170, 5300, 9000, 1e6)]
    assert ", ".join(shown).replace("about ", "") == "5 s, 40 s, 1 min, 3 min, 88 min, 2.5 h, 278 h"
