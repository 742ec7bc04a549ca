"""Networks of the user's own: imported, hooked, loaded, and checked."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from own_images import NETWORK, lay_out, options
from test_cli import salcli
from test_own_init import denied, init, said
from torch import nn

from salcli.artifacts.checkpoint import read_network, write_network
from salcli.artifacts.detector import ImageFormat, StoredDetector, read_detector, write_detector
from salcli.artifacts.layout import Found
from salcli.errors import ModelError
from salcli.models.head_search import head_of
from salcli.models.network import Classifier, NetworkSpec, OodClassifier
from salcli.models.own_code import code_fingerprint, folder_of, make_importable
from salcli.models.weights import load_weights
from salcli.params import load_params
from salcli.stages.class_check import class_check

SHAPE = (1, 8, 8)
ODD_ONES = """
import torch
from torch import nn

class Softmaxed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.last = nn.Linear(64, 5), nn.Linear(5, 3, bias=False)
    def forward(self, x):
        return {"logits": self.last(self.body(x.flatten(1)).relu()).log_softmax(1)}

class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(64, 3), nn.Linear(64, 3)
    def forward(self, x):
        return self.one(x.flatten(1)) + self.other(x.flatten(1))

class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 8)
    def forward(self, x):
        return self.conv(x).flatten(1)

class PerPixel(nn.Module):
    def __init__(self):
        super().__init__()
        self.point = nn.Linear(8, 3)
    def forward(self, x):
        return self.point(x).mean((1, 2))

class Colour(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.fc = nn.Linear(3 * 64, num_classes)
    def forward(self, x):
        return self.fc(x.flatten(1))

def tied():
    first = nn.Linear(64, 64)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), first, nn.Linear(64, 2))

def broken():
    raise OSError("no such luck")

def five():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))

def nothing():
    return 3

def lazy():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(3))

ready = tied()
number = 3
"""


@pytest.fixture(autouse=True)
def fresh_imports() -> Iterator[None]:
    """What a test makes importable is forgotten after it."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.split(".")[0] in ("nets", "odd_ones", "mypkg"):
            del sys.modules[name]


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(NETWORK)
    (tmp_path / "odd_ones.py").write_text(ODD_ONES)
    make_importable(tmp_path)
    return tmp_path


def spec(name: str, head: str, n_classes: int = 3) -> NetworkSpec:
    return NetworkSpec(name, n_classes, (0.0,), (1.0,), head=head)


# --- the head


def test_features_and_logits_are_those_of_the_network_itself(code: Path) -> None:
    head = head_of("nets:Net", None, 3, SHAPE)
    assert head == "out"
    network = Classifier(spec("nets:Net", head)).eval()
    theirs = sys.modules["nets"].Net(3).eval()
    path = code / "net.pt"
    torch.save(theirs.state_dict(), path)
    assert load_weights(network, path).head_was_loaded
    seen: list[torch.Tensor] = []
    theirs.out.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    images = torch.randint(0, 256, (5, *SHAPE), dtype=torch.uint8)
    expected = theirs(images / 255)
    features, logits = network.features_and_logits(images)
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(features, seen[0])


def test_what_comes_after_the_head_does_not_matter(code: Path) -> None:
    assert head_of("odd_ones:Softmaxed", None, 3, SHAPE) == "last"
    network = Classifier(spec("odd_ones:Softmaxed", "last")).eval()
    theirs = sys.modules["odd_ones"].Softmaxed()
    torch.save({"model": theirs.state_dict()}, code / "net.pt")
    load_weights(network, code / "net.pt")
    images = torch.randint(0, 256, (5, *SHAPE), dtype=torch.uint8)
    torch.testing.assert_close(network(images).log_softmax(1), theirs(images / 255)["logits"])
    assert network.head.bias.tolist() == [0, 0, 0]  # theirs has none


