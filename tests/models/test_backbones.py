"""Backbones have the published shapes and names, classifiers a linear head; what they cannot be is refused."""

import pytest
import torch
from helpers.networks import random_images, shaken, spec
from torch import Tensor, nn
from torch.nn import functional

from salcli.errors import ModelError, UnknownNameError
from salcli.models.backbones import BasicBlock, WideBlock, build_backbone
from salcli.models.network import Classifier, OodClassifier


@pytest.mark.parametrize(
    ("name", "n_parameters", "n_features", "layers"),
    [
        ("wrn-40-2", 2_243_546, 128, "block1.layer.0.convShortcut.weight block3.layer.5.conv1.weight bn1.bias"),
        ("wrn-28-10", 36_479_194, 640, ""),
        ("resnet18", 11_173_962, 512, "layer2.0.shortcut.1.running_mean layer4.1.bn2.weight"),
        ("resnet34", 21_282_122, 512, ""),
        ("torchvision:resnet50", 23_528_522, 2048, ""),
    ],
)
def test_networks_have_the_published_size_and_names_of_layers(
    name: str, n_parameters: int, n_features: int, layers: str
) -> None:
    """For ten classes, on the meta device: shapes alone, so that large networks cost nothing."""
    with torch.device("meta"):
        network = Classifier(spec(name))
    assert sum(parameter.numel() for parameter in network.parameters()) == n_parameters
    assert network.n_features == network.backbone.n_features == n_features
    assert {*layers.split()} <= network.backbone.state_dict().keys()


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
        ("torchvision:squeezenet1_1", 3, "does not end in a linear layer"),
        ("torchvision:resnet18", 4, "1 or 3 channels, got 4"),
        ("torchvision:resnet5", 3, "did you mean resnet50"),
        ("torchvision:alexnet", 3, "images of 32×32"),
        ("small-cn", 3, "did you mean small-cnn"),
        ("wrn-41-2", 3, "got 41; use wrn-40-2"),
        ("wrn-40-0", 3, "got 0; use wrn-40-1"),
    ],
)
def test_a_backbone_that_is_of_no_use_is_refused(name: str, channels: int, message: str) -> None:
    with torch.device("meta"), pytest.raises((ModelError, UnknownNameError), match=message):
        build_backbone(name, channels).eval()(torch.empty(2, channels, 32, 32))


def outputs(network: Classifier, images: Tensor) -> tuple[Tensor, ...]:
    """Class logits, and the OOD logit of a network that has one."""
    result = network(images)
    return (result,) if isinstance(result, Tensor) else result


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("small-cnn", (1, 8, 8)),
        ("mlp", (2,)),
        ("linear", (40,)),
        ("resnet18", (3, 16, 16)),
        ("wrn-10-2", (3, 32, 32)),
        ("torchvision:mobilenet_v3_small", (1, 32, 32)),
    ],
)
@pytest.mark.parametrize("kind", [Classifier, OodClassifier])
def test_the_head_is_linear_in_the_features(name: str, shape: tuple[int, ...], kind: type[Classifier]) -> None:
    torch.manual_seed(0)
    network = kind(spec(name, 5, shape[0])).eval()
    images = random_images(3, *shape)
    features = network.features(images)
    assert features.shape == (3, network.n_features)
    logits, *further = outputs(network, images)
    assert torch.equal(network.head(features), logits)
    assert logits.shape == (3, 5)
    assert [output.shape for output in further] == ([(3,)] if kind is OodClassifier else [])
    outputs(network.train(), images)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in network.head.parameters())
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in network.parameters() if p.ndim == 4)


def test_dropout_is_random_in_training_and_absent_afterwards_as_in_an_ood_classifier_on_top() -> None:
    torch.manual_seed(0)
    images = random_images(4, 3, 8, 8)
    network = Classifier(spec("wrn-10-1", drop_rate=0.3))
    assert not torch.equal(network(images), network(images))
    network.eval()
    assert torch.equal(network(images), network(images))
    assert torch.equal(OodClassifier.on_top_of(network).eval()(images)[0], network(images))
