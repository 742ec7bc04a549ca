"""The detector file and its Python door."""

from __future__ import annotations

import json
import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import OOD, REPOSITORY, SEED
from detectors import calibration_images, held_out_images, random_detector, stored_scores, write_pngs
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_bad_input import refused
from test_cli import here, process, salcli

import salcli as package
from salcli import Detector
from salcli.artifacts import layout
from salcli.artifacts.checkpoint import read_network
from salcli.artifacts.detector import read_detector, write_detector
from salcli.artifacts.layout import Found, Workspace
from salcli.artifacts.splits import read_id_split
from salcli.calibration import p_values
from salcli.errors import BadArtifactError, DataError, ModelError, UsageMistakeError
from salcli.models.import_check import own_code
from salcli.models.network import OodClassifier
from salcli.params import Params
from salcli.stages import detector as stage

__all__ = ["here"]  # a fixture
ONE = ["--ood", OOD, "--seed", str(SEED)]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # kernels differ with the place of an image in its batch


@pytest.fixture
def file(built: Path) -> Path:
    return built / layout.detector(OOD, SEED).name


@pytest.fixture
def detector(file: Path) -> Detector:
    return Detector.load(file)


# --- what is in the file


def test_it_holds_the_scores_of_the_calibration_part_in_order(built: Path, file: Path) -> None:
    network = read_network(Workspace(built).find(layout.trained_network("sal", OOD, SEED)), OodClassifier)
    with torch.inference_mode():
        _, score = network(torch.from_numpy(calibration_images(built)))
    np.testing.assert_allclose(stored_scores(file), np.sort(score.numpy()), **CLOSE)


def test_its_calibration_data_are_unknown_to_its_network(built: Path) -> None:
    split = read_id_split(Workspace(built).find(layout.id_split(SEED)))
    assert not set(split.calibration) & {*split.train, *split.wild}


def test_it_says_where_it_comes_from_and_the_same_inputs_give_the_same_bytes(
    built: Path, workspace: Workspace, quick_params: Params, file: Path
) -> None:
    again = stage.run(workspace, quick_params, OOD, SEED).written[0]
    assert again.read_bytes() == file.read_bytes()
    found = read_detector(Found(file))
    assert found.class_names == tuple("01234567")
    assert (found.provenance["ood"], found.provenance["seed"]) == (OOD, SEED)
    assert found.provenance["salcli"] == package.__version__
    assert found.provenance["network"]["train_ood"]["epochs"] == 3
    assert found.provenance["classifier"]["train_id"]["epochs"] == 8
    with safe_open(file, framework="np") as opened:
        about = json.loads(opened.metadata()["salcli"])["about"]
    assert about["threshold"] == Detector(found).threshold
    assert about["images"] == {"channels": 1, "dtype": "uint8", "fit": "resize", "size": 8}


def test_a_network_that_may_have_seen_the_calibration_data_is_refused(here: Path) -> None:
    """Another split deals the images anew, so what the classifier was trained on may be calibration data now."""
    assert salcli("prepare", "split", "--seed", "1").exit_code == 0
    (here / layout.id_split(1).name).replace(here / layout.id_split(SEED).name)
    message = refused("detector", *ONE, root=here)
    assert "was made with another id.h5" in message


def test_the_command_tells_what_it_made_and_what_comes_next(here: Path) -> None:
    result = salcli("detector", *ONE)
    assert result.exit_code == 0
    assert re.search(rf"{OOD} +0 +8 +115 ", result.stdout)
    found = re.search(r"^next: salcli (predict --detector .+) FOLDER$", result.stdout, re.MULTILINE)
    assert found
    write_pngs(here / "new", calibration_images(here)[:3])
    assert salcli(*found[1].split(), "new").exit_code == 0


# --- calling it


