"""`salcli init` on the command line: what it says, what it plans for vectors and networks, and what it refuses."""

import urllib.request
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.cli import init, refused
from helpers.custom_images import NETWORK, lay_out, options, save
from torchvision import models

RNG = np.random.default_rng(0)


def test_it_says_what_it_created_and_what_comes_next(tmp_path: Path) -> None:
    said, _ = init(tmp_path / "b c")
    assert f"created in {tmp_path}/b c: params.yaml, dvc.yaml, " in said
    assert "no git repository: fine for dvc repro; for dvc exp, git init && dvc config core.no_scm false" in said
    assert said.endswith(f"next: cd '{tmp_path}/b c' && dvc repro")
    assert "data to fetch" not in said


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


def table(path: Path, n: int, *, labeled: bool = False, start: int = 0) -> Path:
    labels = np.arange(n) % 2
    vectors = RNG.normal(size=(n, 6)).astype(np.float32) + 3 * labels[:, None]
    vectors[:, 5] = 1  # constant
    columns = {"text": [f"sentence {i}" for i in range(n)], "key": [f"r{start + i}" for i in range(n)]}
    columns |= {"topic": [("sport", "art")[k] for k in labels]} if labeled else {}
    pq.write_table(pa.table({"embedding": list(vectors), **columns}), path)
    return path


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    table(tmp_path / "train.parquet", 400, labeled=True)
    table(tmp_path / "may.parquet", 30, start=1000)
    table(tmp_path / "june.parquet", 20, start=2000)
    table(tmp_path / "odd.parquet", 10, start=3000)
    return tmp_path


def of(folder: Path, *names: str) -> list[str]:
    labeled, *wild = (str(folder / name) for name in names)
    return ["--no-dvc", "--id", labeled, *(part for path in wild for part in ("--wild", path))]


def test_tables_of_embeddings_make_a_project(tables: Path) -> None:
    """With a vector of the ID data in the wild data, and with two wild files."""
    copied = pq.read_table(tables / "train.parquet").slice(7, 1).select(["embedding", "text", "key"])
    copied = copied.set_column(2, "key", [["copy"]])
    pq.write_table(pa.concat_tables([pq.read_table(tables / "june.parquet"), copied]), tables / "june.parquet")
    columns = ["--vector", "embedding", "--label", "topic", "--row-id", "key", "--show", "text"]
    files = [*of(tables, "train.parquet", "may.parquet", "june.parquet"), "--test-ood", str(tables / "odd.parquet")]
    said, params = init(tables / "d", *files, *columns, "--set", "seeds=[3]", "--ci", "github")
    for words in (
        "train: 400 vectors 6 dimensions", "art, sport 200 vectors each", "wild: 51 vectors", "odd: 10 vectors",
        "1 vectors of wild, left out in train too: copy", "train 50%, calibration 30%, test 20% 200 and 120 vectors",
        "a linear head, fitted in full", "left out, because they train on images: csi, knn-plus, step",
        "note: 1 of 6 dimensions are constant", "time about",
        f"note: a CI runner will not have {tables}/train.parquet, ",
    ):  # fmt: skip
        assert words in said
    data = params.data
    assert data.custom["wild"] == (str(tables / "may.parquet"), str(tables / "june.parquet"))
    assert data.columns.model_dump() == {"vector": "embedding", "label": "topic", "id": "key", "show": ("text",)}
    assert (data.image_size, data.channels, data.pi, data.id_shares.wild) == (None, None, ("unknown",), 0)
    assert (params.model.backbone, params.train_id.solver, params.train_ood.solver) == ("linear", "lbfgs", "lbfgs")
    assert (params.seeds, params.rivals, params.train_id.penalty) == ((3,), (), "auto")


