"""Custom networks through the pipeline and the command line."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.custom_networks import NETWORK, SHAPE, fresh_imports, write_networks
from own_images import lay_out, options
from test_cli import salcli
from test_own_init import denied, init, said
from torch import nn

from salcli.artifacts.checkpoint import read_network, write_network
from salcli.artifacts.detector import ImageFormat, StoredDetector, read_detector, write_detector
from salcli.artifacts.layout import Found
from salcli.errors import ModelError
from salcli.models.network import NetworkSpec, OodClassifier
from salcli.params import load_params
from salcli.stages.class_check import class_check


@pytest.fixture(autouse=True)
def _fresh_imports() -> Iterator[None]:
    with fresh_imports():
        yield


@pytest.fixture
def code(tmp_path: Path) -> Path:
    return write_networks(tmp_path)


def spec(name: str, head: str, n_classes: int = 3) -> NetworkSpec:
    return NetworkSpec(name, n_classes, (0.0,), (1.0,), head=head)


def test_networks_that_share_weights_are_stored_and_read_again(code: Path) -> None:
    network = OodClassifier(spec("odd_ones:tied", "4", n_classes=2)).eval()
    write_network(code / "net.safetensors", network, {})
    again = read_network(Found(code / "net.safetensors"), OodClassifier)
    images = torch.randint(0, 256, (3, *SHAPE), dtype=torch.uint8)
    for one, other in zip(network(images), again(images), strict=True):
        assert torch.equal(one, other)
    scores = np.linspace(0, 1, 5, dtype=np.float32)
    stored = StoredDetector(network, ImageFormat(SHAPE[0], SHAPE[1]), ("a", "b"), scores, {})
    write_detector(code / "detector.safetensors", stored)
    found = Found(code / "detector.safetensors")
    for one, other in zip(network(images), read_detector(found, allow_import=True).network(images), strict=True):
        assert torch.equal(one, other)
    (code / "odd_ones.py").write_text("import nowhere_to_be_found")
    del sys.modules["odd_ones"]
    with pytest.raises(ModelError, match=r"cannot be imported: ModuleNotFoundError: .* \(odd_ones.py, line 1\)"):
        read_network(Found(code / "net.safetensors"), OodClassifier)
    with pytest.raises(ModelError, match="cannot be imported"):
        read_detector(found, allow_import=True)


# --- its classes


def test_another_order_of_classes_is_found() -> None:
    labels = torch.arange(3).repeat(20)
    right = class_check(labels, labels, ("a", "b", "c"))
    assert (right.accuracy, right.has_other_order, right.is_near_chance) == (1, False, False)
    turned = class_check((labels + 1) % 3, labels, ("a", "b", "c"))  # output 1 means a, 2 means b, 0 means c
    assert (turned.accuracy, turned.best_accuracy, turned.best_order) == (0, 1, ("c", "a", "b"))
    assert turned.has_other_order
    guess = class_check(torch.zeros(60, dtype=torch.int64), labels, ("a", "b", "c"))
    assert guess.is_near_chance
    assert not guess.has_other_order


def brightness_network(order: tuple[int, int]) -> str:
    """Tells left from right by hand-made weights; `order` is what its outputs mean."""
    return (
        NETWORK
        + f"""
def trained():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 2), nn.ReLU(), nn.Linear(2, 2))
    with torch.no_grad():
        left = torch.zeros(8, 8); left[:, :4] = 1
        net[1].weight.copy_(torch.stack([left.flatten(), 1 - left.flatten()])); net[1].bias.zero_()
        net[3].weight.copy_(torch.eye(2)[{list(order)}]); net[3].bias.zero_()
    return net
