"""Backbones: networks from images or vectors to features, without the linear head, and their names in params.yaml.

Wide ResNets and ResNets name their layers as the usual PyTorch code for CIFAR does, so that published state dicts fit.
The order in which layers are built fixes the random weights of a seed.
"""

import re
from collections.abc import Callable
from types import ModuleType
from typing import Final

import torch
from jaxtyping import Float
from torch import OutOfMemoryError, Tensor, nn
from torch.nn import functional

from salcli.errors import ModelError, UnknownNameError, unknown_name

Images = Float[Tensor, "n c h w"]  # normalised
Vectors = Float[Tensor, "n inputs"]  # standardized
Features = Float[Tensor, "n d"]


class Backbone(nn.Module):
    """Normalised images to features. The linear head is not part of it."""

    n_features: int

    # How published weights of this network name their parts (see salcli/models/given_weights.py).
    weights_prefix: str = ""  # stands before our names and not before theirs
    head_names: tuple[str, ...] = ("fc", "linear", "classifier")
    unused_weights: tuple[str, ...] = ()  # prefixes of names that have no counterpart here
    head_has_bias: bool = True

    memory_format = torch.channels_last  # faster for convolutions, on CPUs and GPUs

    def new_head(self, n_classes: int) -> nn.Linear:
        return nn.Linear(self.n_features, n_classes)

    @property
    def level_widths(self) -> tuple[int, ...]:
        """Widths of the features that `levels` returns."""
        return (self.n_features,)

    def levels(self, images: Images) -> tuple[Features, ...]:
        """Features of several depths; the last are those that `forward` returns."""
        return (self(images),)


class Linear(Backbone):
    """No layers: the features are the standardized vectors, and only heads are trained."""

    memory_format = torch.contiguous_format

    def __init__(self, n_inputs: int) -> None:
        super().__init__()
        self.n_features = n_inputs

    def forward(self, vectors: Vectors) -> Features:
        return vectors


class Mlp(Backbone):
    """Two hidden layers on vectors: narrow ones for points in the plane, wider ones for embeddings."""

    memory_format = torch.contiguous_format

    def __init__(self, n_inputs: int) -> None:
        super().__init__()
        self.n_features = 32 if n_inputs <= 32 else 256
        self.layers = nn.Sequential(
            nn.Linear(n_inputs, self.n_features),
            nn.ReLU(),
            nn.Linear(self.n_features, self.n_features),
            nn.ReLU(),
        )

    def forward(self, vectors: Vectors) -> Features:
        features: Tensor = self.layers(vectors)
        return features


class SmallCnn(Backbone):
    """Three convolutions and one pooling: for small gray images, quick on a laptop's CPU."""

    n_features = 64
    level_widths = (32, 64, 64)

    def __init__(self, in_channels: int) -> None:
        super().__init__()

        def block(n_in: int, n_out: int) -> nn.Sequential:
            convolution = nn.Conv2d(n_in, n_out, kernel_size=3, padding=1, bias=False)
            return nn.Sequential(convolution, nn.BatchNorm2d(n_out), nn.ReLU())

        self.layers = nn.Sequential(
            block(in_channels, 32),
            block(32, 64),
            nn.MaxPool2d(2),
            block(64, self.n_features),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )

    def forward(self, images: Images) -> Features:
        features: Tensor = self.layers(images)
        return features

    def levels(self, images: Images) -> tuple[Features, ...]:
        """After each convolution."""
        first = self.layers[0](images)
        second = self.layers[1](first)
        return _mean_over_pixels(first), _mean_over_pixels(second), self.layers[2:](second)


