"""Residual networks (He et al., 2016) for small images: a 3×3 stem and no pooling before the last one.

Layers are named as in the usual PyTorch code for CIFAR, so that its state dicts fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn import functional

from salcli.models.backbone import Backbone, mean_over_pixels

if TYPE_CHECKING:
    from torch import Tensor


class ResNet(Backbone):
    """A stem, four groups of basic blocks with 64 to 512 channels, the mean. (2, 2, 2, 2) blocks make a ResNet-18."""

    n_features = 512

    def __init__(self, n_blocks: tuple[int, int, int, int], in_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 64, kernel_size=3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = _group(n_blocks[0], 64, 64, stride=1)
        self.layer2 = _group(n_blocks[1], 64, 128, stride=2)
        self.layer3 = _group(n_blocks[2], 128, 256, stride=2)
        self.layer4 = _group(n_blocks[3], 256, 512, stride=2)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Features (n × 512) of normalised images."""
        maps = self.layer4(self.layer3(self.layer2(self.layer1(self._stem(images)))))
        return functional.adaptive_avg_pool2d(maps, 1).flatten(1)

    @property
    def level_widths(self) -> tuple[int, ...]:
        """Of the features that `levels` gives."""
        return 64, 64, 128, 256, self.n_features

    def levels(self, images: Tensor) -> tuple[Tensor, ...]:
        """After the stem and after each group."""
        maps = [self._stem(images)]
        for group in (self.layer1, self.layer2, self.layer3, self.layer4):
            maps.append(group(maps[-1]))
        return tuple(mean_over_pixels(some) for some in maps)

    def _stem(self, images: Tensor) -> Tensor:
        return functional.relu(self.bn1(self.conv1(images)), inplace=True)


class BasicBlock(nn.Module):
    """Convolution, BN, ReLU, convolution, BN, and a way around, then ReLU."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.shortcut = nn.Sequential()
        if n_in != n_out or stride != 1:
            projection = nn.Conv2d(n_in, n_out, kernel_size=1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(n_out))

    def forward(self, maps: Tensor) -> Tensor:
        """Maps (n, n_out, H / stride, W / stride)."""
        residual = functional.relu(self.bn1(self.conv1(maps)), inplace=True)
        residual = self.bn2(self.conv2(residual))
        return functional.relu(residual + self.shortcut(maps), inplace=True)


def _group(n_blocks: int, n_in: int, n_out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(BasicBlock(n_in, n_out, stride), *(BasicBlock(n_out, n_out, 1) for _ in range(n_blocks - 1)))
