"""A network that somebody else wrote, as it is: its features are what goes into its last linear layer."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from salcli.errors import ModelError, did_you_mean
from salcli.models.backbone import Backbone
from salcli.models.backbone_names import timm_name
from salcli.models.own_code import described, import_object


class HookedBackbone(Backbone):
    """MODULE:NAME or timm:NAME. In the place of its head stands a layer that keeps what it is given."""

    weights_prefix = "body."
    memory_format = torch.contiguous_format  # what others write may count on it, in a view() for example

    def __init__(self, name: str, in_channels: int, n_classes: int, head_name: str | None) -> None:
        super().__init__()
        if head_name is None:
            raise ModelError(f"it is not known which layer of {name} is its head; set model.head")
        self.name = name
        self.body = build_network(name, in_channels, n_classes)
        self.own_head = [named_linear(name, self.body, head_name)]  # in a list: no part of this module any more
        self.n_features, self.n_own_classes = self.own_head[0].in_features, self.own_head[0].out_features
        self.head_names = (head_name, *Backbone.head_names)
        self.head_has_bias = self.own_head[0].bias is not None
        self.kept: list[Tensor] = []
        self.body.set_submodule(head_name, _Keeper(self.kept, self.own_head[0].out_features))

    def new_head(self, n_classes: int) -> nn.Linear:
        """The network's own where it has as many classes: it may come with weights."""
        head, own = super().new_head(n_classes), self.own_head.pop()
        if own.out_features == n_classes:
            with torch.no_grad():
                head.weight.copy_(own.weight)
                head.bias.copy_(torch.zeros(n_classes) if own.bias is None else own.bias)
        return head

    def forward(self, images: Tensor) -> Tensor:
        """Features (n × D) of normalised images."""
        self.kept.clear()
        self.body(images.contiguous())
        if len(self.kept) != 1 or self.kept[0].ndim != 2:
            shapes = ", ".join(str(tuple(kept.shape)) for kept in self.kept) or "nothing"
            raise ModelError(
                f"{self.head_names[0]}, the head of {self.name}, was given {shapes} for {len(images)} images, "
                f"not one vector of {self.n_features} for each; name another layer in model.head"
            )
        return self.kept.pop()


class _Keeper(nn.Module):
    """Keeps what the head would get, and gives zeros of the head's shape to whatever comes after it."""

    def __init__(self, kept: list[Tensor], n_outputs: int) -> None:
        super().__init__()
        self.kept, self.n_outputs = kept, n_outputs

    def forward(self, features: Tensor) -> Tensor:
        self.kept.append(features)
        return features.new_zeros(*features.shape[:-1], self.n_outputs)


def build_network(name: str, in_channels: int, n_classes: int) -> nn.Module:
    """The whole network, its head included."""
    if (model := timm_name(name)) is not None:
        return _build_timm(model, in_channels, n_classes)
    make = import_object(name)
    if isinstance(make, nn.Module):
        raise ModelError(f"{name} is a network, not what makes one; name its class, or a function that returns it")
    if not callable(make):
        raise ModelError(f"{name} is a {type(make).__name__}; name a class, or a function that returns a network")
    options = {"num_classes": n_classes} if _takes_num_classes(make) else {}
    try:
        network = make(**options)
    except (Exception, SystemExit) as error:  # it is the user's code: anything may happen in it
        shown = ", ".join(f"{key}={value}" for key, value in options.items())
        raise ModelError(
            f"{name}({shown}) fails: {described(error)}; it is called without arguments, or with num_classes "
            "where it takes that"
        ) from error
    if not isinstance(network, nn.Module):
        raise ModelError(f"{name} returns a {type(network).__name__}, not a torch.nn.Module")
    if any(isinstance(value, nn.UninitializedParameter) for value in network.parameters()):
        raise ModelError(f"{name} has lazy layers, whose sizes are not known before they see data; give them sizes")
    return network


def _takes_num_classes(make: Any) -> bool:
    try:
        return "num_classes" in inspect.signature(make).parameters
    except (TypeError, ValueError):
        return False


def _build_timm(model: str, in_channels: int, n_classes: int) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise ModelError(
            f"timm:{model} needs the package timm ({error}); install it: pip install 'salcli[timm]'"
        ) from None
    if not timm.is_model(model):
        nearest = did_you_mean(model, timm.list_models())
        raise ModelError(f"timm has no model {model}{nearest}; all of them: timm.list_models()")
    network: nn.Module = timm.create_model(model, pretrained=False, in_chans=in_channels, num_classes=n_classes)
    return network


def named_linear(name: str, network: nn.Module, head_name: str) -> nn.Linear:
    """The layer of that name."""
    linears = {path: layer for path, layer in network.named_modules() if isinstance(layer, nn.Linear)}
    if head_name not in linears:
        there = "is no linear layer of" if head_name in dict(network.named_modules()) else "is not in"
        raise ModelError(f"{head_name} {there} {name}; {listed(linears)}")
    return linears[head_name]


def listed(linears: dict[str, nn.Linear]) -> str:
    """The linear layers of a network, the last first."""
    if not linears:
        return "it has no nn.Linear at all, whose gradients SAL needs"
    shown = [f"{path or '(itself)'} ({one.in_features} → {one.out_features})" for path, one in linears.items()][::-1]
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return f"its linear layers are: {', '.join(shown[:8])}{more}"
