"""Pretrained networks: the weights that torchvision and timm publish, what they expect of an image, frozen backbones.

What an image must look like is never guessed: the library says it, the network says it, or the user does.
"""

import math
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, get_args
from urllib.parse import urlsplit

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from salcli.errors import ModelError, WeightsError
from salcli.models.backbones import (
    AUTO,
    TIMM,
    TORCHVISION,
    Backbone,
    TorchvisionBackbone,
    build_backbone,
    check_backbone_name,
    import_path,
    is_hooked,
    is_published,
    takes_vectors,
    timm_name,
    torchvision_models,
    torchvision_name,
)
from salcli.models.custom import HookedBackbone, build_network, describe_failure, find_head, make_importable, timm_with
from salcli.models.given_weights import WeightsReport, check_is_file, load_backbone, load_state, read_state_dict
from salcli.models.network import Classifier

PRETRAINED: Final = "pretrained"  # model.weights: those that the library publishes
WITH_FILE: Final = "--weights FILE (in params.yaml: model.weights)"
TIMEOUT = 10.0  # seconds without an answer

Interpolation = Literal["bilinear", "bicubic"]
PerChannel = Sequence[float] | Literal["auto"]


@dataclass(frozen=True)
class Preprocessing:
    """What a network expects of an image: shorter side to `resize`, the square of `crop` in the middle, mean, std."""

    resize: int
    crop: int
    interpolation: Interpolation
    mean: tuple[float, ...]  # one for each channel, on a scale of 0 to 1
    std: tuple[float, ...]

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def margin(self) -> int:
        """Above and left of the crop, rounded as torchvision's CenterCrop does it."""
        return round((self.resize - self.crop) / 2)


@dataclass(frozen=True)
class EmbedderSpec:
    """All that is needed to build an embedder again, except its weights."""

    backbone: str
    head: str | None  # the last linear layer of a custom or timm network, whose input is the embedding
    preprocessing: Preprocessing

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "EmbedderSpec":
        """The inverse of dataclasses.asdict and JSON."""
        values = dict(content["preprocessing"])
        values |= {name: tuple(values[name]) for name in ("mean", "std")}
        return cls(content["backbone"], content["head"], Preprocessing(**values))


# --- frozen backbones


