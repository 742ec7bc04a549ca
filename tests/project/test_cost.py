"""Estimates of work, counted again by hand."""

import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import process

from salcli.params.presets import preset, resolved
from salcli.params.reading import read_yaml
from salcli.project import cost
from salcli.project.cost import estimated_images
from salcli.project.init import create


def params_of(name: str, **values: Any) -> dict[str, Any]:
    return resolved(preset(name), {key.replace("__", "."): value for key, value in values.items()})


def test_work_is_counted_as_by_hand() -> None:
    """near-cifar100: 22,500 training images; the wild set is limited by its 25,000 ID images; SAL and WOODS."""
    train_id, train_ood = 22_500 * 100, 2 * (2 * 22_500 * 100)
    passes = 22_500 + 2_500 + round(25_000 / 0.9) + 3 * (10_000 + 10_000)
    one = estimated_images(params_of("near-cifar100", variants=["sal"]))
    assert one == train_id + train_ood + passes
    two = estimated_images(params_of("near-cifar100", variants=["sal", "sal-2"]))
    assert two - one == 2 * 22_500 * 100 + 20_000, "one more training, and one pass over the test images"
    shares = [0.05, 0.1, 0.5]
    apart = [estimated_images(params_of("near-cifar100", data__pi=[pi])) for pi in shares]
    saved = sum(apart) - estimated_images(params_of("near-cifar100", data__pi=shares))
    assert saved == pytest.approx(2 * (22_500 * 100 + 25_000), abs=2), "the ID classifier is trained once"


def test_stages_are_counted_as_dvc_does(tmp_path: Path) -> None:
    create(tmp_path, preset("default"), {"seeds": [0, 1, 2], "data.test_ood": ["textures"], "rivals": ["oe"]})
    listed = process(sys.executable, "-m", "dvc", "stage", "list", "--name-only", cwd=tmp_path).stdout.split()
    assert cost.n_processes(read_yaml(tmp_path / "params.yaml")) == len(listed)
