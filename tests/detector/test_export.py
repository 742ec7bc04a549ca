"""Exported graphs compute what the detector computes, for batches of any size, and say how to feed them."""

import json
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

LOAD = FORMATS["torch-export"][1]
OUTPUTS = ["logits", "score", "is_ood", "p_value"]


def check_description(about: dict[str, Any], detector: Detector) -> None:
    assert about["input"] == {
        "name": "images",
        "axes": "batch, channels, height, width",
        "channels": "gray",
        "size": 8,
        "dtype": "uint8",
        "range": [0, 255],
        "fit": "shorter side to `size`, bilinear with antialiasing as Pillow does it, then the square in the middle",
        "orientation": "upright, as EXIF says; transparent pixels on black",
        "normalisation": "inside the graph",
    }
    assert list(about["outputs"]) == sorted(OUTPUTS)
    assert about["class_names"] == list("01234567")
    assert (about["id_quantile"], about["threshold"]) == (detector.id_quantile, detector.threshold)
    assert about["provenance"]["ood"] == EXPERIMENT.ood


def check_outputs(found: list[Any], images: np.ndarray, detector: Detector) -> None:
    logits, score, is_ood, p_value = (np.asarray(one) for one in found)
    expected = detector(images)
    np.testing.assert_allclose(score, expected.scores, atol=1e-4)
    np.testing.assert_allclose(torch.tensor(logits).softmax(1).max(1).values, expected.probabilities, atol=1e-4)
    clear = abs(expected.scores - detector.threshold) > 1e-4  # one of these images is the threshold
    assert clear.sum() >= len(images) - 1
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
@pytest.mark.parametrize(
    ("to", "backbone", "channels", "size", "dtype"),
    [
        ("onnx", "mlp", 2, 1, "float32"),
        ("onnx", "wrn-10-1", 3, 16, "uint8"),
        ("torch-export", "mlp", 2, 1, "float32"),
        ("torch-export", "resnet18", 1, 16, "uint8"),
    ],
)
def test_every_backbone_can_be_exported(
    tmp_path: Path, to: str, backbone: str, channels: int, size: int, dtype: str
) -> None:
    detector = random_detector(backbone, channels, size, dtype)
    before = {name: tensor.clone() for name, tensor in detector.scorer.state_dict().items()}
    done = export(detector, tmp_path / "file", to)
    assert done.largest_difference <= 1e-4
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    after = detector.scorer.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


# --- a graph that does something else is not left behind


def spoiled(how: str) -> Any:
    """What a broken exporter's graph would compute."""

    def load(path: Path) -> Any:
        run = LOAD(path)

        def wrong(images: Tensor) -> list[Tensor]:
            logits, score, is_ood, p_value = run(images)
            match how:
                case "differs by":
                    logits = logits + 3e-4 * logits.abs().clamp(min=1) * (len(images) == 7)
                case "does not take batches of 7":
                    score = score[:5]
                case "does not decide as the detector does":
                    is_ood = ~is_ood
                case "does not decide as the detector does: p-values":
                    p_value = p_value + 0.01
                case "nan":
                    score = score * float("nan")
            return [logits, score, is_ood, p_value]

        return wrong

    return load


@pytest.mark.parametrize(
    "how",
    [
        "differs by",
        "does not take batches of 7",
        "does not decide as the detector does",
        "does not decide as the detector does: p-values",
        "nan",
    ],
)
def test_a_graph_that_computes_something_else_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (tmp_path / "file").write_text("from before")
    write, _ = FORMATS["torch-export"]
    monkeypatch.setitem(FORMATS, "torch-export", (write, spoiled(how)))
    with pytest.raises(ModelError, match=f"{how.partition(':')[0].replace('nan', '')}.*nothing was written"):
        export(random_detector("mlp", 2, 1, "float32"), tmp_path / "file", "torch-export")
    assert files(tmp_path) == {"file": b"from before"}


def test_a_network_that_cannot_be_exported_is_an_error_that_says_why(tmp_path: Path) -> None:
    detector = random_detector("mlp", 2, 1, "float32")

    class Unruly(torch.nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            if float(images.sum()) > 0:  # a graph has no place for it
                return images.flatten(1).repeat(1, 16)
            return images.flatten(1).repeat(1, 16) * 2

    detector.scorer.backbone = Unruly()  # type: ignore[assignment]
    with pytest.raises(ModelError, match="mlp cannot be exported to torch-export: "):
        export(detector, tmp_path / "file", "torch-export")
    assert list(tmp_path.iterdir()) == []
