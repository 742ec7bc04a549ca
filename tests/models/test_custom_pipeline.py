"""Custom networks from `salcli init` to a detector: found, checked, stored, and refused with a reason."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import salcli
from helpers.custom_images import NETWORK, lay_out, options
from helpers.custom_networks import SHAPE, fresh_imports, write_networks

from salcli.models.network import NetworkSpec, OodClassifier
from salcli.params.schema import load_params
from salcli.pipeline.train_id import class_check
from salcli.store.files import Found
from salcli.store.formats import read_network, write_network


@pytest.fixture(autouse=True)
def _fresh_imports() -> Iterator[None]:
    with fresh_imports():
        yield


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with networks and photos."""
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    return write_networks(tmp_path)


def init(*arguments: str) -> str:
    result = salcli("init", "d", *options(Path("photos").resolve()), *arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def test_networks_that_share_weights_are_stored_and_read_again(code: Path) -> None:
    network = OodClassifier(NetworkSpec("odd_ones:tied", 2, (0.0,), (1.0,), head="4")).eval()
    write_network(code / "net.safetensors", network, {})
    images = torch.randint(0, 256, (3, *SHAPE), dtype=torch.uint8)
    again = read_network(Found(code / "net.safetensors"), OodClassifier)
    for one, other in zip(network(images), again(images), strict=True):
        assert torch.equal(one, other)


def test_another_order_of_classes_is_found() -> None:
    labels = torch.arange(3).repeat(20)
    right = class_check(labels, labels, ("a", "b", "c"))
    assert (right.accuracy, right.has_other_order, right.is_near_chance) == (1, False, False)
    turned = class_check((labels + 1) % 3, labels, ("a", "b", "c"))  # output 1 means a, 2 means b, 0 means c
    assert (turned.accuracy, turned.best_accuracy, turned.best_order) == (0, 1, ("c", "a", "b"))
    assert turned.has_other_order
    guess = class_check(torch.zeros(60, dtype=torch.int64), labels, ("a", "b", "c"))
    assert (guess.is_near_chance, guess.has_other_order) == (True, False)


BRIGHTNESS = """
import torch
from torch import nn
def trained():
    '''Tells left from right by hand-made weights; ORDER is what its outputs mean.'''
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 2), nn.ReLU(), nn.Linear(2, 2))
    with torch.no_grad():
        left = torch.zeros(8, 8); left[:, :4] = 1
        net[1].weight.copy_(torch.stack([left.flatten(), 1 - left.flatten()])); net[1].bias.zero_()
        net[3].weight.copy_(torch.eye(2)[ORDER]); net[3].bias.zero_()
    return net
"""


@pytest.mark.parametrize(("order", "right"), [("[0, 1]", "100.0%"), ("[1, 0]", "0.0%")])
def test_train_id_checks_a_given_network(code: Path, monkeypatch: pytest.MonkeyPatch, order: str, right: str) -> None:
    (code / "nets.py").write_text(BRIGHTNESS.replace("ORDER", order))
    init("--model", "nets:trained", "--set", "train_id.epochs=0")
    monkeypatch.chdir(code / "d")
    assert salcli("prepare").exit_code == 0
    done = salcli("train-id")
    assert done.exit_code == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert f"used as given, not trained; {right} of 8 calibration images right" in said
    warned = "another order than yours. Assumed: 0 a, 1 b; as 0 b, 1 a it would have 100.0% right" in said
    assert warned == (order == "[1, 0]")


def test_init_finds_head_code_and_whether_it_is_trained(code: Path) -> None:
    sys.path.remove(str(code))
    namespace: dict[str, Any] = {}
    exec(NETWORK, namespace)
    torch.save(namespace["Net"](num_classes=2).state_dict(), "net.pt")
    shown = init("--model", "nets:Net", "--weights", "net.pt", "--mean", "0.5", "--std", "1")
    assert "nets:Net, head out" in shown
    assert "guess" not in shown
    params, _ = load_params(Path("d", "params.yaml"))
    assert (params.model.backbone, params.model.head, params.model.code) == ("nets:Net", "out", str(code))
    assert (params.train_id.epochs, params.model.weights) == (0, str(code / "net.pt"))
    assert (params.model.mean, params.model.std) == ((0.5,), (1.0,))


def test_a_network_for_colour_gets_gray_images_in_colour(code: Path) -> None:
    assert "8 × 8, 3 channels" in init("--model", "odd_ones:Colour")
    assert load_params(Path("d", "params.yaml"))[0].data.channels == 3