class Embedder(nn.Module):
    """A frozen backbone: images as they are decoded → features. Always in eval mode, without gradients.

    Crops and normalises the images itself. The random weights that it starts with are the same each time.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, spec: EmbedderSpec, network: nn.Module | None = None) -> None:
        """`network`: a custom or timm network that is built already. It is changed."""
        super().__init__()
        self.spec = spec
        wanted = spec.preprocessing
        with _seeded():
            if is_hooked(spec.backbone):
                self.backbone: Backbone = HookedBackbone(spec.backbone, wanted.channels, None, spec.head, network)
            else:
                self.backbone = build_backbone(spec.backbone, wanted.channels, image_size=wanted.crop)
        if timm_name(spec.backbone) is not None:  # custom code may rely on the usual order
            self.backbone.memory_format = torch.channels_last
        self.n_features = self.backbone.n_features
        # part of the spec, so not of the weights
        for name in ("mean", "std"):
            values = torch.tensor(getattr(wanted, name))[:, None, None]
            self.register_buffer(name, values, persistent=False)
        self.requires_grad_(False).eval()
        self.to(memory_format=self.backbone.memory_format)

    def train(self, mode: bool = True) -> "Embedder":
        """Frozen: it stays in eval mode, also as a part of a network in training."""
        return super().train(False)

    @torch.no_grad()  # not inference_mode: heads that are trained, and ONNX, need ordinary tensors
    def forward(self, images: Num[Tensor, "n c h w"]) -> Float[Tensor, "n d"]:
        """Features of images from 0 to 255, of size `resize` or cropped already; gray ones also for 3 channels."""
        features: Tensor = self.backbone(self.normalised(images))
        return features.float()

    def normalised(self, images: Num[Tensor, "n c h w"]) -> Float[Tensor, "n k crop crop"]:
        """The input of the backbone, computed in the same order as in torchvision."""
        wanted = self.spec.preprocessing
        channels, height, width = images.shape[1:]
        if height != width or height not in (wanted.resize, wanted.crop) or channels not in (1, wanted.channels):
            raise ModelError(
                f"{self.spec.backbone} takes images of {wanted.channels} × {wanted.resize} × {wanted.resize} "
                f"(channels, height, width), got {channels} × {height} × {width}"
            )
        if height != wanted.crop:
            start, stop = wanted.margin, wanted.margin + wanted.crop
            images = images[:, :, start:stop, start:stop]
        images = images.expand(-1, wanted.channels, -1, -1)
        pixels = images.to(self.mean.dtype, memory_format=self.backbone.memory_format)
        return pixels.div(255).sub_(self.mean).div_(self.std)


def build_embedder(
    backbone: str,
    *,
    weights: Path | Literal["pretrained"] | None,
    head: str | None,
    mean: PerChannel,
    std: PerChannel,
    image_size: int | None,
    code_folder: Path,
) -> Embedder:
    """The frozen backbone that params.yaml asks for, with its weights.

    A custom network (MODULE:NAME in `code_folder`) may bring its weights; others need them. `mean`, `std` and
    `image_size` replace what the weights were trained with, and must be given where that is not known.
    """
    check_backbone_name(backbone)
    if isinstance(weights, Path):
        check_is_file(weights)  # before anything is asked about what is in it
    if takes_vectors(backbone):
        raise ModelError(f"{backbone} takes vectors, so there is nothing to embed; set model.frozen to false")
    if weights is None and import_path(backbone) is None:
        fix = "pretrained or a file" if is_published(backbone) else "a file"
        raise ModelError(f"model.frozen uses {backbone} as it is, so it needs weights; set model.weights to {fix}")
    make_importable(code_folder)
    known = _of_library(backbone, weights)
    network: nn.Module | None = None
    with _seeded():
        if import_path(backbone) is not None:
            network = build_network(backbone, 3, None)
            known = _of_config(network)
        preprocessing = _settled(backbone, known, mean, std, image_size)
        if is_hooked(backbone):
            if network is None:
                network = build_network(backbone, preprocessing.channels, None)
            size = preprocessing.crop
            head = find_head(backbone, head, None, (preprocessing.channels, size, size), network)
        elif head is not None:
            raise ModelError(f"model.head is for custom networks and those of timm; {backbone} needs none")
    embedder = Embedder(EmbedderSpec(backbone, head, preprocessing), network)
    if weights is not None:
        state, source = _given(backbone, weights, preprocessing.channels)
        load_backbone(embedder.backbone, backbone, state, source)
    return embedder


@contextmanager
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


# --- preprocessing


def library_preprocessing(backbone: str, weights: Path | str | None = PRETRAINED) -> Preprocessing | None:
    """What the weights that torchvision or timm publish for it were trained with. Downloads nothing.

    A file of weights is known by its published name. None for other files and networks, for those without weights, and
    where salcli does not offer that kind of resizing.
    """
    return _if_complete(_of_library(backbone, weights))


def preprocessing_of(network: nn.Module) -> Preprocessing | None:
    """What a custom network says that it expects, in a dict like timm's `default_cfg`."""
    return _if_complete(_of_config(network))


def _if_complete(known: Mapping[str, Any]) -> Preprocessing | None:
    return Preprocessing(**known) if len(known) == len(Preprocessing.__dataclass_fields__) else None


