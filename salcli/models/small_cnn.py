"""A small convolutional backbone for small gray images, quick on a laptop's CPU."""

from __future__ import annotations

from torch import Tensor, nn

from salcli.models.backbone import Backbone, mean_over_pixels


class SmallCnn(Backbone):
    """Three convolutions, one pooling, and the mean over what is left of the image."""

    n_features = 64

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _block(in_channels, 32),
            _block(32, 64),
            nn.MaxPool2d(2),
            _block(64, self.n_features),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Features (n × 64) of normalised images."""
        features: Tensor = self.layers(images)
        return features

    @property
    def level_widths(self) -> tuple[int, ...]:
        """Of the features that `levels` gives."""
        return 32, 64, self.n_features

    def levels(self, images: Tensor) -> tuple[Tensor, ...]:
        """After each convolution."""
        first = self.layers[0](images)
        second = self.layers[1](first)
        return mean_over_pixels(first), mean_over_pixels(second), self.layers[2:](second)


def _block(n_in: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(n_in, n_out, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU())
