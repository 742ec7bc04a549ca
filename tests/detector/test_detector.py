"""The detector: its file, its Python API, and the stage that makes it."""

import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.cli import process, salcli
from helpers.detectors import EXPERIMENT, id_images, random_detector, write_pngs
from helpers.fake_data import Malicious
from helpers.quick import REPOSITORY
from PIL import Image

import salcli as package
from salcli import Detector
from salcli.detector import stage
from salcli.detector.detector import Scores
from salcli.errors import BadArtifactError, SalError
from salcli.params.schema import Params
from salcli.store.files import Found, read_header, read_tensors, write_tensors
from salcli.store.layout import Experiment, Workspace

CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # kernels differ with the position of an image in its batch


@pytest.fixture
def file(built: Path) -> Path:
    return built / EXPERIMENT.detector.path


@pytest.fixture
def detector(file: Path) -> Detector:
    return Detector.load(file)


# --- the stage


def test_it_records_where_it_comes_from_and_the_same_inputs_give_the_same_bytes(
    workspace: Workspace, quick_params: Params, file: Path, detector: Detector
) -> None:
    again = stage.run(workspace, quick_params, EXPERIMENT).written[0]
    assert again.read_bytes() == file.read_bytes()
    assert detector.class_names == tuple("01234567")
    assert Experiment(**{key: detector.provenance[key] for key in ("seed", "ood", "pi")}) == EXPERIMENT
    assert detector.provenance["salcli"] == package.__version__
    assert detector.provenance["network"]["train_id"]["epochs"] == 8
    assert detector.label == "SAL+"


def test_every_way_to_give_images_gives_the_same(built: Path, detector: Detector, tmp_path: Path) -> None:
    images = id_images(built, "calibration")[:20]
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
    np.testing.assert_allclose(detector(paths[3]).scores, expected.scores[3:4], **CLOSE)
    large = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 31, 3), dtype=np.uint8))
    by_hand = large.convert("L").resize((8, 10), Image.Resampling.BILINEAR).crop((0, 1, 8, 9))
    for way in (large, np.asarray(large).transpose(2, 0, 1)):
        np.testing.assert_allclose(detector(way).scores, detector(np.asarray(by_hand)[None]).scores, **CLOSE)
    with torch.inference_mode():
        logits = detector.network(torch.from_numpy(images))
    frame = detector(paths).to_frame()
    assert list(frame.columns) == ["path", "class", "probability", "score", "is_ood", "p_value"]
    assert frame["path"].tolist() == ways["text"]
    assert frame["class"].tolist() == [detector.class_names[k] for k in logits.argmax(1)]
    np.testing.assert_allclose(frame["probability"], logits.softmax(1).max(1).values, **CLOSE)
    assert list(detector([]).to_frame().columns) == list(frame.columns)[1:]


def test_what_is_not_an_image_is_refused() -> None:
    for images, message in (
        (np.zeros((2, 1, 8, 8)), "takes arrays of uint8 with the axes n, C, H, W; got float64 of 2 × 1 × 8 × 8"),
        (np.zeros((2, 16, 16, 3), np.uint8), "1 or 3 channels, in the second axis"),
        ([np.zeros((1, 8, 8), np.uint8)], "a detector takes paths, PIL images, or one array or tensor"),
        (["nowhere.png"], "nowhere.png cannot be decoded: no such file or directory"),
    ):
        with pytest.raises(SalError, match=re.escape(message)):
            random_detector("small-cnn", 1)(images)  # type: ignore[arg-type]