def test_every_way_to_give_images_gives_the_same(built: Path, detector: Detector, tmp_path: Path) -> None:
    images = calibration_images(built)[:20]
    paths = write_pngs(tmp_path, images)
    expected = detector(images)
    ways = {
        "paths": paths,
        "text": [str(path) for path in paths],
        "PIL": [Image.open(path) for path in paths],
        "tensor": torch.from_numpy(images),
        "RGB array": np.repeat(images, 3, axis=1),
    }
    for name, way in ways.items():
        found = detector(way)
        np.testing.assert_allclose(found.scores, expected.scores, **CLOSE, err_msg=name)
        np.testing.assert_allclose(found.probabilities, expected.probabilities, **CLOSE, err_msg=name)
        assert found.classes == expected.classes, name
    one = [detector(paths[3]), detector(str(paths[3])), detector(Image.open(paths[3])), detector(images[3])]
    for found in one:
        assert len(found) == 1
        np.testing.assert_allclose(found.scores, expected.scores[3:4], **CLOSE)


def test_the_scores_of_the_calibration_images_are_the_stored_ones(
    built: Path, detector: Detector, file: Path, tmp_path: Path
) -> None:
    """Through files, so that decoding is part of it."""
    found = detector(write_pngs(tmp_path, calibration_images(built)))
    np.testing.assert_allclose(np.sort(found.scores), stored_scores(file), **CLOSE)
    assert found.is_ood.sum() == 5  # of 115: the threshold keeps at least 95%
    assert len(set(found.names)) == 115


def test_larger_images_are_fitted_as_prepare_does_it(detector: Detector, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (40, 31, 3), dtype=np.uint8))
    image.save(tmp_path / "a.png")
    by_hand = image.convert("L").resize((8, 10), Image.Resampling.BILINEAR).crop((0, 1, 8, 9))
    expected = detector(np.asarray(by_hand)[None])
    for way in (tmp_path / "a.png", image, np.asarray(image).transpose(2, 0, 1)):
        np.testing.assert_allclose(detector(way).scores, expected.scores, **CLOSE)


def test_a_result_is_a_table(built: Path, detector: Detector, tmp_path: Path) -> None:
    paths = write_pngs(tmp_path, calibration_images(built)[:3])
    frame = detector(paths).to_frame()
    assert list(frame.columns) == ["path", "class", "probability", "score", "is_ood", "p_value"]
    assert frame["path"].tolist() == [str(path) for path in paths]
    assert len(detector(calibration_images(built)[:0])) == 0
    assert list(detector([]).to_frame().columns) == list(frame.columns)[1:]


def test_probabilities_are_those_of_the_predicted_class(built: Path, detector: Detector) -> None:
    images = calibration_images(built)[:9]
    with torch.inference_mode():
        logits, _ = detector.stored.network(torch.from_numpy(images))
    found = detector(images)
    np.testing.assert_allclose(found.probabilities, logits.softmax(1).max(1).values, **CLOSE)
    assert found.classes == tuple(detector.class_names[k] for k in logits.argmax(1))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((2, 1, 8, 8)), "takes arrays of uint8 with the axes n, C, H, W; got float64 of 2 × 1 × 8 × 8"),
        (np.zeros((8, 8), np.uint8), "got uint8 of 8 × 8"),
        (np.zeros((2, 16, 16, 3), np.uint8), "1 or 3 channels, in the second axis"),
        ([np.zeros((1, 8, 8), np.uint8)], "a detector takes paths, PIL images, or one array or tensor"),
        (["a.png", Image.new("L", (8, 8))], "a detector takes paths, PIL images, or one array or tensor"),
        (7, "a detector takes paths, PIL images, or one array or tensor"),
        (["nowhere.png"], "nowhere.png cannot be decoded: no such file or directory"),
    ],
)
def test_what_is_no_image_is_refused(detector: Detector, images: object, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        detector(images)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, 1, 95, -0.1, float("nan")])
def test_a_quantile_must_be_a_share(file: Path, value: float) -> None:
    with pytest.raises(UsageMistakeError, match="greater than 0 and less than 1"):
        Detector.load(file, id_quantile=value)


