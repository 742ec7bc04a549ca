"""Given weights: published files load under all their usual names, other files are refused, and none is executed."""

import pickle
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fake_data import Malicious
from safetensors.torch import save_file
from torch import Tensor

from salcli.errors import WeightsError
from salcli.models.given_weights import WeightsReport
from salcli.models.network import Classifier, NetworkSpec, OodClassifier
from salcli.models.pretrained import load_given

State = dict[str, Tensor]


def network(name: str = "wrn-10-1", n_classes: int = 10, seed: int = 0, kind: type[Classifier] = Classifier) -> Any:
    torch.manual_seed(seed)
    built = kind(NetworkSpec(name, n_classes, (0.4, 0.5, 0.6), (0.25, 0.2, 0.3))).eval()
    for key, tensor in built.state_dict().items():
        if "running_" in key:  # as after training: fresh ones are all alike
            tensor.copy_(torch.rand(tensor.shape) + 0.5)
    return built


def published(source: Classifier, head: str = "fc") -> State:
    """As others store a network: one flat space of names."""
    return {
        key.removeprefix("backbone.").replace("head.", f"{head}.") if key.startswith("head.")
        else key.removeprefix("backbone."): tensor.clone().contiguous()
        for key, tensor in source.state_dict().items()
    }  # fmt: skip


def same_outputs(one: Classifier, other: Classifier) -> bool:
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return torch.equal(one.features_and_logits(images)[1], other.features_and_logits(images)[1])


def refused(built: Classifier, path: Path) -> str:
    """The message; the network is as it was."""
    before = {key: tensor.clone() for key, tensor in built.state_dict().items()}
    with pytest.raises(WeightsError) as caught:
        load_given(built, path)
    after = built.state_dict()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    assert str(caught.value).startswith(str(path))
    return str(caught.value)


def stored(state: object, path: Path) -> Path:
    torch.save(state, path)
    return path


@pytest.fixture
def source() -> Any:
    return network(seed=1)


@pytest.fixture
def target() -> Any:
    return network(seed=2)


WRAPPINGS: dict[str, Callable[[State], object]] = {
    "bare": lambda state: state,
    "ordered": OrderedDict,
    "state_dict": lambda state: {"state_dict": state, "epoch": 3, "best": 0.9},
    "model": lambda state: {"epoch": 3, "optimizer": {"state": {}}, "model": state},
    "beside its average": lambda state: {"ema": {key: tensor + 1 for key, tensor in state.items()}, "model": state},
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_weights_are_found_in_every_wrapping_and_both_formats_of_torch(
    source: Classifier, target: Classifier, tmp_path: Path, wrapping: str
) -> None:
    path = tmp_path / "weights.pth.tar"
    torch.save(WRAPPINGS[wrapping](published(source)), path, _use_new_zipfile_serialization=wrapping != "ordered")
    assert load_given(target, path) == WeightsReport(head_was_loaded=True)
    assert same_outputs(target, source)


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "network.", "module.model.backbone."])
@pytest.mark.parametrize("head", ["fc", "linear", "classifier", "head"])
@pytest.mark.parametrize("head_inside", [True, False])
def test_every_prefix_and_every_name_of_the_head_is_understood(
    source: Classifier, target: Classifier, tmp_path: Path, prefix: str, head: str, head_inside: bool
) -> None:
    state = {
        key if key.startswith(f"{head}.") and not head_inside else prefix + key: tensor
        for key, tensor in published(source, head).items()
    }
    save_file(state, tmp_path / "weights.safetensors")
    assert load_given(target, tmp_path / "weights.safetensors").head_was_loaded
    assert same_outputs(target, source)


def test_an_ood_classifiers_second_output_is_left_out(tmp_path: Path) -> None:
    with_output, plain = network(seed=1, kind=OodClassifier), network(seed=2)
    path = tmp_path / "made.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in with_output.state_dict().items()}, path)
    assert load_given(plain, path).head_was_loaded
    assert same_outputs(plain, with_output)


