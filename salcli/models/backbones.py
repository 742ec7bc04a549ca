"""From a backbone's name to the backbone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from salcli.errors import ModelError
from salcli.models.backbone_names import check_backbone_name, torchvision_name, wide_resnet_size
from salcli.models.mlp import Mlp
from salcli.models.resnet import ResNet
from salcli.models.small_cnn import SmallCnn
from salcli.models.torchvision_backbone import TorchvisionBackbone
from salcli.models.wide_resnet import WideResNet

if TYPE_CHECKING:
    from collections.abc import Callable

    from salcli.models.backbone import Backbone

# name → builder, given the number of channels
FIXED: dict[str, Callable[[int], Backbone]] = {
    "mlp": Mlp,
    "resnet18": lambda in_channels: ResNet((2, 2, 2, 2), in_channels),
    "resnet34": lambda in_channels: ResNet((3, 4, 6, 3), in_channels),
    "small-cnn": SmallCnn,
}


def build_backbone(name: str, in_channels: int, drop_rate: float = 0.0) -> Backbone:
    """A backbone with random weights, from torch's global generator.

    A drop rate that the network has no use for is refused, lest someone believes in a regulariser that is not there.
    """
    check_backbone_name(name)
    if not 0 <= drop_rate < 1:
        raise ModelError(f"the drop rate must be at least 0 and less than 1, got {drop_rate}")
    if (size := wide_resnet_size(name)) is not None:
        depth, width = size
        return WideResNet(depth, width, in_channels, drop_rate)
    if drop_rate > 0:
        raise ModelError(f"{name} takes no drop rate, got {drop_rate}; set it to 0 or use a wide ResNet (wrn-40-2)")
    if (model := torchvision_name(name)) is not None:
        return TorchvisionBackbone(model, in_channels)
    return FIXED[name](in_channels)
