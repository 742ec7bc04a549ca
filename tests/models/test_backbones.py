"""Backbones have the published shapes and names, compute what they should, and refuse what they cannot be."""

from collections.abc import Callable

import pytest
import torch
from helpers.networks import shaken, spec
from torch import Tensor, nn
from torch.nn import functional

from salcli.errors import ModelError, UnknownNameError
from salcli.models.backbones import BasicBlock, WideBlock, build_backbone, check_backbone_name
from salcli.models.network import Classifier


def without_memory(name: str) -> Classifier:
    """A network for ten classes on the meta device: shapes alone, so that large networks cost nothing."""
    with torch.device("meta"):
        return Classifier(spec(name))


# --- published facts


@pytest.mark.parametrize(
    ("name", "n_parameters", "n_features"),
    [
        ("wrn-40-2", 2_243_546, 128),
        ("wrn-28-10", 36_479_194, 640),
        ("resnet18", 11_173_962, 512),
        ("resnet34", 21_282_122, 512),
        ("torchvision:resnet50", 23_528_522, 2048),
    ],
)
def test_networks_for_ten_classes_have_the_published_size(name: str, n_parameters: int, n_features: int) -> None:
    network = without_memory(name)
    assert sum(parameter.numel() for parameter in network.parameters()) == n_parameters
    assert network.n_features == network.backbone.n_features == n_features


NAMES: dict[str, tuple[int, dict[str, tuple[int, ...]]]] = {
    "wrn-40-2": ((1 + 36 + 3) + 5 * (36 + 1), {  # stem, 18 blocks of two, shortcuts; norms before each, and at the end
        "conv1.weight": (16, 3, 3, 3), "block1.layer.0.convShortcut.weight": (32, 16, 1, 1),
        "block3.layer.5.conv1.weight": (128, 128, 3, 3), "bn1.bias": (128,),
    }),
    "resnet18": (6 * (1 + 16 + 3), {  # stem, 8 blocks of two, shortcuts; a norm after each
        "conv1.weight": (64, 3, 3, 3), "layer2.0.shortcut.1.running_mean": (128,), "layer4.1.bn2.weight": (512,),
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_named_and_shaped_as_in_published_state_dicts(name: str) -> None:
    (n_tensors, shapes), weights = NAMES[name], without_memory(name).backbone.state_dict()
    assert {key: tuple(weights[key].shape) for key in shapes} == shapes
    assert len(weights) == n_tensors


# --- blocks, written out


def norm(maps: Tensor, layer: nn.Module) -> Tensor:
    own = layer.state_dict()
    return functional.batch_norm(maps, own["running_mean"], own["running_var"], own["weight"], own["bias"])


def convolution(maps: Tensor, weight: Tensor, stride: int) -> Tensor:
    return functional.conv2d(maps, weight, stride=stride, padding=weight.shape[-1] // 2)


@pytest.mark.parametrize(("n_in", "n_out", "stride"), [(3, 3, 1), (3, 5, 1), (3, 5, 2), (4, 4, 2)])
def test_blocks_are_what_their_papers_draw(n_in: int, n_out: int, stride: int) -> None:
    torch.manual_seed(0)
    maps, is_same = torch.randn(2, n_in, 6, 6), n_in == n_out and stride == 1
    block = shaken(WideBlock(n_in, n_out, stride, drop_rate=0.5)).eval()
    weights = block.state_dict()
    first = norm(maps, block.bn1).clamp(min=0)
    second = norm(convolution(first, weights["conv1.weight"], stride), block.bn2).clamp(min=0)
    around = maps if is_same else convolution(first, weights["convShortcut.weight"], stride)
    torch.testing.assert_close(block(maps), convolution(second, weights["conv2.weight"], 1) + around)

    block = shaken(BasicBlock(n_in, n_out, stride)).eval()
    weights = block.state_dict()
    first = norm(convolution(maps, weights["conv1.weight"], stride), block.bn1).clamp(min=0)
    second = norm(convolution(first, weights["conv2.weight"], 1), block.bn2)
    around = maps
    if not is_same:
        around = norm(convolution(maps, weights["shortcut.0.weight"], stride), block.shortcut[1])
    torch.testing.assert_close(block(maps), (second + around).clamp(min=0))


# --- torchvision


FAMILIES = {
    "alexnet": ("classifier.6", 4096), "densenet121": ("classifier", 1024), "efficientnet_b0": ("classifier.1", 1280),
    "googlenet": ("fc", 1024), "inception_v3": ("fc", 2048), "maxvit_t": ("classifier.5", 512), "swin_t": ("head", 768),
    "vit_b_16": ("heads.head", 768),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_of_torchvision_gives_up_its_head(name: str) -> None:
    head, n_features = FAMILIES[name]
    with torch.device("meta"), torch.no_grad():
        backbone = build_backbone(f"torchvision:{name}", 3).eval()
        size = 299 if name == "inception_v3" else 224
        assert backbone(torch.empty(2, 3, size, size)).shape == (2, n_features)
    assert (backbone.head_names[0], backbone.n_features) == (head, n_features)


@pytest.mark.parametrize(
    ("name", "channels", "message"),
    [
        ("squeezenet1_1", 3, r"squeezenet1_1 does not end in a linear layer.*; use .* torchvision:resnet50$"),
        ("resnet18", 4, r"torchvision:resnet18 takes images with 1 or 3 channels, got 4"),
        ("resnet5", 3, r"^no torchvision classifier is called resnet5 \(did you mean resnet50\?\)"),
        ("alexnet", 3, r"^torchvision:alexnet cannot take images of 32×32 \(.+\); use another"),
    ],
)
def test_a_torchvision_model_that_is_of_no_use_is_refused(name: str, channels: int, message: str) -> None:
    with torch.device("meta"), pytest.raises((ModelError, UnknownNameError), match=message):
        build_backbone(f"torchvision:{name}", channels).eval()(torch.empty(2, channels, 32, 32))


# --- names


BAD_NAMES = [
    ("small-cn", UnknownNameError, r"^no backbone is called small-cn \(did you mean small-cnn\?\); known: linear, "),
    ("wrn-41-2", ModelError, r"depth must be 6n \+ 4 with n of at least 1, got 41; use wrn-40-2$"),
    ("wrn-40-0", ModelError, r"width must be at least 1, got 0; use wrn-40-1 or a wider one$"),
]


@pytest.mark.parametrize("check", [check_backbone_name, lambda name: build_backbone(name, 3)])
@pytest.mark.parametrize(("name", "error", "message"), BAD_NAMES)
def test_a_bad_name_is_refused(name: str, error: type[Exception], message: str, check: Callable[[str], object]) -> None:
    with pytest.raises(error, match=message):
        check(name)