@pytest.mark.parametrize(
    ("name", "head", "reason"),
    [
        ("odd_ones:Twins", None, "several layers could be its head, the last linear layer; name it with --head"),
        ("odd_ones:Twins", None, "its linear layers are: other (64 → 3), one (64 → 3)"),
        ("odd_ones:Convolutional", None, "has no linear head: it has no nn.Linear at all"),
        ("odd_ones:PerPixel", None, "no layer is surely its head"),
        ("odd_ones:PerPixel", "point", "point of odd_ones:PerPixel gets (2, 1, 8, 8) for 2 images, not one vector"),
        ("odd_ones:Twins", "three", "three is not in odd_ones:Twins; its linear layers are"),
        ("odd_ones:Convolutional", "conv", "conv is no linear layer of odd_ones:Convolutional"),
        ("odd_ones:Colour", None, "cannot take images of 1 × 8 × 8 (channels, height, width): RuntimeError: "),
        ("odd_ones:broken", None, "odd_ones:broken() fails: OSError: no such luck (odd_ones.py, line "),
        ("odd_ones:nothing", None, "odd_ones:nothing returns a int, not a torch.nn.Module"),
        ("odd_ones:lazy", None, "has lazy layers"),
        ("odd_ones:ready", None, "odd_ones:ready is a network, not what makes one"),
        ("odd_ones:number", None, "odd_ones:number is a int; name a class"),
        ("odd_ones:absent", None, "odd_ones has no absent; it has torch, nn, Softmaxed"),
        ("absent_module:Net", None, "cannot be imported: ModuleNotFoundError: No module named 'absent_module'; start "),
        ("odd_ones.deeper:Net", None, "No module named 'odd_ones.deeper'"),
    ],
)
def test_a_network_that_cannot_be_used_says_why(code: Path, name: str, head: str | None, reason: str) -> None:
    with pytest.raises(ModelError) as caught:
        head_of(name, head, 3, SHAPE)
    assert reason in str(caught.value)


def test_a_named_head_is_taken(code: Path) -> None:
    assert head_of("odd_ones:Twins", "one", 3, SHAPE) == "one"
    network = Classifier(spec("odd_ones:Twins", "one"))
    assert network.features(torch.zeros(2, *SHAPE)).shape == (2, 64)


def test_a_network_that_brings_its_weights_keeps_its_head(code: Path) -> None:
    assert head_of("odd_ones:tied", None, 2, SHAPE) == "4"
    torch.manual_seed(0)
    network = Classifier(spec("odd_ones:tied", "4", n_classes=2))
    torch.manual_seed(0)
    theirs = sys.modules["odd_ones"].tied()
    assert torch.equal(network.head.weight, theirs[4].weight)


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


def test_a_package_without_an_init_file_is_found_and_its_changes_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "plainpkg").mkdir()
    (tmp_path / "plainpkg" / "nets.py").write_text("VALUE = 1\n")
    assert folder_of("plainpkg.nets", [tmp_path / "elsewhere", tmp_path]) == tmp_path
    before = code_fingerprint("plainpkg.nets:Net", tmp_path)
    (tmp_path / "plainpkg" / "nets.py").write_text("VALUE = 2\n")
    assert before != code_fingerprint("plainpkg.nets:Net", tmp_path)


def test_a_module_that_ends_the_program_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    make_importable(tmp_path)
    with pytest.raises(ModelError, match="leaves:Net cannot be imported: SystemExit: 0"):
        head_of("leaves:Net", None, 3, SHAPE)


def test_timm_is_built_by_name_and_missed_by_name(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    assert head_of("timm:resnet10t", None, 3, (1, 32, 32)) == "fc"
    source, target = (Classifier(spec("timm:resnet10t", "fc", n_classes)) for n_classes in (7, 3))
    torch.save(
        {
            key.replace("backbone.body.", "").replace("head.", "fc."): value
            for key, value in source.state_dict().items()
        },
        tmp_path / "pretrained.pt",
    )
    report = load_weights(target, tmp_path / "pretrained.pt")
    assert (report.head_was_loaded, report.ignored) == (False, ("fc.weight", "fc.bias"))  # for other classes
    assert torch.equal(source.backbone.body.conv1[0].weight, target.backbone.body.conv1[0].weight)
    with pytest.raises(ModelError, match=r"timm has no model resnet_18 \(did you mean resnet18"):
        head_of("timm:resnet_18", None, 3, SHAPE)


# --- its code


def test_the_fingerprint_sees_what_the_module_imports_of_its_own_and_runs_nothing(tmp_path: Path) -> None:
    package = tmp_path / "mypkg"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "nets.py").write_text("import torch\nfrom .deep import blocks\ndef make():\n    import helper\nboom()")
    (package / "deep" / "__init__.py").write_text("")
    (package / "deep" / "blocks.py").write_text("from .. import other\n")
    for name in ("mypkg/other.py", "helper.py", "unrelated.py"):
        (tmp_path / name).write_text("")
    seen = {}
    before = code_fingerprint("mypkg.nets:make", tmp_path)
    for path in sorted(tmp_path.rglob("*.py")):
        text = path.read_text()
        path.write_text(text + "\n# changed\n")
        seen[str(path.relative_to(tmp_path))] = code_fingerprint("mypkg.nets:make", tmp_path) != before
        path.write_text(text)
    assert {name for name, changed in seen.items() if not changed} == {"unrelated.py"}
    assert "mypkg" not in sys.modules
    assert code_fingerprint("small-cnn", tmp_path) == code_fingerprint("timm:resnet18", tmp_path) == ""


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
        (["--model", "nets:Net", "--weights", "odd_ones.py"], "odd_ones.py is damaged or no file of torch.save"),
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