class ResNet(Backbone):
    """He et al., 2016, for small images: a 3×3 stem and no pooling before the last one.

    Four groups of basic blocks with 64 to 512 channels; (2, 2, 2, 2) blocks make a ResNet-18.
    """

    n_features = 512
    level_widths = (64, 64, 128, 256, 512)

    def __init__(self, n_blocks: tuple[int, int, int, int], in_channels: int) -> None:
        super().__init__()

        def group(n_blocks: int, n_in: int, n_out: int, stride: int) -> nn.Sequential:
            first = BasicBlock(n_in, n_out, stride)
            return nn.Sequential(first, *(BasicBlock(n_out, n_out, 1) for _ in range(n_blocks - 1)))

        self.conv1 = nn.Conv2d(in_channels, 64, kernel_size=3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = group(n_blocks[0], 64, 64, stride=1)
        self.layer2 = group(n_blocks[1], 64, 128, stride=2)
        self.layer3 = group(n_blocks[2], 128, 256, stride=2)
        self.layer4 = group(n_blocks[3], 256, 512, stride=2)
        _initialise_convolutions(self)

    def forward(self, images: Images) -> Features:
        maps = self.layer4(self.layer3(self.layer2(self.layer1(self._stem(images)))))
        return functional.adaptive_avg_pool2d(maps, 1).flatten(1)

    def levels(self, images: Images) -> tuple[Features, ...]:
        """After the stem and after each group."""
        maps = [self._stem(images)]
        for group in (self.layer1, self.layer2, self.layer3, self.layer4):
            maps.append(group(maps[-1]))
        return tuple(_mean_over_pixels(some) for some in maps)

    def _stem(self, images: Images) -> Tensor:
        return functional.relu(self.bn1(self.conv1(images)), inplace=True)


class BasicBlock(nn.Module):
    """Convolution, BN, ReLU, convolution, BN; plus a shortcut; then ReLU."""

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
        residual = functional.relu(self.bn1(self.conv1(maps)), inplace=True)
        residual = self.bn2(self.conv2(residual))
        return functional.relu(residual + self.shortcut(maps), inplace=True)


class WideResNet(Backbone):
    """WRN-d-w of Zagoruyko & Komodakis, 2016: the paper's WRN-40-2 for 32×32 images.

    A stem, three groups of (d - 4) / 6 pre-activation blocks with 16w, 32w and 64w channels, and the mean.
    """

    def __init__(self, depth: int, width: int, in_channels: int, drop_rate: float = 0.0) -> None:
        super().__init__()
        n_blocks = (depth - 4) // 6
        self.n_features = 64 * width
        self.conv1 = nn.Conv2d(in_channels, 16, kernel_size=3, padding=1, bias=False)
        self.block1 = _WideGroup(n_blocks, 16, 16 * width, 1, drop_rate)
        self.block2 = _WideGroup(n_blocks, 16 * width, 32 * width, 2, drop_rate)
        self.block3 = _WideGroup(n_blocks, 32 * width, 64 * width, 2, drop_rate)
        self.bn1 = nn.BatchNorm2d(64 * width)
        _initialise_convolutions(self)

    def forward(self, images: Images) -> Features:
        return self._pooled(self.block3(self.block2(self.block1(self.conv1(images)))))

    @property
    def level_widths(self) -> tuple[int, ...]:
        return 16, self.n_features // 4, self.n_features // 2, self.n_features

    def levels(self, images: Images) -> tuple[Features, ...]:
        """After the stem, after the first two groups, and the features."""
        stem = self.conv1(images)
        first = self.block1(stem)
        second = self.block2(first)
        return *(_mean_over_pixels(maps) for maps in (stem, first, second)), self._pooled(self.block3(second))

    def _pooled(self, maps: Tensor) -> Tensor:
        activated = functional.relu(self.bn1(maps), inplace=True)
        return functional.adaptive_avg_pool2d(activated, 1).flatten(1)


class WideBlock(nn.Module):
    """BN, ReLU, convolution, twice, with dropout in between; plus a shortcut."""

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
        activated = functional.relu(self.bn1(maps), inplace=True)
        inner = functional.relu(self.bn2(self.conv1(activated)), inplace=True)
        residual: Tensor = self.conv2(functional.dropout(inner, self.drop_rate, self.training))
        # a shortcut that changes the shape starts after the first activation, the identity before it
        return residual + (maps if self.convShortcut is None else self.convShortcut(activated))


class _WideGroup(nn.Module):
    """Blocks of one resolution; the first of them changes it."""

    def __init__(self, n_blocks: int, n_in: int, n_out: int, stride: int, drop_rate: float) -> None:
        super().__init__()
        first = WideBlock(n_in, n_out, stride, drop_rate)
        self.layer = nn.Sequential(first, *(WideBlock(n_out, n_out, 1, drop_rate) for _ in range(n_blocks - 1)))

    def forward(self, maps: Tensor) -> Tensor:
        changed: Tensor = self.layer(maps)
        return changed


def _mean_over_pixels(maps: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c"]:
    return maps.mean(dim=(2, 3))


def _initialise_convolutions(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class TorchvisionBackbone(Backbone):
    """An image classifier of torchvision.models with random weights, without its last linear layer.

    Gray images are shown in three equal channels.
    """

    N_CLASSES = 1000
    WITH_AUXILIARY_HEADS = ("googlenet", "inception_v3")

    weights_prefix = "body."
    unused_weights = ("aux1.", "aux2.", "AuxLogits.")

    def __init__(self, name: str, in_channels: int, image_size: int | None) -> None:
        super().__init__()
        if in_channels not in (1, 3):
            raise ModelError(f"torchvision:{name} takes images with 1 or 3 channels, got {in_channels}")
        self.name = name
        # those with auxiliary heads for training warn if nothing says how to initialise them
        options: dict[str, int] = (
            {"aux_logits": False, "init_weights": True} if name in self.WITH_AUXILIARY_HEADS else {}
        )
        if image_size is not None and name.startswith("vit_"):
            options["image_size"] = image_size
        self.body: nn.Module = torchvision_models(name).get_model(
            name, weights=None, num_classes=self.N_CLASSES, **options
        )
        linears = [(path, layer) for path, layer in self.body.named_modules() if isinstance(layer, nn.Linear)]
        if not linears or linears[-1][1].out_features != self.N_CLASSES:
            raise ModelError(
                f"torchvision:{name} does not end in a linear layer, whose gradients SAL needs; "
                "use a model that does, for example torchvision:resnet50"
            )
        head_name, head = linears[-1]
        self.n_features = head.in_features
        self.head_names, self.head_has_bias = (head_name, *Backbone.head_names), head.bias is not None
        self.body.set_submodule(head_name, nn.Identity())

    def forward(self, images: Images) -> Features:
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


def torchvision_models(name: str) -> ModuleType:
    """torchvision.models, if it has an image classifier of that name."""
    from torchvision import models  # takes longer to import than torch itself, and few networks need it

    classifiers = models.list_models(module=models)
    if name not in classifiers:
        if name in models.list_models():  # building some of these would even start a download
            raise ModelError(
                f"torchvision:{name} is not an image classifier; use one, for example torchvision:resnet50"
            )
        raise unknown_name("torchvision classifier", name, classifiers)
    found: ModuleType = models
    return found


AUTO: Final = "auto"  # of many keys in params.yaml: chosen by salcli
LINEAR = "linear"
OF_VECTORS: dict[str, Callable[[int], Backbone]] = {LINEAR: Linear, "mlp": Mlp}  # given the number of dimensions
# name → builder, given the number of channels
FIXED: dict[str, Callable[[int], Backbone]] = {
    **OF_VECTORS,
    "resnet18": lambda in_channels: ResNet((2, 2, 2, 2), in_channels),
    "resnet34": lambda in_channels: ResNet((3, 4, 6, 3), in_channels),
    "small-cnn": SmallCnn,
}
EXAMPLES = ("wrn-40-2", "wrn-28-10", "wrn-16-4", "torchvision:resnet50")  # of the other names, for error messages
TORCHVISION, TIMM = "torchvision:", "timm:"
DEEPEST, MOST_WEIGHTS = 1_000, 500_000_000  # of a wide ResNet: a name may come from a stranger's file
IMPORT_PATH = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*(\.[^\W\d]\w*)*)")


def build_backbone(name: str, in_channels: int, drop_rate: float = 0.0, image_size: int | None = None) -> Backbone:
    """A backbone of ours or torchvision's with random weights, drawn from torch's global generator.

    Others are built by salcli/models/custom.py. A drop rate that the network cannot use is refused, so that nobody
    relies on a regulariser that is not there. `image_size`: for vision transformers, whose weights are for one size.
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
        return TorchvisionBackbone(model, in_channels, image_size)
    return FIXED[name](in_channels)


def check_backbone_name(name: str) -> str:
    """The name itself, if it has the form of a backbone's name. Libraries and custom code are not searched for it."""
    if name in FIXED or wide_resnet_size(name) is not None or torchvision_name(name) is not None or is_hooked(name):
        return name
    error = unknown_name("backbone", name, [*FIXED, *EXAMPLES])
    raise UnknownNameError(f"{error}, any other wrn-DEPTH-WIDTH, torchvision:NAME, timm:NAME, MODULE:NAME")


def takes_vectors(name: str) -> bool:
    """Whether the backbone is one of vectors rather than images."""
    return name in OF_VECTORS


def is_hooked(name: str) -> bool:
    """Whether it is a network of timm or a custom one, whose features are taken with a hook (HookedBackbone)."""
    return timm_name(name) is not None or import_path(name) is not None


def import_path(name: str) -> tuple[str, str] | None:
    """(MODULE, NAME) of MODULE:NAME, or None if the name has another form. Nothing else is ever imported."""
    matched = IMPORT_PATH.fullmatch(name)
    if not matched or is_published(name):
        return None
    return matched["module"], matched["name"]


def is_published(name: str) -> bool:
    """Whether it is a network of torchvision or timm, which publish weights."""
    return name.startswith((TORCHVISION, TIMM))


def timm_name(name: str) -> str | None:
    """NAME of timm:NAME, or None if the name has another form."""
    return _after(TIMM, name, "timm:resnet18")


def torchvision_name(name: str) -> str | None:
    """NAME of torchvision:NAME, or None if the name has another form."""
    return _after(TORCHVISION, name, "torchvision:resnet50")


def _after(prefix: str, name: str, example: str) -> str | None:
    if not name.startswith(prefix):
        return None
    if name == prefix:
        raise ModelError(f"{prefix} must be followed by a model's name, for example {example}")
    return name.removeprefix(prefix)


def wide_resnet_size(name: str) -> tuple[int, int] | None:
    """(DEPTH, WIDTH) of wrn-DEPTH-WIDTH, or None if the name has another form."""
    matched = re.fullmatch(r"wrn-([0-9]{1,6})-([0-9]{1,6})", name)
    if not matched:
        return None
    depth, width = int(matched[1]), int(matched[2])
    if depth < 10 or depth % 6 != 4:  # three groups of n blocks with two convolutions each, and four more layers
        nearest = 6 * max(1, round((depth - 4) / 6)) + 4
        raise ModelError(
            f"a wide ResNet's depth must be 6n + 4 with n of at least 1, got {depth}; use wrn-{nearest}-{max(width, 1)}"
        )
    if width < 1:
        raise ModelError(f"a wide ResNet's width must be at least 1, got {width}; use wrn-{depth}-1 or a wider one")
    n_weights = 3 * (depth - 4) * (16 * width) ** 2 * (1 + 4 + 16)  # 3×3 convolutions of three groups
    if depth > DEEPEST or n_weights > MOST_WEIGHTS:
        raise ModelError(
            f"{name} is beyond depth {DEEPEST:,} or {MOST_WEIGHTS:,} weights; use a smaller one, such as wrn-40-2"
        )
    return depth, width