def test_counters_and_head_may_be_missing_and_an_average_is_read(source: Any, target: Any, tmp_path: Path) -> None:
    state = {key: tensor for key, tensor in published(source).items() if "num_batches" not in key}
    assert load_given(network(seed=3), stored(state, tmp_path / "weights.pt")).head_was_loaded
    headless = {key: tensor for key, tensor in state.items() if not key.startswith("fc.")}
    assert not load_given(network(seed=3), stored(headless, tmp_path / "weights.pt")).head_was_loaded
    averaged = torch.optim.swa_utils.AveragedModel(source)
    load_given(target, stored(averaged.state_dict(), tmp_path / "average.pt"))
    assert same_outputs(target, source)


def test_a_state_dict_of_another_network_is_refused_with_what_differs(tmp_path: Path) -> None:
    """Also if the number of classes differs: another head alone would not help."""
    path = stored(published(network("wrn-16-2", n_classes=7)), tmp_path / "weights.pt")
    _, *lines = refused(network("resnet18"), path).splitlines()
    assert "    layer1.0.conv1.weight (64, 64, 3, 3)" in lines, "missing"
    assert "    fc.weight (7, 128), not (10, 512)" in lines
    assert "    block1.layer.0.bn1.weight (16)" in lines, "unexpected"


@pytest.mark.parametrize("head", ["fc", "module.linear"])
def test_a_head_for_other_classes_is_left_out_with_a_note(tmp_path: Path, target: Classifier, head: str) -> None:
    state = published(network(n_classes=100), head)
    path = stored({k if k.startswith(head) else f"module.{k}": v for k, v in state.items()}, tmp_path / "weights.pt")
    before, report = target.head.weight.clone(), load_given(target, path)
    assert not report.head_was_loaded
    assert f"{path} is for 100 classes ({head}.weight is (100, 64)), the ID data have 10" in (report.note or "")
    assert torch.equal(target.head.weight, before)
    assert torch.equal(target.backbone.conv1.weight, state["conv1.weight"])


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda state: {k: v for k, v in state.items() if k != "fc.bias"}, "  missing (1):\n    head.bias (10)\n"),
        (lambda state: {**state, "fc.weight": state["fc.weight"] * float("nan")}, "fc.weight holds NaN or infinity"),
        (lambda state: [1, 2], "holds a list, not a state dict"),
        (lambda state: {"teacher": state, "epoch": 3}, "under a name that salcli knows, but teacher, epoch;"),
        (lambda state: network(), "save the weights alone: torch.save(network.state_dict(), path)"),
    ],
)
def test_other_content_is_refused_with_a_reason(
    source: Any, target: Any, tmp_path: Path, made: Callable[[State], object], message: str
) -> None:
    assert message in refused(target, stored(made(published(source)), tmp_path / "weights.pt"))
    assert "does not exist" in refused(target, tmp_path / "none.pt")
    assert "is a folder, not a file" in refused(target, tmp_path)


@pytest.mark.parametrize("form", ["new", "old", "pickle"])
@pytest.mark.parametrize("suffix", [".pt", ".bin", ".safetensors"])
def test_a_file_that_holds_code_is_refused_and_the_code_does_not_run(
    target: Classifier, tmp_path: Path, form: str, suffix: str
) -> None:
    trace, path = tmp_path / "trace", tmp_path / f"weights{suffix}"
    content = {"extra": Malicious(trace), "state_dict": {"a": torch.zeros(1)}}
    if form == "pickle":
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == "new")
    message = refused(target, path)
    runs_none = "mkdir, and salcli runs no code"
    assert ("is damaged or not a safetensors file" if suffix == ".safetensors" else runs_none) in message
    assert not trace.exists()
    with suppress(Exception):  # after the harm is done
        torch.load(path.rename(tmp_path / "trusted.pt"), weights_only=False)
    assert trace.exists(), "this file would have done no harm at all"


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_truncated_file_and_another_kind_are_refused(source: Any, target: Any, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(published(source), path)
    whole = path.read_bytes()
    for share in (0.0, 0.001, 0.3, 0.9, 0.999):
        path.write_bytes(whole[: int(len(whole) * share)])
        assert "is damaged or not a " in refused(target, path)
    for content in (b"hello", b"\x89HDF\r\n\x1a\n", b"PK\x03\x04", b"\x80\x02.", b"\x80\x05N.", b"\x00" * 99):
        path.write_bytes(content)
        assert "weights_only" not in refused(target, path)
