"""Detectors of vectors, and detectors with a frozen backbone, which embed images themselves."""

import json
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from helpers.cli import refused, salcli
from helpers.detectors import random_detector
from helpers.quick import QUICK, REPOSITORY
from helpers.stages import run_every_stage
from PIL import Image
from pyarrow import parquet
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from salcli import Detector
from salcli.data.catalogue import load_source
from salcli.data.vectors import Columns
from salcli.detector import vectors as reading
from salcli.detector.vectors import VectorFormat
from salcli.errors import BadArtifactError, ModelError, SalError
from salcli.models.backbones import SmallCnn
from salcli.models.pretrained import Embedder, EmbedderSpec, Preprocessing
from salcli.params.schema import load_params
from salcli.store.files import Found, Header, write_tensors
from salcli.store.formats import read_candidates, read_id_split, read_samples
from salcli.store.layout import Experiment, Workspace

D = 40
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
NAMES = [f"row-{i}" for i in range(11)]
TABLE = Columns(vector=tuple(f"c{k}" for k in range(D)), label="class", row_id="name")


@pytest.fixture
def vectors() -> np.ndarray:
    return np.random.default_rng(0).normal(0.4, 0.3, (11, D)).astype(np.float16).astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A detector of vectors whose training data were a table, and the same vectors in files of every kind."""
    monkeypatch.chdir(tmp_path)
    random_detector("linear", D, columns=TABLE).save(Path("detector.safetensors"))
    np.savez("a.npz", x=vectors.astype(np.float64), ids=NAMES, y=np.zeros(11, int))
    np.save("b.npy", vectors.astype(np.float16))
    np.save("b.ids.npy", np.array(NAMES))
    np.save("plain.npy", vectors)
    lists = pa.array(list(vectors.astype(np.float64)))
    parquet.write_table(pa.table({"name": NAMES, "first": lists, "second": pa.array(list(vectors + 1))}), "c.parquet")
    cells = {f"c{k}": vectors[:, k] for k in reversed(range(D))}  # in another order than in the training data
    parquet.write_table(pa.table({**cells, "class": np.arange(11), "age": np.arange(11), "name": NAMES}), "d.pq")
    return tmp_path


def rows(*arguments: str) -> list[dict[str, Any]]:
    result = salcli("predict", *arguments, "--format", "jsonl")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


# --- vectors


def test_every_file_and_array_of_the_same_vectors_gives_the_same(
    folder: Path, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    detector = Detector.load("detector.safetensors")
    weights = load_file("detector.safetensors")
    standardized = (vectors - 0.4) / 0.3
    expected = -standardized @ weights["network.ood_head.weight"][0].numpy() - float(weights["network.ood_head.bias"])
    for given in (vectors, vectors.astype(np.float64), torch.from_numpy(vectors), vectors.tolist()):
        np.testing.assert_allclose(detector(given).scores, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(detector(vectors[3]).scores, expected[3:4], rtol=1e-4, atol=1e-4)
    assert len(detector(vectors[:0])) == len(detector([])) == 0
    for most_rows in (3, 4096):
        monkeypatch.setattr(reading, "MOST_ROWS", most_rows)
        for file, *options in (["a.npz"], ["b.npy"], ["c.parquet", "--vector", "first", "--row-id", "name"], ["d.pq"]):
            found = rows(file, *options)
            assert [row["id"] for row in found] == NAMES, file
            np.testing.assert_allclose([row["score"] for row in found], expected, rtol=1e-4, atol=1e-4)
    assert [row["id"] for row in rows("plain.npy")] == [str(i) for i in range(11)]
    assert [row["id"] for row in rows("plain.npy", "d.pq")][9:13] == ["plain.npy:9", "plain.npy:10", *NAMES[:2]]
    assert len(rows("*.n*")) == 3 * 11  # the ids beside b.npy are no vectors
    frame = detector("d.pq").to_frame()
    assert (list(frame.columns)[:2], frame["id"].tolist()) == (["id", "class"], NAMES)
    assert "row-" in salcli("predict", "d.pq", "--format", "table").stdout


def test_a_vector_that_cannot_be_used_has_its_row_and_does_not_stop_the_rest(folder: Path, vectors: np.ndarray) -> None:
    before = rows("plain.npy")
    bad: list[Any] = list(vectors.astype(np.float64))
    bad[1], bad[4], bad[6], bad[9] = bad[1] * np.nan, None, bad[6][:7], bad[9] * 1e30
    parquet.write_table(pa.table({"name": NAMES, "v": pa.array(bad)}), "bad.parquet")
    result = salcli("predict", "bad.parquet")
    assert "cannot be used: 4 vectors (rows row-1, row-4, row-6, …); the column error says why" in result.stderr
    assert "7 vectors, 0 OOD (0.0%), 4 could not be used" in result.stderr
    found = rows("bad.parquet")
    good = [row["score"] for i, row in enumerate(before) if i not in (1, 4, 6, 9)]
    np.testing.assert_allclose([row["score"] for row in found if row["error"] is None], good, **CLOSE)
    assert [found[i]["error"] for i in (4, 6)] == ["it is missing", f"it has 7 dimensions, not {D}"]
    with pytest.raises(SalError, match=r"4 of 11 vectors cannot be used \(rows row-1, row-4, row-6, …\)"):
        Detector.load("detector.safetensors")("bad.parquet")


def test_mistakes_with_vectors_give_one_message(folder: Path, vectors: np.ndarray) -> None:
    takes = f"this detector takes vectors of {D} dimensions"
    np.save("wide.npy", np.zeros((3, 77)))
    np.savez("two.npz", one=vectors, other=vectors)
    parquet.write_table(pa.table({"c0": [1.0], "c1": [2.0]}), "missing.parquet")
    (folder / "new").mkdir()
    Image.new("L", (8, 8)).save("new/a.png")
    for arguments, message in {
        "wide.npy": f"wide.npy holds vectors of 77 dimensions, but {takes}",
        "missing.parquet": "missing.parquet has no column c2 (did you mean c1?); it has c0, c1 (of the training",
        "two.npz": "two.npz: which array holds the vectors, one or other? Name it with --vector",
        "new/a.png": f"new/a.png is an image, but {takes}",
    }.items():
        assert message in refused("predict", *arguments.split(), root=folder), arguments
    detector = Detector.load("detector.safetensors")
    for given in (Image.new("L", (8, 8)), np.zeros((2, 3, 8, 8), np.uint8), np.zeros((2, 7)), [[1.0], [1.0, 2.0]]):
        with pytest.raises(SalError, match=takes):
            detector(given)  # type: ignore[arg-type]
    random_detector("small-cnn", 1).save(folder / "detector.safetensors")
    message = "d.pq is a file of arrays or vectors, but this detector takes image files"
    assert message in refused("predict", "d.pq", root=folder)


# --- frozen backbones

SMALL = EmbedderSpec("small-cnn", None, Preprocessing(12, 8, "bicubic", (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)))
LIBRARY = EmbedderSpec(
    "torchvision:shufflenet_v2_x0_5", None, Preprocessing(36, 32, "bilinear", (0.5,) * 3, (0.2,) * 3)
)


def frozen(spec: EmbedderSpec, *, float16: bool = False) -> Detector:
    return random_detector("linear", embedder=Embedder(spec), float16=float16)


def test_images_are_resized_cropped_and_embedded_as_their_vectors_were(tmp_path: Path) -> None:
    detector = frozen(SMALL)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8))
    image.save(tmp_path / "a.png")
    by_hand = np.asarray(image.resize((18, 12), Image.Resampling.BICUBIC))[2:10, 5:13] / np.float32(255)
    normalised = (by_hand - np.float32([0.5, 0.4, 0.3])) / np.float32([0.2, 0.3, 0.4])
    assert detector.embedder is not None
    with torch.inference_mode():
        features = detector.embedder.backbone(torch.from_numpy(normalised.transpose(2, 0, 1))[None])
        expected = -detector.network(features)[1].numpy()
    for given in (tmp_path / "a.png", image, np.asarray(image).transpose(2, 0, 1)):
        np.testing.assert_allclose(detector(given).scores, expected, **CLOSE)


def test_a_file_holds_the_backbone_and_float16_halves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores with float16 agree within 1% of their spread; here with random weights."""
    images = np.random.default_rng(0).integers(0, 256, (20, 3, 36, 36), dtype=np.uint8)
    whole, half = (frozen(LIBRARY, float16=float16) for float16 in (False, True))
    monkeypatch.setattr(socket, "create_connection", None)  # nothing is downloaded
    files = {}
    for name, detector in (("whole", whole), ("half", half)):
        files[name] = tmp_path / f"{name}.safetensors"
        detector.save(files[name])
        loaded = Detector.load(files[name])
        np.testing.assert_array_equal(loaded(images).scores, detector(images).scores)
        loaded.save(tmp_path / "again.safetensors")
        assert (tmp_path / "again.safetensors").read_bytes() == files[name].read_bytes()
    assert 0.5 < files["half"].stat().st_size / files["whole"].stat().st_size < 0.6
    scores = whole(images).scores
    np.testing.assert_allclose(half(images).scores, scores, rtol=0, atol=0.01 * float(np.ptp(scores)))


