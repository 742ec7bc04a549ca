"""Custom and timm networks: imported, hooked, fingerprinted, and refused with a reason."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.custom_networks import SHAPE, fresh_imports, write_networks

from salcli.errors import ModelError
from salcli.models.custom import (
    code_fingerprint,
    find_head,
    folder_of,
    import_object,
)
from salcli.models.network import Classifier, NetworkSpec, check_custom_head
from salcli.models.weights import load_weights


@pytest.fixture(autouse=True)
def _fresh_imports() -> Iterator[None]:
    with fresh_imports():
        yield


@pytest.fixture
def code(tmp_path: Path) -> Path:
    return write_networks(tmp_path)


def spec(name: str, head: str, n_classes: int = 3) -> NetworkSpec:
    return NetworkSpec(name, n_classes, (0.0,), (1.0,), head=head)


# --- the network and its head


def test_features_and_logits_are_those_of_the_network_itself(code: Path) -> None:
    head = find_head("nets:Net", None, 3, SHAPE)
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
    assert find_head("odd_ones:Softmaxed", None, 3, SHAPE) == "last"
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
        ("Twins", None, "several layers could be its head, the last linear layer; name it with --head"),
        ("torch.nn:Flatten", None, "has no linear head: it has no nn.Linear at all"),
        ("PerPixel", "point", "point of odd_ones:PerPixel gets (2, 1, 8, 8) for 2 images, not one vector"),
        ("Colour", None, "cannot take images of 1 × 8 × 8 (channels, height, width): RuntimeError: "),
        ("broken", None, "odd_ones:broken() fails: OSError: no such luck (odd_ones.py, line "),
    ],
)
def test_a_network_that_cannot_be_used_says_why(code: Path, name: str, head: str | None, reason: str) -> None:
    with pytest.raises(ModelError) as caught:
        find_head(name if ":" in name else f"odd_ones:{name}", head, 3, SHAPE)
    assert reason in str(caught.value)


def test_a_named_head_is_taken_and_keeps_the_weights_it_brings(code: Path) -> None:
    assert find_head("odd_ones:Twins", "one", 3, SHAPE) == "one"
    assert find_head("odd_ones:tied", None, 2, SHAPE) == "4"
    torch.manual_seed(0)
    network = Classifier(spec("odd_ones:tied", "4", n_classes=2))
    torch.manual_seed(0)
    assert torch.equal(network.head.weight, sys.modules["odd_ones"].tied()[4].weight)


def test_a_head_for_other_classes_cannot_be_used_without_training(code: Path) -> None:
    check_custom_head(Classifier(spec("odd_ones:five", "3", n_classes=5)))
    with pytest.raises(ModelError, match=r"3, the head of odd_ones:five, is for 5 classes, the data have 2, so it"):
        check_custom_head(Classifier(spec("odd_ones:five", "3", n_classes=2)))


def test_timm_is_built_by_name() -> None:
    pytest.importorskip("timm")
    assert find_head("timm:resnet10t", None, 3, (1, 32, 32)) == "fc"
    assert Classifier(spec("timm:resnet10t", "fc")).eval()(torch.zeros(2, 1, 32, 32)).shape == (2, 3)
    with pytest.raises(ModelError, match=r"timm has no model resnet_18 \(did you mean resnet18"):
        find_head("timm:resnet_18", None, 3, SHAPE)


# --- importing and fingerprinting code


def test_a_message_names_what_was_to_be_imported(code: Path) -> None:
    assert import_object("odd_ones:number", "method") == 3
    assert import_object("odd_ones:nn.Linear", "network") is torch.nn.Linear
    for name, reason in {
        "odd_ones:absent": "odd_ones:absent: odd_ones has no absent; it has torch, nn",
        "knn": "knn must be written as MODULE:NAME",
        "absent_module:Net": "absent_module:Net cannot be imported: ModuleNotFoundError: .* 'absent_module'; start ",
    }.items():
        with pytest.raises(ModelError, match=f"^the custom method {reason}"):
            import_object(name, "method")


@pytest.mark.parametrize("with_init", [True, False])
def test_the_fingerprint_sees_what_the_module_imports_beside_it_and_runs_nothing(
    tmp_path: Path, with_init: bool
) -> None:
    sources = {
        "mypkg/nets.py": "import torch\nfrom .deep import blocks\ndef make():\n    import helper\nboom()",
        "mypkg/deep/blocks.py": "from .. import other\n",
        **dict.fromkeys(["mypkg/other.py", "helper.py", "unrelated.py"], ""),
        **dict.fromkeys(["mypkg/__init__.py", "mypkg/deep/__init__.py"] if with_init else [], ""),
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert folder_of("mypkg.nets", [tmp_path / "elsewhere", tmp_path]) == tmp_path
    before = code_fingerprint("mypkg.nets:make", tmp_path)
    unseen = set()
    for name, text in sources.items():
        (tmp_path / name).write_text(text + "\n# changed\n")
        if code_fingerprint("mypkg.nets:make", tmp_path) == before:
            unseen.add(name)
        (tmp_path / name).write_text(text)
    assert unseen == {"unrelated.py"}
    assert "mypkg" not in sys.modules
    assert code_fingerprint("small-cnn", tmp_path) == code_fingerprint("timm:resnet18", tmp_path) == ""