def test_points_in_the_plane_are_arrays_and_no_files(tmp_path: Path) -> None:
    write_detector(tmp_path / "detector", random_detector("mlp", 2, 1, "float32"))
    detector = Detector.load(tmp_path / "detector")
    assert len(detector(np.zeros((5, 2, 1, 1), np.float32))) == 5
    for wrong in ("a.png", Image.new("L", (1, 1)), np.zeros((5, 3, 1, 1), np.float32)):
        with pytest.raises(DataError, match="takes points in the plane, not pictures"):
            detector(wrong)


# --- p-values on real data


def test_on_id_data_the_share_of_p_values_up_to_alpha_is_at_most_alpha(built: Path, detector: Detector) -> None:
    """The theorem is about the mean over calibration sets: deal calibration and test data anew, many times."""
    rng, n = np.random.default_rng(0), 115
    pool = np.concatenate(
        [stored_scores(built / layout.detector(OOD, SEED).name), detector(held_out_images(built)).scores]
    )
    deals = [rng.permutation(pool) for _ in range(400)]
    p = np.concatenate([p_values(np.sort(dealt[:n]), dealt[n:]) for dealt in deals])
    for alpha in (0.01, 0.05, 0.1, 0.25, 0.5):
        attainable = np.floor(alpha * (n + 1) + 1e-9) / (n + 1)
        assert np.mean(p <= alpha) == pytest.approx(attainable, abs=0.006)


def test_p_values_of_the_test_data_are_as_uniform_as_chance_allows(built: Path, detector: Detector) -> None:
    p = detector(held_out_images(built)).p_values
    for alpha in (0.05, 0.1, 0.25, 0.5):
        spread = np.sqrt(alpha * (1 - alpha) * (1 / 116 + 1 / len(p)))
        assert np.mean(p <= alpha) <= alpha + 3 * spread
    ood = np.random.default_rng(0).integers(0, 256, (200, 1, 8, 8), dtype=np.uint8)
    assert np.mean(detector(ood).p_values <= 0.1) > 0.2  # so the test can fail


# --- no code from files


class Malicious:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.trace,)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    path, trace = tmp_path / "detector.safetensors", tmp_path / "trace"
    (tmp_path / "a.png").touch()
    torch.save({"state": Malicious(trace)}, path)
    with pytest.raises(BadArtifactError, match="make it again: salcli detector"):
        Detector.load(path)
    path.write_bytes(pickle.dumps(Malicious(trace)))
    message = refused("predict", str(tmp_path / "a.png"), "--detector", str(path), root=tmp_path)
    assert "detector.safetensors is damaged or no salcli checkpoint" in message
    refused("export", "--to", "torch-export", str(tmp_path / "out"), "--detector", str(path), root=tmp_path)
    assert not trace.exists()
    pickle.loads(path.read_bytes())
    assert trace.exists()  # the trap works


def renamed(file: Path, path: Path, **changes: object) -> Path:
    """The same file with another description of its network."""
    with safe_open(file, framework="pt") as opened:
        header = json.loads(opened.metadata()["salcli"])
    header["spec"] |= changes
    save_file(load_file(file), path, metadata={"salcli": json.dumps(header)})
    return path


def test_a_network_of_somebodys_own_is_imported_only_where_that_is_allowed(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trap_for_detectors.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    path = renamed(file, tmp_path / "detector.safetensors", backbone="trap_for_detectors:Net")
    with pytest.raises(ModelError, match=r"trap_for_detectors:Net would be imported, .*--allow-import"):
        Detector.load(path)
    (tmp_path / "a.png").touch()
    message = refused("predict", str(tmp_path / "a.png"), "--detector", str(path), root=tmp_path)
    assert "trap_for_detectors:Net would be imported" in message
    assert "trap_for_detectors" not in sys.modules


OWN_NETWORK = """
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body, self.head = nn.Linear(64, 5), nn.Linear(5, num_classes)
    def forward(self, x):
        return self.head(self.body(x.flatten(1)).relu()).log_softmax(1)
"""


def test_where_it_is_allowed_it_predicts_and_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nets_for_detectors.py").write_text(OWN_NETWORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    write_detector(tmp_path / "detector.safetensors", random_detector("nets_for_detectors:Net", 1, head="head"))
    del sys.modules["nets_for_detectors"]
    write_pngs(tmp_path / "new", np.random.default_rng(0).integers(0, 256, (3, 1, 8, 8), dtype=np.uint8))
    assert "would be imported" in refused("predict", "new", root=tmp_path)
    assert "nets_for_detectors" not in sys.modules
    result = salcli("predict", "new", "--allow-import")
    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 4)
    for to in ("torch-export", "onnx"):
        result = salcli("export", "--to", to, "graph", "--allow-import")
        assert result.exit_code == 0, result.stderr
    del sys.modules["nets_for_detectors"]