def _of_library(backbone: str, weights: Path | str | None) -> dict[str, Any]:
    """The fields of Preprocessing that a library knows; of a file, if it is named as the library's file is."""
    if (name := torchvision_name(backbone)) is not None:
        choices = _torchvision_weights(name)
        if weights != PRETRAINED:
            choices = [one for one in choices if weights and _file_name(one.url) == Path(weights).name]
        if not choices:
            return {}
        used = choices[0].transforms()
        (resize,), (crop,) = used.resize_size, used.crop_size
        # with auxiliary heads they normalise once more (transform_input), from these numbers to mean and std of 0.5
        is_twice = name in TorchvisionBackbone.WITH_AUXILIARY_HEADS
        mean, std = ((0.5,) * 3, (0.5,) * 3) if is_twice else (tuple(used.mean), tuple(used.std))
        return {"resize": resize, "crop": crop, "interpolation": used.interpolation.value, "mean": mean, "std": std}
    if (name := timm_name(backbone)) is not None:
        config = _timm_config(name)
        named = f"{config['architecture']}.{config['tag']}" if config else ""
        if weights == PRETRAINED or (weights and Path(weights).stem == named):
            return _of_config(config)
    return {}


def _torchvision_weights(name: str) -> list[Any]:
    """Members of the enum of weights, the default first."""
    found = torchvision_models(name).get_model_weights(name)
    return sorted(found, key=lambda member: member is not found.DEFAULT)


@cache
def _timm_config(name: str) -> dict[str, Any]:
    """timm's pretrained_cfg with its defaults filled in; empty for a model without weights."""
    timm = timm_with(name)
    config = timm.get_pretrained_cfg(name)
    if config is None or not config.has_weights:
        return {}
    filled: dict[str, Any] = timm.data.resolve_data_config(pretrained_cfg=config.to_dict())
    return asdict(config) | filled


def _of_config(config: Any) -> dict[str, Any]:
    """The same from a dict as timm's networks have one, or from such a network.

    Other ways to crop than in the middle are not offered.
    """
    if isinstance(config, nn.Module):
        config = getattr(config, "pretrained_cfg", None) or getattr(config, "default_cfg", None)
    config = config if isinstance(config, Mapping) else {}
    known: dict[str, Any] = {name: tuple(map(float, config[name])) for name in ("mean", "std") if name in config}
    is_centered = config.get("crop_mode", "center") == "center"
    if not is_centered or not {"input_size", "crop_pct", "interpolation"} <= config.keys():
        return known
    _, height, width = config["input_size"]
    if height == width and config["interpolation"] in get_args(Interpolation):
        resize = math.floor(height / config["crop_pct"])  # as timm.data.create_transform does it
        known |= {"resize": resize, "crop": height, "interpolation": config["interpolation"]}
    return known


def _settled(
    backbone: str, known: Mapping[str, Any], mean: PerChannel, std: PerChannel, image_size: int | None
) -> Preprocessing:
    """What is known, replaced by what is given; nothing is left to guesses."""
    values = dict(known)
    if image_size is not None:
        values = {"interpolation": "bilinear", **values, "resize": image_size, "crop": image_size}
    values |= {name: tuple(given) for name, given in (("mean", mean), ("std", std)) if given != AUTO}
    keys = {"resize": "data.image_size", "mean": "model.mean", "std": "model.std"}
    missing = [key for name, key in keys.items() if name not in values]
    if missing:
        hint = ""
        if usual := library_preprocessing(backbone):
            texts = {"data.image_size": str(usual.crop)}
            for name in ("mean", "std"):
                texts[f"model.{name}"] = f"[{','.join(f'{value:.4g}' for value in getattr(usual, name))}]"
            hint = f" (its published weights expect {', '.join(f'{key} {texts[key]}' for key in missing)})"
        raise ModelError(f"what the weights of {backbone} expect is not known; set {', '.join(missing)}{hint}")
    settled = Preprocessing(**values)
    if settled.channels not in (1, 3) or len(settled.std) != settled.channels or min(settled.std) <= 0:
        raise ModelError(
            "model.mean and model.std must have one value for each channel, 1 or 3, and std must be positive; got "
            f"{list(settled.mean)} and {list(settled.std)}"
        )
    return settled


# --- weights


def load_given(network: Classifier, weights: Path | Literal["pretrained"]) -> WeightsReport:
    """Fill a classifier with what model.weights names: a file, or the weights that a library publishes."""
    return load_state(network, *_given(network.spec.backbone, weights, len(network.spec.mean)))


