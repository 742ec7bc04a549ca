"""Exported graphs compute what the detector computes, in batches of any size, and say how to feed them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import OOD, SEED
from detectors import calibration_images, random_detector
from test_bad_input import refused
from test_cli import files, salcli

from salcli import Detector
from salcli.artifacts import layout
from salcli.detector import export as export_module
from salcli.detector.export import FORMATS, export
from salcli.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

LOAD = FORMATS["torch-export"][1]
OUTPUTS = ["logits", "score", "is_ood", "p_value"]


@pytest.fixture
def folder(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a detector, where `export` looks for it."""
    shutil.copy(built / layout.detector(OOD, SEED).name, tmp_path / "detector.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
    assert about["provenance"]["ood"] == OOD


def check_outputs(found: list[Any], images: np.ndarray, detector: Detector) -> None:
    logits, score, is_ood, p_value = (np.asarray(one) for one in found)
    expected = detector(images)
    np.testing.assert_allclose(score, expected.scores, atol=1e-4)
    np.testing.assert_allclose(torch.tensor(logits).softmax(1).max(1).values, expected.probabilities, atol=1e-4)
    clear = abs(expected.scores - detector.threshold) > 1e-4  # one of these images is the threshold
    assert clear.sum() >= len(images) - 1
    np.testing.assert_array_equal(is_ood[clear], expected.is_ood[clear])
    np.testing.assert_allclose(p_value, expected.p_values, atol=1.5 / 116)  # a score may be just beside a stored one


def test_onnx_has_all_that_another_program_needs(built: Path, folder: Path) -> None:
    result = salcli("export", "--to", "onnx", "deep/detector.onnx", "--id-quantile", "0.5")
    assert result.exit_code == 0, result.output
    assert "wrote deep/detector.onnx: checked against the network with batches of 1, 2, 7, 16" in result.stdout
    assert sorted(path.name for path in (folder / "deep").iterdir()) == ["detector.onnx"]
    path, detector = folder / "deep" / "detector.onnx", Detector.load("detector.safetensors", id_quantile=0.5)
    onnx.checker.check_model(onnx.load(path))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    assert (given.name, given.type, given.shape) == ("images", "tensor(uint8)", ["batch", 1, 8, 8])
    assert [one.name for one in session.get_outputs()] == OUTPUTS
    images = calibration_images(built)
    for n in (1, 3, 115):
        check_outputs(session.run(OUTPUTS, {"images": images[:n]}), images[:n], detector)
    check_description(json.loads(session.get_modelmeta().custom_metadata_map["salcli"]), detector)


def test_torch_export_needs_no_salcli(built: Path, folder: Path) -> None:
    assert salcli("export", "--to", "torch-export", "detector.pt2").exit_code == 0
    detector, extra = Detector.load("detector.safetensors"), {"salcli": ""}
    module = torch.export.load("detector.pt2", extra_files=extra).module()
    images = calibration_images(built)
    for n in (1, 3, 115):
        check_outputs([one.detach() for one in module(torch.from_numpy(images[:n]))], images[:n], detector)
    check_description(json.loads(extra["salcli"]), detector)


@pytest.mark.parametrize(
    ("to", "backbone", "channels", "size", "dtype"),
    [
        ("onnx", "mlp", 2, 1, "float32"),
        ("onnx", "wrn-10-1", 3, 16, "uint8"),
        ("torch-export", "mlp", 2, 1, "float32"),
        ("torch-export", "wrn-10-1", 3, 16, "uint8"),
        ("torch-export", "resnet18", 1, 16, "uint8"),
    ],
)
def test_every_backbone_can_be_exported(
    tmp_path: Path, to: str, backbone: str, channels: int, size: int, dtype: str
) -> None:
    detector = Detector(random_detector(backbone, channels, size, dtype), device="cpu")
    before = {name: tensor.clone() for name, tensor in detector.stored.network.state_dict().items()}
    done = export(detector, tmp_path / "file", to)
    assert done.largest_difference <= 1e-4
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    after = detector.stored.network.state_dict()
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
    detector = Detector(random_detector("mlp", 2, 1, "float32"), device="cpu")
    with pytest.raises(ModelError, match=f"{how.partition(':')[0].replace('nan', '')}.*nothing was written"):
        export(detector, tmp_path / "file", "torch-export")
    assert files(tmp_path) == {"file": b"from before"}


def test_a_network_that_cannot_be_exported_is_an_error_that_says_why(tmp_path: Path) -> None:
    stored = random_detector("mlp", 2, 1, "float32")

    class Unruly(torch.nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            if float(images.sum()) > 0:  # a graph has no place for it
                return images.flatten(1).repeat(1, 16)
            return images.flatten(1).repeat(1, 16) * 2

    stored.network.backbone = Unruly()  # type: ignore[assignment]
    with pytest.raises(ModelError, match="mlp cannot be exported to torch-export: "):
        export(Detector(stored, device="cpu"), tmp_path / "file", "torch-export")
    assert list(tmp_path.iterdir()) == []


def test_without_its_tools_onnx_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "find_spec", lambda name: None if name == "onnxscript" else object())
    message = refused("export", "--to", "onnx", "a.onnx", root=folder)
    assert message == "error: ONNX needs onnxscript; install it with: pip install 'salcli[onnx]'\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--to onnx . ", "is a folder; name a file in it"),
        ("--to tflite a.tflite", "'tflite' is not one of"),
        ("--to onnx a.onnx --id-quantile 1.5", "greater than 0 and less than 1"),
        ("--to onnx a.onnx --detector nowhere", "nowhere is not there; make a detector with"),
        ("--to torch-export detector.safetensors/a.pt2", "cannot be written"),
    ],
)
def test_mistakes_are_told_in_one_message(folder: Path, arguments: str, message: str) -> None:
    assert message in refused("export", *arguments.split(), root=folder)
