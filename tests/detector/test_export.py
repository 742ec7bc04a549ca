"""Exported graphs compute what the detector computes, for batches of any size, and say how to feed them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from helpers.cli import files
from helpers.detectors import EXPERIMENT, id_images, random_detector
from torch import Tensor

from salcli import Detector
from salcli.detector.export import FORMATS, export
from salcli.errors import ModelError
from salcli.models.pretrained import Embedder, EmbedderSpec, Preprocessing

OUTPUTS = ["logits", "score", "is_ood", "p_value"]


def check_description(about: dict[str, Any], detector: Detector) -> None:
    expected = {"channels": "gray", "size": 8, "dtype": "uint8", "range": [0, 255], "normalisation": "inside the graph"}
    assert {key: about["input"][key] for key in expected} == expected
    assert list(about["outputs"]) == sorted(OUTPUTS)
    assert "higher = more OOD" in about["outputs"]["score"]
    assert about["class_names"] == list("01234567")
    assert about["method"] == {"name": "sal-plus", "label": "SAL+", "reason": ""}
    assert (about["id_quantile"], about["threshold"]) == (detector.id_quantile, detector.threshold)
    assert about["provenance"]["ood"] == EXPERIMENT.ood


def check_outputs(found: list[Any], images: np.ndarray, detector: Detector) -> None:
    logits, score, is_ood, p_value = (np.asarray(one) for one in found)
    expected = detector(images)
    np.testing.assert_allclose(score, expected.scores, atol=0.01)
    np.testing.assert_allclose(torch.tensor(logits).softmax(1).max(1).values, expected.probabilities, atol=1e-4)
    clear = abs(expected.scores - detector.threshold) > 0.01
    assert clear.sum() >= len(images) - 2
    np.testing.assert_array_equal(is_ood[clear], expected.is_ood[clear])
    np.testing.assert_allclose(p_value, expected.p_values, atol=1.5 / 116)  # a score may be just beside a stored one


@pytest.fixture
def detector(built: Path) -> Detector:
    return Detector.load(built / EXPERIMENT.detector.path, id_quantile=0.5, device="cpu")


@pytest.mark.slow
def test_a_graph_has_all_that_another_program_needs(built: Path, detector: Detector, tmp_path: Path) -> None:
    path, extra = tmp_path / "detector.onnx", {"salcli": ""}
    export(detector, path, "onnx")
    assert [one.name for one in tmp_path.iterdir()] == ["detector.onnx"]
    onnx.checker.check_model(onnx.load(path))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    assert (given.name, given.type, given.shape) == ("images", "tensor(uint8)", ["batch", 1, 8, 8])
    assert [one.name for one in session.get_outputs()] == OUTPUTS
    export(detector, tmp_path / "detector.pt2", "torch-export")
    module = torch.export.load(tmp_path / "detector.pt2", extra_files=extra).module()
    images = id_images(built, "calibration")
    for n in (1, 3, 115):
        check_outputs(session.run(OUTPUTS, {"images": images[:n]}), images[:n], detector)
        check_outputs([one.detach() for one in module(torch.from_numpy(images[:n]))], images[:n], detector)
    check_description(json.loads(session.get_modelmeta().custom_metadata_map["salcli"]), detector)
    check_description(json.loads(extra["salcli"]), detector)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["onnx mlp 2", "onnx wrn-10-1 3", "torch-export linear 40", "torch-export resnet18 1"])
def test_every_backbone_can_be_exported(tmp_path: Path, what: str) -> None:
    to, backbone, n_inputs = what.split()
    detector = random_detector(backbone, int(n_inputs), 16)
    before = {name: tensor.clone() for name, tensor in detector.network.state_dict().items()}
    assert export(detector, tmp_path / "file", to) <= 1e-4
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    after = detector.network.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.slow
def test_the_graph_of_a_frozen_backbone_takes_images(tmp_path: Path) -> None:
    wanted = Preprocessing(12, 8, "bicubic", (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    detector = random_detector("linear", embedder=Embedder(EmbedderSpec("small-cnn", None, wanted)))
    export(detector, tmp_path / "detector.onnx", "onnx")
    session = onnxruntime.InferenceSession(tmp_path / "detector.onnx", providers=["CPUExecutionProvider"])
    images = np.random.default_rng(1).integers(0, 256, (5, 3, 12, 12), dtype=np.uint8)
    _, score, is_ood, _ = session.run(OUTPUTS, {"images": images})
    np.testing.assert_allclose(score, detector(images).scores, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(is_ood, detector(images).is_ood)
    about = json.loads(session.get_modelmeta().custom_metadata_map["salcli"])["input"]
    assert about["fit"].startswith("shorter side to `size`, bicubic")
    assert (about["size"], about["normalisation"]) == (12, "crop to 8 and normalisation inside the graph")


# --- a graph that does something else is not left behind


SPOILED: dict[str, Callable[[int, list[Tensor]], list[Tensor]]] = {
    "differs by": lambda n, out: [out[0] + 3e-4 * out[0].abs().clamp(min=1) * (n == 7), *out[1:]],
    "does not decide as the detector does": lambda n, out: [*out[:2], ~out[2], out[3]],
    "": lambda n, out: [out[0], out[1] * float("nan"), *out[2:]],
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_graph_that_computes_something_else_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (tmp_path / "file").write_text("from before")
    write, load = FORMATS["torch-export"]

    def broken(path: Path) -> Callable[[Tensor], list[Tensor]]:
        run = load(path)
        return lambda samples: SPOILED[how](len(samples), run(samples))

    monkeypatch.setitem(FORMATS, "torch-export", (write, broken))
    with pytest.raises(ModelError, match=f"{how}.*nothing was written"):
        export(random_detector("mlp", 2), tmp_path / "file", "torch-export")
    assert files(tmp_path) == {"file": b"from before"}


def test_the_cause_of_a_failed_export_is_whole_and_has_no_colors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("step 1 of 3") from ValueError("no such \x1b[31moperator\x1b[0m:\n  lstsq\n\nadvice")

    monkeypatch.setitem(FORMATS, "torch-export", (fail, fail))
    with pytest.raises(ModelError) as error:
        export(random_detector("mlp", 2), tmp_path / "file", "torch-export")
    assert "cannot be exported to torch-export: ValueError: no such operator: lstsq" in str(error.value)
    assert "advice" not in str(error.value)
    assert files(tmp_path) == {}
