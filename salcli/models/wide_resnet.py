"""Wide residual networks for 32×32 images (Zagoruyko & Komodakis, 2016): the paper's WRN-40-2.

Layers are named as in the PyTorch code that WOODS, SAL and their rivals share, so that its state dicts fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn import functional

from salcli.models.backbone import Backbone, mean_over_pixels
from salcli.models.backbone_names import check_wide_resnet_size

if TYPE_CHECKING:
    from torch import Tensor


class WideResNet(Backbone):
    """WRN-d-w: a stem, three groups of (d − 4) / 6 pre-activation blocks with 16w, 32w and 64w channels, the mean."""

    def __init__(self, depth: int, width: int, in_channels: int, drop_rate: float = 0.0) -> None:
        super().__init__()
        check_wide_resnet_size(depth, width)
        n_blocks = (depth - 4) // 6
        self.n_features = 64 * width
        self.conv1 = nn.Conv2d(in_channels, 16, kernel_size=3, padding=1, bias=False)
        self.block1 = _Group(n_blocks, 16, 16 * width, 1, drop_rate)
        self.block2 = _Group(n_blocks, 16 * width, 32 * width, 2, drop_rate)
        self.block3 = _Group(n_blocks, 32 * width, 64 * width, 2, drop_rate)
        self.bn1 = nn.BatchNorm2d(64 * width)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Features (n × 64w) of normalised images."""
        return self._pooled(self.block3(self.block2(self.block1(self.conv1(images)))))

    @property
    def level_widths(self) -> tuple[int, ...]:
        """Of the features that `levels` gives."""
        return 16, self.n_features // 4, self.n_features // 2, self.n_features

    def levels(self, images: Tensor) -> tuple[Tensor, ...]:
        """After the stem, after the first two groups, and the features."""
        stem = self.conv1(images)
        first = self.block1(stem)
        second = self.block2(first)
        return *(mean_over_pixels(maps) for maps in (stem, first, second)), self._pooled(self.block3(second))

    def _pooled(self, maps: Tensor) -> Tensor:
        activated = functional.relu(self.bn1(maps), inplace=True)
        return functional.adaptive_avg_pool2d(activated, 1).flatten(1)


class WideBlock(nn.Module):
    """BN, ReLU, convolution, twice, with dropout in between, and a way around."""

    def __init__(self, n_in: int, n_out: int, stride: int, drop_rate: float) -> None:
        super().__init__()
        self.drop_rate = drop_rate
        self.bn1 = nn.BatchNorm2d(n_in)
        self.conv1 = nn.Conv2d(n_in, n_out, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, kernel_size=3, padding=1, bias=False)
        same_shape = n_in == n_out and stride == 1
        self.convShortcut = None if same_shape else nn.Conv2d(n_in, n_out, kernel_size=1, stride=stride, bias=False)

    def forward(self, maps: Tensor) -> Tensor:
        """Maps (n, n_out, H / stride, W / stride)."""
        activated = functional.relu(self.bn1(maps), inplace=True)
        inner = functional.relu(self.bn2(self.conv1(activated)), inplace=True)
        residual: Tensor = self.conv2(functional.dropout(inner, self.drop_rate, self.training))
        # a shortcut that changes the shape starts after the first activation, the identity before it
        around = maps if self.convShortcut is None else self.convShortcut(activated)
        return residual + around


class _Group(nn.Module):
    """Blocks of one resolution; the first of them changes it."""

    def __init__(self, n_blocks: int, n_in: int, n_out: int, stride: int, drop_rate: float) -> None:
        super().__init__()
        first = WideBlock(n_in, n_out, stride, drop_rate)
        self.layer = nn.Sequential(first, *(WideBlock(n_out, n_out, 1, drop_rate) for _ in range(n_blocks - 1)))

    def forward(self, maps: Tensor) -> Tensor:
        changed: Tensor = self.layer(maps)
        return changed