def test_arrays_make_a_project_and_enough_samples_are_held_out(tmp_path: Path) -> None:
    x, y = RNG.normal(size=(4000, 3)), np.arange(4000) % 4
    np.savez(tmp_path / "train.npz", x=x, y=y)
    np.save(tmp_path / "wild.npy", RNG.normal(size=(9, 3)).astype(np.float16))
    _, params = init(tmp_path / "d", *of(tmp_path, "train.npz", "wild.npy"), "--model", "mlp")
    assert (params.model.backbone, params.train_id.solver, params.train_id.augment) == ("mlp", "sgd", "none")
    assert params.data.id_shares.calibration == 0.1
    _, params = init(tmp_path / "e", *of(tmp_path, "train.npz", "wild.npy"))
    assert params.data.id_shares.calibration == 0.12, "500 of 4,000: a linear head needs few for training"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--vector", "embeding"], "has no column embeding (did you mean embedding?)"),
        (["--frozen"], "--frozen is for images;"),
        (["--model", "resnet18"], "--model resnet18 takes images; for vectors use linear or mlp"),
        (["--wild", "./may.parquet"], "--wild may.parquet is given twice; name each path once"),
        (["--test-ood", "odd.parquet", "--test-ood", "./odd.parquet"], "--test-ood odd.parquet is given twice"),
        (["--test-ood", "photos/labeled"], "a project is about one kind"),
        (["--test-ood", "other.npy"], "have 6 dimensions, those of other.npy 3; all must come from the same encoder"),
        (["--test-ood", "train.parquet"], "all 400 vectors of train.parquet are also in train (equal values)"),
    ],
)
def test_what_does_not_fit_vectors_is_refused(
    tables: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], reason: str
) -> None:
    monkeypatch.chdir(tables)
    lay_out(tables, n_labeled=4)
    np.save(tables / "other.npy", RNG.normal(size=(5, 3)))
    given = ["--id", "train.parquet", "--wild", "may.parquet", "--label", "topic"]
    assert reason in refused("init", "d", *given, *arguments, root=tables)


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A custom network, its weights (for 7 classes) and photos in the current folder."""
    monkeypatch.chdir(tmp_path)
    lay_out(tmp_path)
    module = f"net{RNG.integers(1 << 40):x}"  # that no other test has imported
    trained = "def trained():\n    return torch.manual_seed(0) and Net()\n"
    (tmp_path / f"{module}.py").write_text(NETWORK + trained)
    scope: dict[str, type[torch.nn.Module]] = {}
    exec(NETWORK, scope)
    torch.save(scope["Net"]().state_dict(), tmp_path / "net.pt")
    return module


EXPECTED = ["--mean", "0.5", "--std", "0.25", "--image-size", "8", "--set", "data.channels=1"]


def test_a_frozen_network_embeds_every_image(code: str, tmp_path: Path) -> None:
    frozen = ["--model", f"{code}:Net", "--frozen", "--weights", "net.pt", *EXPECTED]
    said, params = init(tmp_path / "d", *options(Path("photos")), *frozen)
    assert f"{code}:Net, frozen, head out as you named it; net.pt" in said
    assert "images a second" in said
    model = params.model
    assert (model.frozen, model.weights, model.head) == (True, str(tmp_path / "net.pt"), "out")
    assert (model.mean, model.std, model.code) == ((0.5,), (0.25,), str(tmp_path))
    assert (params.train_id.solver, params.train_ood.solver, params.data.image_size) == ("lbfgs", "lbfgs", 8)


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
    assert ".pth, and give --model torchvision:efficientnet_b0 --frozen --weights FILE; or" in message
    named = ["--model", "torchvision:resnet18", "--frozen", "--weights", "nope.pt"]
    assert "error: nope.pt does not exist; give the path of a" in refused("init", "d", *photos, *named, root=tmp_path)
    assert "train one from scratch: --model torchvision:resnet18; an epoch of 11 images takes about " in message
    said, params = init(tmp_path / "d", *photos, "--model", "torchvision:resnet18", "--image-size", "32")
    assert "note: torchvision:resnet18 is trained from scratch, because it has no pretrained weights here" in said
    assert (params.model.weights, params.train_id.epochs) == (None, 30)


def test_photos_with_weights_are_embedded_and_a_named_network_is_fine_tuned(photos: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    for name in ("efficientnet_b0", "resnet18"):
        published = models.get_model_weights(name).DEFAULT.url.rpartition("/")[2]
        torch.save(models.get_model(name, weights=None).state_dict(), folder / published)
    said, params = init(tmp_path / "d", *photos)
    assert "torchvision:efficientnet_b0, frozen photos and no GPU" in said
    assert "shorter side to 256, then 224 × 224 what its weights were trained with" in said
    assert (params.model.frozen, params.model.weights, params.data.image_size) == (True, "pretrained", None)
    said, params = init(tmp_path / "e", *photos, "--model", "torchvision:resnet18")
    assert "fine-tuned from its published weights" in said
    assert (params.model.frozen, params.model.weights, params.data.image_size) == (False, "pretrained", 224)
    assert (params.train_id.epochs, params.train_id.lr, params.model.mean) == (
        15,
        0.01,
        "auto",
    )  # few images: 4 are few steps

    elsewhere = folder / published  # the same file, by its path
    said, params = init(tmp_path / "f", *photos, "--model", "torchvision:resnet18", "--weights", str(elsewhere))
    assert "224 × 224, 3 channels what its weights were trained with" in said
    assert "not known" not in said
    assert (params.data.image_size, params.train_id.epochs, params.train_id.lr) == (224, 15, 0.01)
    untouched = refused(
        "init", "h", *photos, "--model", "torchvision:resnet18", "--set", "train_id.epochs=0", root=tmp_path
    )
    assert "torchvision:resnet18 has no such head: leave it out, or add --frozen" in untouched
    renamed = elsewhere.rename(tmp_path / "mine.pth")
    said, params = init(tmp_path / "g", *photos, "--model", "torchvision:resnet18", "--weights", str(renamed))
    assert "not known what its weights were trained with, so the input is a guess: images of 64" in said
    assert params.data.image_size == 64


TRAINED = """
import torch
def trained():  # as a package with its weights would return it, with a new head
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(8), torch.nn.Flatten(), torch.nn.Linear(192, 16))
    torch.random.set_rng_state(state)
    network.append(torch.nn.Linear(16, 2))
    network.default_cfg = dict(input_size=(3, 48, 48), crop_pct=1, interpolation="bilinear",
                               mean=[0.4] * 3, std=[0.2] * 3)
    return network
"""


def test_code_that_returns_a_trained_network_is_fine_tuned_with_what_it_expects(
    photos: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = f"net{RNG.integers(1 << 40):x}"
    (tmp_path / f"{module}.py").write_text(TRAINED)
    said, params = init(tmp_path / "d", *photos, "--model", f"{module}:trained")
    assert "fine-tuned from the weights that it comes with (the same each time)" in said
    assert "48 × 48, 3 channels what its weights were trained with" in said
    assert (params.train_id.epochs, params.train_id.lr, params.train_ood.lr) == (30, 0.01, 0.001)
    assert (params.model.mean, params.model.std) == ((0.4,) * 3, (0.2,) * 3)
