"""`salcli init` for vectors and for pretrained networks: what it plans, and what it refuses before it writes."""

from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.cli import refused, salcli
from helpers.custom_images import NETWORK, lay_out, options

from salcli.params.schema import Params, load_params

RNG = np.random.default_rng(0)


def init(folder: Path, *arguments: str) -> tuple[str, Params]:
    """What is said, in one line, and params.yaml."""
    done = salcli("init", str(folder), "--no-dvc", *arguments)
    assert done.exit_code == 0, done.stderr
    return " ".join(done.stdout.split()), load_params(folder / "params.yaml")[0]


# --- vectors


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
    return ["--id", labeled, *(part for path in wild for part in ("--wild", path))]


def test_tables_of_embeddings_make_a_project(tables: Path) -> None:
    """With a vector of the ID data in the wild data, and with two wild files."""
    copied = pq.read_table(tables / "train.parquet").slice(7, 1).select(["embedding", "text", "key"])
    copied = copied.set_column(2, "key", [["copy"]])
    pq.write_table(pa.concat_tables([pq.read_table(tables / "june.parquet"), copied]), tables / "june.parquet")
    columns = ["--vector", "embedding", "--label", "topic", "--row-id", "key", "--show", "text"]
    files = [*of(tables, "train.parquet", "may.parquet", "june.parquet"), "--test-ood", str(tables / "odd.parquet")]
    said, params = init(tables / "d", *files, *columns, "--set", "seeds=[3]")
    for words in (
        "train: 400 vectors 6 dimensions", "art, sport 200 vectors each", "wild: 51 vectors", "odd: 10 vectors",
        "1 vectors of wild, left out in train too: copy", "train 50%, calibration 30%, test 20% 200 and 120 vectors",
        "a linear head, fitted in full", "left out, because they train on images: csi, knn-plus, step",
        "note: 1 of 6 dimensions are constant", "time about",
    ):  # fmt: skip
        assert words in said
    data = params.data
    assert data.custom["wild"] == (str(tables / "may.parquet"), str(tables / "june.parquet"))
    assert data.columns.model_dump() == {"vector": "embedding", "label": "topic", "id": "key", "show": ("text",)}
    assert (data.image_size, data.channels, data.pi, data.id_shares.wild) == (None, None, ("unknown",), 0)
    assert (params.model.backbone, params.train_id.solver, params.train_ood.solver) == ("linear", "lbfgs", "lbfgs")
    assert (params.seeds, params.rivals, params.train_id.penalty) == ((3,), (), "auto")
    done = salcli("prepare", "--params", str(tables / "d" / "params.yaml"))
    assert done.exit_code == 0, done.stderr


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


# --- pretrained networks


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
    done = salcli("prepare", "--params", str(tmp_path / "d" / "params.yaml"))
    assert done.exit_code == 0, done.stderr
    with h5py.File(tmp_path / "d" / "data" / "prepared" / "labeled.h5") as file:
        assert [one.shape for one in file.values() if one.ndim == 2 and one.dtype == np.float32] == [(40, 16)]


def test_a_frozen_network_needs_trained_weights_and_its_normalisation(code: str, tmp_path: Path) -> None:
    given = options(Path("photos"))
    frozen = ["init", "d", *given, "--frozen", "--model"]
    assert f"those of {code}:Net are random" in refused(*frozen, f"{code}:Net", *EXPECTED, root=tmp_path)
    assert "set --image-size, --mean, --std" in refused(*frozen, f"{code}:Net", "--weights", "net.pt", root=tmp_path)
    assert "--weights pretrained is for" in refused(*frozen, "small-cnn", "--weights", "pretrained", root=tmp_path)
    said, params = init(tmp_path / "d", *given, "--frozen", "--model", f"{code}:trained", *EXPECTED)
    assert "the weights that it comes with" in said
    assert params.model.weights is None


def test_weights_for_other_classes_are_fine_tuned_without_their_head(code: str, tmp_path: Path) -> None:
    said, params = init(tmp_path / "d", *options(Path("photos")), "--model", f"{code}:Net", "--weights", "net.pt")
    assert "note: net.pt is for 7 classes" in said
    assert (params.train_id.epochs, params.train_id.lr, params.train_ood.lr) == (4, 0.01, 0.001)
