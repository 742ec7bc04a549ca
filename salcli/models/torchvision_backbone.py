"""Any image classifier of torchvision, without its last linear layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import OutOfMemoryError, nn

from salcli.errors import ModelError, unknown_name
from salcli.models.backbone import Backbone

if TYPE_CHECKING:
    from torch import Tensor

N_CLASSES = 1000
# These two have more heads, for training alone, and warn where nobody says how to start them.
OPTIONS: dict[str, dict[str, Any]] = {
    "googlenet": {"aux_logits": False, "init_weights": True},
    "inception_v3": {"aux_logits": False, "init_weights": True},
}


class TorchvisionBackbone(Backbone):
    """A model of torchvision.models with random weights. Gray images are shown in three equal channels."""

    weights_prefix = "body."
    unused_weights = ("aux1.", "aux2.", "AuxLogits.")

    def __init__(self, name: str, in_channels: int) -> None:
        super().__init__()
        if in_channels not in (1, 3):
            raise ModelError(f"torchvision:{name} takes images with 1 or 3 channels, got {in_channels}")
        self.name = name
        self.body = _build(name)
        head_name, head = _last_linear(name, self.body)
        self.n_features = head.in_features
        self.head_names = (head_name, *Backbone.head_names)
        self.body.set_submodule(head_name, nn.Identity())

    def forward(self, images: Tensor) -> Tensor:
        """Features (n × D) of normalised images."""
        try:
            features: Tensor = self.body(images.expand(-1, 3, -1, -1))
        except (AssertionError, RuntimeError) as error:
            reason = str(error).split("\n")[0]
            about_size = isinstance(error, AssertionError) or "size" in reason
            if not about_size or isinstance(error, OutOfMemoryError):
                raise
            height, width = images.shape[2:]
            raise ModelError(
                f"torchvision:{self.name} cannot take images of {height}×{width} ({reason}); use another backbone"
            ) from error
        return features


def _build(name: str) -> nn.Module:
    from torchvision import models  # slow to load, and most networks do without it

    classifiers = models.list_models(module=models)
    if name not in classifiers:
        if name in models.list_models():  # building one of these would even start a download
            raise ModelError(f"torchvision:{name} is no image classifier; use one, for example torchvision:resnet50")
        raise unknown_name("torchvision classifier", name, classifiers)
    model: nn.Module = models.get_model(name, weights=None, num_classes=N_CLASSES, **OPTIONS.get(name, {}))
    return model


def _last_linear(name: str, model: nn.Module) -> tuple[str, nn.Linear]:
    """The layer that makes the logits, with its name."""
    layers = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if not layers or layers[-1][1].out_features != N_CLASSES:
        raise ModelError(
            f"torchvision:{name} does not end in a linear layer, whose gradients SAL needs; "
            f"use a model that does, for example torchvision:resnet50"
        )
    return layers[-1]