def test_in_its_own_project_a_network_of_ones_own_needs_no_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the stages have imported it already; for another network that a file names, they have not."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "nets_for_detectors.py").write_text(OWN_NETWORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "code")])
    made = tmp_path / "runs" / "0" / "wild" / "detector.safetensors"
    made.parent.mkdir(parents=True)
    write_detector(made, random_detector("nets_for_detectors:Net", 1, head="head"))
    del sys.modules["nets_for_detectors"]
    sys.path.remove(str(tmp_path / "code"))
    write_pngs(tmp_path / "new", np.random.default_rng(0).integers(0, 256, (3, 1, 8, 8), dtype=np.uint8))
    params = tmp_path / "params.yaml"
    params.write_text("model: {backbone: 'others:Net', code: code}")
    result = salcli("predict", "new")
    assert (result.exit_code, "would be imported" in result.stderr) == (2, True)
    params.write_text("model: {backbone: 'nets_for_detectors:Net', code: code}")
    made.rename("detector.safetensors")  # it may come from anywhere
    assert "would be imported" in refused("predict", "new", root=tmp_path)
    assert "nets_for_detectors" not in sys.modules
    (tmp_path / "detector.safetensors").rename(made)
    result = salcli("predict", "new")
    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 4)
    assert salcli("export", "--to", "torch-export", "graph.pt2").exit_code == 0
    del sys.modules["nets_for_detectors"]


def test_a_colon_means_an_import_unless_a_library_stands_before_it() -> None:
    assert [own_code(name) for name in ("wrn-40-2", "torchvision:resnet50", "timm:vit_tiny")] == [None] * 3
    assert own_code("mypkg.nets:resnet") == "mypkg.nets:resnet"
    assert own_code("torchvision.models:resnet18") == "torchvision.models:resnet18"


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_classes": 9},
        {"backbone": "small-cn"},
        {"backbone": 3},
        {"mean": [0.1, 0.2, 0.3], "std": [0.1, 0.2, 0.3]},
    ],
)
def test_a_description_that_does_not_fit_is_refused(file: Path, tmp_path: Path, wrong: dict[str, object]) -> None:
    path = renamed(file, tmp_path / "detector.safetensors", **wrong)
    with pytest.raises(BadArtifactError, match="does not fit its own description"):
        Detector.load(path)


def test_calibration_scores_must_be_in_order(file: Path, tmp_path: Path) -> None:
    for values in ([2.0, 1.0], [], [1.0, float("nan")]):
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        tensors = {**load_file(file), "calibration_scores": torch.tensor(values)}
        save_file(tensors, tmp_path / "detector", metadata=metadata)
        with pytest.raises(BadArtifactError, match="its calibration scores are not in order"):
            Detector.load(tmp_path / "detector")


# --- the package


def test_importing_the_package_does_not_load_torch() -> None:
    code = "import sys, salcli; print('torch' in sys.modules); salcli.Detector; print('torch' in sys.modules)"
    assert process(sys.executable, "-c", code).stdout.split() == ["False", "True"]
    with pytest.raises(AttributeError, match="no attribute 'Detecter'"):
        package.Detecter  # noqa: B018


def test_the_example_in_the_docs_runs(built: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "detector.safetensors").write_bytes(file.read_bytes())
    write_pngs(tmp_path / "new", calibration_images(built)[:4])
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.+?)```", (REPOSITORY / "docs" / "detector.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(example, names)
    assert isinstance(names["detector"], Detector)
