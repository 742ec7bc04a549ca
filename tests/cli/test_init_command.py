"""`salcli init` on the command line: what it prints, which options belong together, and its exit codes."""

import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.cli import refused, salcli
from helpers.custom_images import options, save
from torchvision import models

from salcli.params.schema import Params, load_params


def init(folder: Path, *arguments: str) -> str:
    result = salcli("init", str(folder), *arguments)
    assert result.exit_code == 0, result.stderr
    tables = [
        line for line in result.stdout.splitlines() if not line.startswith(("created", "next", "note", "warning"))
    ]
    assert all(len(line) <= 100 for line in tables)
    return str(result.stdout)


def test_it_says_what_it_created_and_what_comes_next(tmp_path: Path) -> None:
    shown = init(tmp_path / "b c")
    assert f"created in {tmp_path}/b c: params.yaml, dvc.yaml, " in shown
    assert "no git repository: fine for dvc repro; for dvc exp, git init && dvc config core.no_scm false\n" in shown
    assert shown.endswith(f"next: cd '{tmp_path}/b c' && dvc repro\n")
    assert "data to fetch" not in shown


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--preset", "toyy"], "no preset is called toyy (did you mean toy?)"),
        (["--set", "seedz=1"], "seedz  no such key (did you mean seeds?)"),
        (["--id", "x"], "--id needs --wild as well"),
        (["--id", "x", "--wild", "y", "--preset", "cifar10"], "--preset cifar10 is for published data"),
    ],
)
def test_a_mistake_leaves_no_folder_behind(tmp_path: Path, arguments: list[str], reason: str) -> None:
    message = refused("init", str(tmp_path / "a" / "b"), *arguments, root=tmp_path)
    assert message.startswith("error: ")
    assert reason in message
    assert list(tmp_path.iterdir()) == []


# --- photos, and networks whose weights are published


def planned(folder: Path, *arguments: str) -> tuple[str, Params]:
    """What is said, in one line, and params.yaml."""
    return " ".join(init(folder, *arguments).split()), load_params(folder / "params.yaml")[0]


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Photos of 80 pixels, no GPU, no network, and an empty cache of weights: the options of `init`."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setattr(urllib.request, "_opener", None)  # it keeps the proxies of its first use
    rng = np.random.default_rng(0)
    for i in range(16):
        pixels = rng.integers(0, 256, (80, 80, 3), dtype=np.uint8)
        save(tmp_path / "photos" / ("labeled/a", "labeled/b", "unlabeled")[i % 3] / f"{i}.png", pixels)
    return [*options(tmp_path / "photos"), "--set", "device=cpu"]


def test_photos_without_weights_get_two_ways_out(photos: list[str], tmp_path: Path) -> None:
    message = refused("init", str(tmp_path / "d"), *photos, root=tmp_path)
    for words in ("photos, and there is no GPU", "efficientnet_b0_rwightman-7f5810bc.pth", f"{tmp_path}/cache/hub"):
        assert words in message
    assert "train one from scratch, about " in message
    assert "--model torchvision:resnet18" in message
    said, params = planned(tmp_path / "d", *photos, "--model", "torchvision:resnet18", "--image-size", "32")
    assert "note: torchvision:resnet18 is trained from scratch, because it has no pretrained weights here" in said
    assert (params.model.weights, params.train_id.epochs) == (None, 30)


def test_photos_with_weights_are_embedded_and_a_named_network_is_fine_tuned(photos: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    for name in ("efficientnet_b0", "resnet18"):
        published = models.get_model_weights(name).DEFAULT.url.rpartition("/")[2]
        torch.save(models.get_model(name, weights=None).state_dict(), folder / published)
    said, params = planned(tmp_path / "d", *photos)
    assert "torchvision:efficientnet_b0, frozen photos and no GPU" in said
    assert "shorter side to 256, then 224 × 224 what its weights were trained with" in said
    assert (params.model.frozen, params.model.weights, params.data.image_size) == (True, "pretrained", None)
    said, params = planned(tmp_path / "e", *photos, "--model", "torchvision:resnet18")
    assert "fine-tuned from its published weights" in said
    assert (params.model.frozen, params.model.weights, params.data.image_size) == (False, "pretrained", 224)
    assert (params.train_id.epochs, params.train_id.lr, params.model.mean) == (4, 0.01, "auto")