"""
    )


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_train_id_checks_a_given_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[int, int]
) -> None:
    photos = lay_out(tmp_path)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "nets.py").write_text(brightness_network(order))
    init(tmp_path / "d", *options(photos), "--model", "nets:trained", "--set", "train_id.epochs=0")
    monkeypatch.chdir(tmp_path / "d")
    assert salcli("prepare").exit_code == 0
    done = salcli("train-id")
    assert done.exit_code == 0, done.stderr
    right = "100.0%" if order == (0, 1) else "0.0%"
    assert f"used as given, not trained; {right} of 8 calibration images right" in said(done.stdout)
    warned = "another order than yours. Assumed: 0 a, 1 b; as 0 b, 1 a it would have 100.0% right" in said(done.stdout)
    assert warned == (order == (1, 0))


# --- through the command line


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return lay_out(tmp_path)


def test_init_finds_head_code_and_whether_it_is_trained(
    photos: Path, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(code)
    sys.path.remove(str(code))
    from_nets: dict[str, type[nn.Module]] = {}
    exec(NETWORK, from_nets)
    torch.save(from_nets["Net"](num_classes=2).state_dict(), code / "net.pt")
    shown = init(
        Path("d"), *options(photos), "--model", "nets:Net", "--weights", "net.pt", "--mean", "0.5", "--std", "1"
    )
    assert "nets:Net, head out" in shown
    assert "0 epochs: as it is" in shown
    assert "guess" not in shown
    params, _ = load_params(Path("d", "params.yaml"))
    assert (params.model.backbone, params.model.head, params.model.code) == ("nets:Net", "out", str(code))
    assert (params.train_id.epochs, params.train_id.weights) == (0, str(code / "net.pt"))
    assert (params.model.mean, params.model.std) == ((0.5,), (1.0,))


def test_a_network_for_colour_gets_gray_images_in_colour(photos: Path, code: Path, tmp_path: Path) -> None:
    assert "8 × 8, 3 channels" in init(tmp_path / "d", *options(photos), "--model", "odd_ones:Colour")
    assert load_params(tmp_path / "d" / "params.yaml")[0].data.channels == 3


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "absent:Net"], "absent:Net cannot be imported: ModuleNotFoundError: No module named 'absent'"),
        (["--model", "odd_ones:broken"], "odd_ones:broken() fails: OSError: no such luck"),
        (["--model", "odd_ones:Convolutional"], "odd_ones:Convolutional has no linear head"),
        (["--model", "odd_ones:Twins"], "name it with --head or in model.head; its linear layers are: other (64 → 3)"),
        (["--model", "odd_ones:Twins", "--head", "x"], "x is not in odd_ones:Twins"),
        (["--model", "nets:Net", "--weights", "absent.pt"], "absent.pt does not exist"),
        (["--model", "nets:Net", "--weights", "odd.pt"], "odd.pt does not hold the weights of nets:Net with 2 classes"),
        (["--model", "nets:Net", "--weights", "five.pt"], "five.pt is for 5 classes (out.weight is (5, 16)), the ID"),
        (["--model", "nets:Net", "--weights", "odd_ones.py"], "odd_ones.py is damaged or not a file of torch.save"),
        (["--model", "resnt18"], "no backbone is called resnt18 (did you mean resnet18?)"),
        (["--model", "resnet18", "--head", "fc"], "--head is for networks of your own"),
        (["--model", "nets:Net", "--mean", "0.1,0.2"], "--mean has 2 values, the images have 1 channels"),
        (["--model", "nets:Net", "--mean", "128"], "--mean 128: pixels go from 0 to 1 (did you mean 0.502?)"),
        (["--model", "odd_ones:five", "--set", "train_id.epochs=0"], "is for 5 classes, the data have 2, so it cannot"),
    ],
)
def test_networks_that_do_not_fit_are_refused(
    photos: Path, code: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], reason: str
) -> None:
    monkeypatch.chdir(code)
    torch.save({"a": torch.zeros(3)}, "odd.pt")
    from_nets: dict[str, type[nn.Module]] = {}
    exec(NETWORK, from_nets)
    torch.save(from_nets["Net"](num_classes=5).state_dict(), "five.pt")
    assert reason in denied(Path("d"), *options(photos), *arguments)


def test_weights_never_run_code(photos: Path, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from preparing import Malicious

    monkeypatch.chdir(code)
    torch.save(Malicious(code / "trace"), "bomb.pt")
    message = denied(Path("d"), *options(photos), "--model", "nets:Net", "--weights", "bomb.pt")
    assert "salcli runs no code from files" in message
    assert not (code / "trace").exists()