def load_pretrained(backbone: str, in_channels: int = 3) -> dict[str, Tensor]:
    """The state dict that torchvision or timm publishes, from the library's usual cache or else downloaded into it."""
    if torchvision_name(backbone) is not None:
        return _load_torchvision(backbone)
    if timm_name(backbone) is not None:
        return _load_timm(backbone, in_channels)
    raise ModelError(f"{backbone} has no published weights that salcli knows; set model.weights to a file")


def _given(backbone: str, weights: Path | str, in_channels: int) -> tuple[dict[str, Tensor], str]:
    """Tensors, and where they are from."""
    if isinstance(weights, Path):
        return read_state_dict(weights), str(weights)
    return load_pretrained(backbone, in_channels), f"the published file of {backbone}"


def _file_name(url: str) -> str:
    return Path(urlsplit(url).path).name


def _load_torchvision(backbone: str) -> dict[str, Tensor]:
    name = backbone.removeprefix(TORCHVISION)
    weights = _torchvision_weights(name)
    if not weights:
        raise WeightsError(f"torchvision publishes no weights for {name}; use another model, or a file of weights")
    url = weights[0].url
    path = Path(torch.hub.get_dir()) / "checkpoints" / _file_name(url)
    fix = f"save it as {path}, where it needs no option; elsewhere keep its name, {path.name}, and give {WITH_FILE}"
    if not path.is_file():
        with _downloading(backbone, url, fix):
            path.parent.mkdir(parents=True, exist_ok=True)
            checksum = re.search(r"-([a-f0-9]*)\.", path.name)  # part of the name, as torchvision uses it
            is_terminal = sys.stderr.isatty()
            torch.hub.download_url_to_file(url, str(path), checksum[1] if checksum else None, progress=is_terminal)
    return read_state_dict(path)


def _load_timm(backbone: str, in_channels: int) -> dict[str, Tensor]:
    name = backbone.removeprefix(TIMM)
    timm, config = timm_with(name), _timm_config(name)
    if not config:
        raise WeightsError(f"timm publishes no weights for {name}; those with weights: timm.list_pretrained()")
    url, is_cached = str(config["url"]), True
    if config["hf_hub_id"]:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
        from huggingface_hub.errors import EntryNotFoundError

        repository, _, revision = config["hf_hub_id"].partition("@")
        file = config["hf_hub_filename"] or "model.safetensors"
        url = hf_hub_url(repository, file, revision=revision or None)
        cached = [
            try_to_load_from_cache(repository, one, revision=revision or None) for one in (file, "pytorch_model.bin")
        ]
        is_cached = any(isinstance(one, str) for one in cached)
    file = f"{config['architecture']}.{config['tag']}{Path(url).suffix}"
    with _downloading(backbone, url, f"save it as {file}, and use it: {WITH_FILE}"):
        if not is_cached:  # raises at once if it is not to be had: the hub's client would try for 48 seconds
            with suppress(EntryNotFoundError):  # it answers, and may have the weights under another name
                get_hf_file_metadata(url, timeout=TIMEOUT)
        network: nn.Module = timm.create_model(name, pretrained=True, in_chans=in_channels)
    return network.state_dict()


@contextmanager
def _downloading(backbone: str, url: str, fix: str) -> Iterator[None]:
    """Without an answer torch.hub, which has no timeout, would wait for minutes.

    `fix` names the file as published, which says what the weights expect of an image (`_of_library`).
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)
    try:
        yield
    except Exception as error:  # of the hub's client, torch.hub or the system: no common class
        reason = describe_failure(error).partition("\n")[0]
        raise WeightsError(
            f"the weights of {backbone} are not on this computer and cannot be downloaded ({reason}); get {url}, "
            f"{fix}; or use weights that come as a package (docs/your-data.md)"
        ) from None
    finally:
        socket.setdefaulttimeout(before)
