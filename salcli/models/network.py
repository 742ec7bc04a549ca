"""The ID classifier h_w and the OOD classifier g_θ, on top of any backbone. Networks of rivals are in methods/."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from salcli.errors import ModelError
from salcli.models.backbones import (
    LINEAR,
    Backbone,
    build_backbone,
    import_path,
    is_hooked,
    takes_vectors,
    wide_resnet_size,
)
from salcli.models.custom import HookedBackbone

M = TypeVar("M", bound=nn.Module)
C = TypeVar("C", bound="Classifier")
MOST_CLASSES = 1_000_000
Inputs = Num[Tensor, "n *shape"]  # images (n, C, H, W) from 0 to 255, or vectors (n, D)


@dataclass(frozen=True)
class NetworkSpec:
    """All that is needed to build a network again.

    Mean and std are what its input is normalised with: of the channels of images, in [0, 1], or of each dimension of
    vectors.
    """

    backbone: str
    n_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    drop_rate: float = 0.0
    head: str | None = None  # the name of the last linear layer in a custom or timm network

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "NetworkSpec":
        """The inverse of dataclasses.asdict and JSON."""
        mean, std = (tuple(float(one) for one in content[key]) for key in ("mean", "std"))
        n_classes, drop_rate, head = content["n_classes"], content.get("drop_rate", 0.0), content.get("head")
        if not isinstance(n_classes, int) or not 1 <= n_classes <= MOST_CLASSES:
            raise ValueError(f"it has {n_classes!r:.40} classes")
        largest = torch.finfo(torch.float32).max
        usable = all(abs(one) < largest for one in (*mean, *std)) and all(one > 1 / largest for one in std)
        if len(mean) != len(std) or not usable:
            raise ValueError("its mean and std are not finite, or a std is not above 0")
        return cls(str(content["backbone"]), n_classes, mean, std, drop_rate, head)


@dataclass(frozen=True)
class AsGiven:
    """Undoes the standardization of vectors; changes nothing by itself."""

    std: Tensor = field(default_factory=lambda: torch.ones(1))
    mean: Tensor = field(default_factory=lambda: torch.zeros(1))

    def __call__(self, features: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return features * self.std.to(features) + self.mean.to(features)


class Classifier(nn.Module):
    """h_w: images or vectors to class logits, through features that the head is linear in."""

    kind: ClassVar[str] = "classifier"  # what a checkpoint says that it holds; each subclass has its own

    mean: Tensor
    std: Tensor

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__()
        self.spec = spec
        if is_hooked(spec.backbone):
            self.backbone: Backbone = HookedBackbone(spec.backbone, len(spec.mean), spec.n_classes, spec.head)
        else:
            self.backbone = build_backbone(spec.backbone, len(spec.mean), spec.drop_rate)
        self.head = self.backbone.new_head(spec.n_classes)
        # part of the spec, so not of the weights
        self.takes_vectors = takes_vectors(spec.backbone)
        shape = (-1,) if self.takes_vectors else (-1, 1, 1)
        self.register_buffer("mean", torch.tensor(spec.mean).view(shape), persistent=False)
        self.register_buffer("std", torch.tensor(spec.std).view(shape), persistent=False)
        self.to(memory_format=self.backbone.memory_format)

    @classmethod
    def on_top_of(cls: type[C], classifier: "Classifier") -> C:
        """Start from a trained classifier; only what that has not got keeps its random weights."""
        network = cls(classifier.spec)
        network.load_state_dict(classifier.state_dict(), strict=False)
        return network

    @property
    def n_features(self) -> int:
        return self.head.in_features

    def normalised(self, samples: Inputs) -> Float[Tensor, "n *shape"]:
        """The input of the backbone."""
        scaled = samples.float() if self.takes_vectors else samples.float() / 255
        return (scaled - self.mean) / self.std

    def features(self, samples: Inputs) -> Float[Tensor, "n d"]:
        """The input of the head."""
        return self.features_of_normalised(self.normalised(samples))

    def features_of_normalised(self, normalised: Float[Tensor, "n *shape"]) -> Float[Tensor, "n d"]:
        features: Tensor = self.backbone(normalised)
        return features

    def class_logits(self, features: Float[Tensor, "n d"]) -> Float[Tensor, "n k"]:
        logits: Tensor = self.head(features)
        return logits

    @property
    def as_given(self) -> AsGiven:
        """Features before they were standardized, where they are the vectors themselves."""
        return AsGiven(self.std.cpu(), self.mean.cpu()) if self.spec.backbone == LINEAR else AsGiven()

    def logits_of_normalised(self, normalised: Float[Tensor, "n *shape"]) -> Float[Tensor, "n k"]:
        """Class logits of samples that are normalised already, for gradients w.r.t. them."""
        return self.class_logits(self.features_of_normalised(normalised))

    def features_and_logits(self, samples: Inputs) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n k"]]:
        features = self.features(samples)
        return features, self.class_logits(features)

    def forward(self, samples: Inputs) -> Float[Tensor, "n k"]:
        return self.features_and_logits(samples)[1]


class OodClassifier(Classifier):
    """g_θ: a classifier with one more linear output, positive for ID data (Section 3.2)."""

    kind = "ood-classifier"

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self.ood_head = nn.Linear(self.n_features, 1)

    def forward(self, samples: Inputs) -> tuple[Float[Tensor, "n k"], Float[Tensor, " n"]]:  # type: ignore[override]
        """Class logits and the OOD logit, higher = more ID-like."""
        features = self.features(samples)
        return self.head(features), self.ood_head(features).squeeze(1)


class _ShapesOnly(TorchFunctionMode):
    """Leaves out drawing normal numbers: on the meta device torch would load its compiler for that, in 6 s."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.normal_ else func(*args, **(kwargs or {}))


def with_weights(backbone: str, build: Callable[[], M], tensors: Mapping[str, Tensor]) -> M:
    """A network of a file. A ValueError or RuntimeError: its weights are others.

    Names and shapes are compared before any memory is used for weights: a file may declare what it does not hold.
    """
    if not import_path(backbone):  # custom code need not be able to run without memory
        size, wanted = wide_resnet_size(backbone), None
        if size is None or size[0] <= len(tensors):
            with torch.device("meta"), _ShapesOnly():
                wanted = {name: tensor.shape for name, tensor in build().state_dict().items()}
        if wanted != {name: tensor.shape for name, tensor in tensors.items()}:
            raise ValueError(f"its weights are not those of {backbone}")
    network = build()
    network.load_state_dict(tensors)
    return network


def check_custom_head(network: Classifier) -> None:
    """A custom network that is used without training must bring a head for just these classes."""
    backbone, n_classes = network.backbone, network.spec.n_classes
    if isinstance(backbone, HookedBackbone) and backbone.n_given_classes != n_classes:
        raise ModelError(
            f"{network.spec.head}, the head of {backbone.name}, is for {backbone.n_given_classes} classes, the data "
            f"have {n_classes}, so it cannot be used without training; set train_id.epochs to 1 or more, or freeze it"
        )
