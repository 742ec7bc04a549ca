"""Custom and timm networks: imported, hooked, fingerprinted, planned, stored, checked, and refused with a reason."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import init
from helpers.custom_images import NETWORK, lay_out, options
from helpers.custom_networks import SHAPE, fresh_imports, write_networks

from salcli.errors import ModelError
from salcli.models.custom import code_fingerprint, find_head, folder_of, import_object
from salcli.models.network import Classifier, NetworkSpec, OodClassifier, check_custom_head
from salcli.models.pretrained import load_given
from salcli.pipeline.train_id import class_check
from salcli.store.files import Found
from salcli.store.formats import read_network, write_network


@pytest.fixture(autouse=True)
def _fresh_imports() -> Iterator[None]:
    with fresh_imports():
        yield


@pytest.fixture
def code(tmp_path: Path) -> Path:
    return write_networks(tmp_path)


def spec(name: str, head: str, n_classes: int = 3) -> NetworkSpec:
    return NetworkSpec(name, n_classes, (0.0,), (1.0,), head=head)


@pytest.mark.parametrize(("name", "arguments", "head"), [("nets:Net", [3], "out"), ("odd_ones:Softmaxed", [], "last")])
def test_features_and_logits_are_what_goes_into_and_comes_out_of_the_networks_own_head(
    code: Path, name: str, arguments: list[int], head: str
) -> None:
    """What comes after the head does not matter."""
    assert find_head(name, None, 3, SHAPE) == head
    network, theirs = Classifier(spec(name, head)).eval(), import_object(name, "network")(*arguments).eval()
    torch.save({"model": theirs.state_dict()}, code / "net.pt")
    assert load_given(network, code / "net.pt").head_was_loaded
    seen: list[torch.Tensor] = []
    theirs.get_submodule(head).register_forward_hook(lambda _, inputs, output: seen.extend([inputs[0], output]))
    images = torch.randint(0, 256, (5, *SHAPE), dtype=torch.uint8)
    theirs(images / 255)
    torch.testing.assert_close(network.features_and_logits(images), tuple(seen))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Twins", "name it with --head"),
        ("torch.nn:Flatten", "has no linear head"),
        ("Colour", "images of 1 × 8 × 8"),
        ("broken", "OSError: no such luck (odd_ones.py, line "),
        ("timm:resnet_18", "did you mean resnet18"),
    ],
)
def test_a_network_that_cannot_be_used_says_why(code: Path, name: str, reason: str) -> None:
    with pytest.raises(ModelError) as caught:
        find_head(name if ":" in name else f"odd_ones:{name}", None, 3, SHAPE)
    assert reason in str(caught.value)


def test_a_named_head_is_taken_and_keeps_the_weights_it_brings(code: Path) -> None:
    assert find_head("odd_ones:Twins", "one", 3, SHAPE) == "one"
    assert find_head("odd_ones:tied", None, 2, SHAPE) == "4"
    torch.manual_seed(0)
    network = Classifier(spec("odd_ones:tied", "4", n_classes=2))
    torch.manual_seed(0)
    assert torch.equal(network.head.weight, sys.modules["odd_ones"].tied()[4].weight)


def test_a_head_that_gets_no_vector_is_refused_by_the_first_batch(code: Path) -> None:
    with pytest.raises(ModelError, match=r"PerPixel, was given \(2, 1, 8, 8\)"):
        Classifier(spec("odd_ones:PerPixel", "point"))(torch.zeros(2, *SHAPE))


def test_a_head_for_other_classes_cannot_be_used_without_training(code: Path) -> None:
    check_custom_head(Classifier(spec("odd_ones:five", "3", n_classes=5)))
    with pytest.raises(ModelError, match="5 classes, the data have 2"):
        check_custom_head(Classifier(spec("odd_ones:five", "3", n_classes=2)))


def test_networks_that_share_weights_are_stored_and_read_again(code: Path) -> None:
    network = OodClassifier(spec("odd_ones:tied", "4", n_classes=2)).eval()
    write_network(code / "net.safetensors", network, {})
    images = torch.randint(0, 256, (3, *SHAPE), dtype=torch.uint8)
    again = read_network(Found(code / "net.safetensors"), OodClassifier)
    for one, other in zip(network(images), again(images), strict=True):
        assert torch.equal(one, other)


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


@pytest.fixture
def here(code: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with networks and photos."""
    lay_out(code)
    monkeypatch.chdir(code)
    return code


def test_another_order_of_classes_is_found() -> None:
    labels = torch.arange(3).repeat(20)
    right = class_check(labels, labels, ("a", "b", "c"))
    assert (right.accuracy, right.has_other_order, right.is_near_chance) == (1, False, False)
    turned = class_check((labels + 1) % 3, labels, ("a", "b", "c"))  # output 1 means a, 2 means b, 0 means c
    assert (turned.accuracy, turned.best_accuracy, turned.best_order) == (0, 1, ("c", "a", "b"))
    assert turned.has_other_order
    guess = class_check(torch.zeros(60, dtype=torch.int64), labels, ("a", "b", "c"))
    assert (guess.is_near_chance, guess.has_other_order) == (True, False)


def test_init_finds_head_code_and_whether_it_is_trained(here: Path) -> None:
    sys.path.remove(str(here))
    namespace: dict[str, Any] = {}
    exec(NETWORK, namespace)
    torch.save(namespace["Net"](num_classes=2).state_dict(), "net.pt")
    network = ["--model", "nets:Net", "--weights", "net.pt", "--mean", "0.5", "--std", "1"]
    shown, params = init(Path("d"), *options(here / "photos"), *network)
    assert "nets:Net, head out" in shown
    assert "guess" not in shown
    assert (params.model.backbone, params.model.head, params.model.code) == ("nets:Net", "out", str(here))
    assert (params.train_id.epochs, params.model.weights) == (0, str(here / "net.pt"))
    assert (params.model.mean, params.model.std) == ((0.5,), (1.0,))


def test_a_network_for_colour_gets_gray_images_in_colour(here: Path) -> None:
    shown, params = init(Path("d"), *options(here / "photos"), "--model", "odd_ones:Colour")
    assert "8 × 8, 3 channels" in shown
    assert params.data.channels == 3
