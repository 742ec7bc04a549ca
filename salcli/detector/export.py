"""The detector for other programs: ONNX or torch.export, compared with the network before it is put in place."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from salcli.artifacts.atomic import atomic_path
from salcli.detector.graph import INPUT, OUTPUTS, DetectorGraph, description, random_images
from salcli.errors import ModelError, StorageError, UsageMistakeError

if TYPE_CHECKING:
    from salcli.artifacts.detector import ImageFormat
    from salcli.detector.detector import Detector

TOLERANCE = 1e-4  # of logits and scores; relative where they are larger than 1
BATCH_SIZES = (1, 2, 7, 16)
NEEDED_FOR_ONNX = ("onnx", "onnxscript", "onnxruntime")
METADATA = "salcli"  # the name of the entry that holds the description
BATCH = {0: torch.export.Dim("batch")}

Write = Callable[[DetectorGraph, Tensor, str, Path], None]
Run = Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True)
class Exported:
    """How the file was checked."""

    batch_sizes: tuple[int, ...]
    largest_difference: float  # of a logit or score


def export(detector: Detector, path: Path, to: str) -> Exported:
    """Write the file. If it does not compute what the network does, nothing is left."""
    missing = [name for name in NEEDED_FOR_ONNX if to == "onnx" and find_spec(name) is None]
    if missing:
        raise UsageMistakeError(f"ONNX needs {', '.join(missing)}; install it with: pip install 'salcli[onnx]'")
    if path.is_dir():
        raise StorageError(f"{path} is a folder; name a file in it")
    write, load = FORMATS[to]
    graph, wanted = DetectorGraph(detector), detector.stored.images
    text = json.dumps(description(detector), sort_keys=True)
    with atomic_path(path) as partial, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters' own affairs
        try:
            # one of its own: an exporter may leave a network that keeps state in another one
            write(DetectorGraph(detector), random_images(2, wanted, seed=0), text, partial)
        except Exception as error:  # a network of somebody's own may fail in any way
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise ModelError(f"{graph.network.spec.backbone} cannot be exported to {to}: {reason}") from error
        try:
            return _compare(graph, load(partial), wanted, to)
        except ModelError:
            raise
        except Exception as error:  # of the other program, which may know less than the exporter
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise ModelError(f"the exported graph ({to}) does not run: {reason}; nothing was written") from error


def _compare(graph: DetectorGraph, run: Run, wanted: ImageFormat, to: str) -> Exported:
    """Several batch sizes: a graph that only knows the size it was traced with would pass with one."""
    largest = 0.0
    for n in BATCH_SIZES:
        images = random_images(n, wanted, seed=n)
        with torch.inference_mode():
            expected = graph(images)
        logits, score, is_ood, p_value = found = run(images)
        if [one.shape for one in found] != [one.shape for one in expected]:
            raise ModelError(f"the exported graph ({to}) does not take batches of {n}; nothing was written")
        if not torch.equal(is_ood, ~(score >= graph.threshold)) or not _is_p_value(graph, score, p_value):
            raise ModelError(f"the exported graph ({to}) does not decide as the detector does; nothing was written")
        for ours, theirs in ((expected[0], logits), (expected[1], score)):
            difference = float(((ours - theirs).abs() / ours.abs().clamp(min=1)).max())
            largest = max(largest, difference)
            if not difference <= TOLERANCE:
                raise ModelError(
                    f"the exported graph ({to}) differs by {difference:.2g} from the network with a batch of {n}, "
                    f"more than {TOLERANCE:g}; nothing was written"
                )
    return Exported(BATCH_SIZES, largest)


def _is_p_value(graph: DetectorGraph, score: Tensor, p_value: Tensor) -> bool:
    n_at_most = torch.searchsorted(graph.calibration, score, right=True)
    return torch.allclose(p_value, (1 + n_at_most) / (len(graph.calibration) + 1), atol=1e-6)


def _write_onnx(graph: DetectorGraph, example: Tensor, text: str, path: Path) -> None:
    program = torch.onnx.export(
        graph,
        (example,),
        dynamo=True,
        verbose=False,
        input_names=[INPUT],
        output_names=list(OUTPUTS),
        dynamic_shapes=(BATCH,),
    )
    assert program is not None
    program.model.metadata_props[METADATA] = text
    program.save(path, external_data=False)


def _load_onnx(path: Path) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> list[Tensor]:
        found: list[Any] = session.run(list(OUTPUTS), {INPUT: images.numpy()})
        return [torch.from_numpy(one) for one in found]

    return run


def _write_torch_export(graph: DetectorGraph, example: Tensor, text: str, path: Path) -> None:
    program = torch.export.export(graph, (example,), dynamic_shapes=(BATCH,))
    with path.open("wb") as file:  # by name it would insist on a suffix
        torch.export.save(program, file, extra_files={METADATA: text})


def _load_torch_export(path: Path) -> Run:
    with path.open("rb") as file:
        module = torch.export.load(file).module()

    def run(images: Tensor) -> list[Tensor]:
        with torch.inference_mode():
            return list(module(images))

    return run


FORMATS: dict[str, tuple[Write, Callable[[Path], Run]]] = {
    "onnx": (_write_onnx, _load_onnx),
    "torch-export": (_write_torch_export, _load_torch_export),
}