# --- files are not trusted


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    path, trace = tmp_path / "detector.safetensors", tmp_path / "trace"
    torch.save({"state": Malicious(trace)}, path)
    for content in (path.read_bytes(), pickle.dumps(Malicious(trace))):
        path.write_bytes(content)
        with pytest.raises(BadArtifactError, match=r"safetensors is damaged .* make it again: salcli detector"):
            Detector.load(path)
    assert not trace.exists()
    pickle.loads(path.read_bytes())
    assert trace.exists()  # the trap works


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        *(("spec", "backbone", name) for name in ("wrn-100000-1000", "wrn-994-1", "resnet34", "torchvision:resnet18")),
        *(("spec", "n_classes", n) for n in (10**9, -1, "3")),
        *(("spec", "std", values) for values in ([0.0] * 3, [1e-320] * 3, [float("nan")] * 3, [1.0] * 1000)),
        *(("images", "size", n) for n in (10**6, 0, "8")),
        ("images", "channels", 10**6),
        ("method", "settings", {"no": [[[[]]]]}),
    ],
)  # fmt: skip
def test_a_file_that_declares_what_it_does_not_hold_is_refused(
    tmp_path: Path, where: str, key: str, value: object
) -> None:
    """Before any memory is used for it."""
    path = tmp_path / "detector.safetensors"
    random_detector("small-cnn").save(path)
    header, tensors = read_header(Found(path)), read_tensors(Found(path))
    (header.spec if where == "spec" else header.about[where])[key] = value
    write_tensors(path, header, tensors)
    with pytest.raises(BadArtifactError, match="does not fit its own description"):
        Detector.load(path)


def test_a_file_whose_scores_have_the_other_sign_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "detector.safetensors"
    random_detector("small-cnn").save(path)
    header, tensors = read_header(Found(path)), read_tensors(Found(path))
    assert "higher = more OOD" in header.about.pop("scores")
    write_tensors(path, header, tensors)
    with pytest.raises(BadArtifactError, match=r"former version.*the other sign; make it again: salcli detector"):
        Detector.load(path)


@pytest.mark.parametrize("id_quantile", [0.5, 0.9, 0.95, 0.967, 0.968, 0.999])
def test_what_is_ood_has_a_p_value_of_at_most_the_level(id_quantile: float) -> None:
    """Also where 30 calibration samples are too few for the level: then no p-value is that small."""
    detector = random_detector("small-cnn")
    detector.__init__(  # type: ignore[misc]
        detector.network, detector.takes, ("a", "b", "c"), detector.calibration, {}, id_quantile=id_quantile
    )
    images = np.random.default_rng(0).integers(0, 256, (300, 3, 8, 8), dtype=np.uint8)
    scores = np.concatenate([detector.calibration, np.linspace(-4, 4, 270, dtype=np.float32)])
    detector._score = lambda array: Scores(np.zeros(300, int), np.ones(300), scores)  # type: ignore
    found = detector(images)
    np.testing.assert_array_equal(found.is_ood, found.p_values <= 1 - id_quantile + 1e-12)
    assert found.is_ood.any() == (id_quantile < 30 / 31) == (not detector.too_few)
    assert "at least" not in detector.too_few
    assert id_quantile != 0.999 or "999 would do" in detector.too_few


def test_a_name_with_escape_codes_is_harmless_in_a_csv(tmp_path: Path) -> None:
    detector = random_detector("small-cnn")
    detector.class_names = ("\x1b[31mred\x07",) * 3
    detector.save(tmp_path / "detector.safetensors")
    write_pngs(tmp_path / "images", np.zeros((1, 1, 8, 8), np.uint8))
    said = salcli("predict", "--detector", str(tmp_path / "detector.safetensors"), str(tmp_path / "images"))
    assert r"\x1b[31mred\x07" in said.stdout
    assert "\x1b" not in said.output


def test_importing_the_package_does_not_load_torch() -> None:
    code = "import sys, salcli; print('torch' in sys.modules); salcli.Detector; print('torch' in sys.modules)"
    assert process(sys.executable, "-c", code).stdout.split() == ["False", "True"]
    with pytest.raises(AttributeError, match="no attribute 'Detecter'"):
        package.Detecter  # noqa: B018


def test_the_example_in_the_docs_runs(built: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "detector.safetensors").write_bytes(file.read_bytes())
    write_pngs(tmp_path / "new", id_images(built, "calibration")[:4])
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.+?)```", (REPOSITORY / "docs" / "detector.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(example, names)
    assert isinstance(names["detector"], Detector)