def changed(detector: Detector, path: Path, about: dict[str, Any], spec: dict[str, Any], scores: list[float]) -> Path:
    """The file of a detector, with other facts in its header or other calibration scores."""
    detector.save(path)
    with safe_open(path, framework="pt") as opened:
        header = json.loads(opened.metadata()["salcli"])
    header["spec"] |= spec
    for name, value in about.items():
        header["about"][name] |= value
    tensors = load_file(path) | {"calibration_scores": torch.tensor(scores)}
    write_tensors(path, Header(**header), tensors)
    return path


def test_a_file_that_declares_what_it_does_not_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "detector.safetensors"
    wrong = [{"backbone": name} for name in ("wrn-999994-4", "wrn-10-99999", "linear")]  # refused before it is built
    wrong += [{"preprocessing": {"resize": 9}}, {"preprocessing": asdict(SMALL.preprocessing) | {"resize": 10}}]
    changes: list[tuple[Detector, dict[str, Any], dict[str, Any], list[float]]] = [
        *((frozen(SMALL), {"embedder": embedder}, {}, [1.0]) for embedder in wrong),
        (frozen(SMALL), {"images": {"size": 8}}, {}, [1.0]),
        *((frozen(SMALL), {}, spec, [1.0]) for spec in ({"backbone": "mlp"}, {"n_classes": 10**12})),
        (random_detector("small-cnn", 1), {}, {"mean": [0.1, 0.2, 0.3], "std": [0.1, 0.2, 0.3]}, [1.0]),
        (random_detector("linear", D), {"vectors": {"dimensions": 7}}, {}, [1.0]),
        (frozen(SMALL), {}, {}, [2.0, 1.0]),
    ]
    for change in changes:
        with pytest.raises(BadArtifactError, match="does not fit its own description"):
            Detector.load(changed(change[0], path, *change[1:]))
    (tmp_path / "trap_for_detectors.py").write_text("raise AssertionError('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    trap = {"backbone": "trap_for_detectors:Net", "head": "fc"}
    for about, spec in (({"embedder": trap}, {}), ({}, trap)):
        changed(frozen(SMALL), path, about, spec, [1.0])
        with pytest.raises(ModelError, match=r"trap_for_detectors:Net would be imported, .*--allow-import"):
            Detector.load(path)
        assert "trap_for_detectors" not in sys.modules
    with pytest.raises(ModelError, match="AssertionError: ran"):
        Detector.load(path, allow_import=True)


# --- the stage


def made_detector(root: Path, values: dict[str, Any]) -> tuple[Detector, np.ndarray]:
    """The detector of a whole project on vectors, and the index of its calibration samples."""
    quick = QUICK | {"train_id.solver": "lbfgs", "train_ood.solver": "lbfgs", "evaluate.methods": ["sal"]}
    quick |= {"data.ood": ["digits-8-9"], "data.pi": [0.2], "filters": [], "detector.method": "sal"}
    params, _ = load_params(REPOSITORY / "params.yaml", quick | values)
    workspace, (experiment,) = Workspace(root), params.experiments()
    run_every_stage(workspace, params)
    found = Detector.load(workspace.find(experiment.detector).path)
    return found, read_id_split(workspace.find(experiment.split)).calibration


def test_a_frozen_project_gives_a_detector_that_takes_its_images(tmp_path: Path) -> None:
    save_file(SmallCnn(1).state_dict(), tmp_path / "weights.safetensors")
    model = {"frozen": True, "weights": "weights.safetensors", "mean": [0.3], "std": [0.4]}
    detector, calibration = made_detector(tmp_path, {f"model.{key}": value for key, value in model.items()})
    digits = load_source("digits-0-7", tmp_path)
    assert detector.embedder is not None
    assert detector.embedder.spec.preprocessing.mean == (0.3,)
    found = detector(np.asarray(digits.array)[calibration])
    np.testing.assert_allclose(np.sort(found.scores), detector.calibration, **CLOSE)
    assert found.is_ood.mean() <= 0.05

    # the same vectors, exported: the same candidates and the same decisions
    paths = {name: tmp_path / "data" / "prepared" / f"{name}.h5" for name in ("digits-0-7", "digits-8-9")}
    known, odd = (read_samples(Found(path)) for path in paths.values())
    assert (known.is_test, odd.is_test) == (None, None)
    np.savez(tmp_path / "id.npz", x=known.array, y=known.labels)
    np.savez(tmp_path / "odd.npz", x=odd.array)
    custom = {name: str(tmp_path / f"{name}.npz") for name in ("id", "odd")}
    sets = {"custom": custom, "id": "id", "ood": ["odd"]}
    values = {f"data.{key}": value for key, value in {**sets, "image_size": None, "channels": None}.items()}
    of_vectors, _ = made_detector(tmp_path / "vectors", values | {"model.backbone": "linear"})
    candidates = [
        read_candidates(Workspace(root).find(Experiment(0, ood, 0.2).candidates))
        for root, ood in ((tmp_path, "digits-8-9"), (tmp_path / "vectors", "odd"))
    ]
    assert len(candidates[0].index) > 20
    np.testing.assert_array_equal(candidates[0].index, candidates[1].index)
    np.testing.assert_array_equal(candidates[0].wild_score, candidates[1].wild_score)
    images, vectors = detector(np.asarray(load_source("digits-8-9", tmp_path).array)), of_vectors(odd.array)
    np.testing.assert_array_equal(images.is_ood, vectors.is_ood)
    np.testing.assert_allclose(images.scores, vectors.scores, **CLOSE)


def test_a_project_on_vectors_gives_a_detector_that_knows_its_columns(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    kinds = np.repeat(["ash", "elm", "oak"], 80)
    id_vectors = np.repeat(np.eye(3, 6) * 6, 80, axis=0) + rng.normal(size=(240, 6))
    cells = {"v": pa.array(list(id_vectors)), "kind": kinds, "name": [f"tree-{i}" for i in range(240)]}
    parquet.write_table(pa.table(cells), tmp_path / "trees.parquet")
    np.savez(tmp_path / "odd.npz", x=rng.normal(size=(90, 6)) - 5, name=np.arange(90))
    columns = {"data.columns.label": "kind", "data.columns.id": "name"}
    sets = {"data.custom": {"trees": "trees.parquet", "odd": "odd.npz"}, "data.id": "trees", "data.ood": ["odd"]}
    network = {"model.backbone": "linear", "data.image_size": None, "data.channels": None}
    few = {"filter.threshold_quantile": 0.9}  # of 18 calibration samples
    detector, calibration = made_detector(tmp_path, sets | network | columns | {"detector.method": "knn"} | few)
    assert isinstance(detector.takes, VectorFormat)
    assert (detector.takes.dimensions, detector.takes.columns.row_id) == (6, "name")
    found = detector(tmp_path / "trees.parquet")
    assert found.names == tuple(cells["name"])
    np.testing.assert_allclose(np.sort(found.scores[calibration]), detector.calibration, **CLOSE)
    assert np.mean(np.array(found.classes) == kinds) > 0.9
