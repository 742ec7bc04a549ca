"""Export for other programs: ONNX or torch.export, compared with the network before the file is put in place."""

import copy
import json
import re
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from salcli.detector.detector import Detector, logits_and_scores
from salcli.detector.images import ImageFormat
from salcli.detector.vectors import VectorFormat
from salcli.errors import ModelError, SalError
from salcli.methods.base import InputScore, built_in
from salcli.methods.combined import Combined
from salcli.models.custom import describe_failure
from salcli.store.files import as_json, atomic_path

OUTPUTS = ("logits", "score", "is_ood", "p_value")
TOLERANCE = 1e-4  # of logits and scores; relative where they are larger than 1
OF_RANKS = 1e-2  # of scores that are made of ranks: where scores are close, a rounding error is a step in rank
BATCH_SIZES = (1, 2, 7, 16)
NEEDED_FOR_ONNX = ("onnx", "onnxscript", "onnxruntime")
METADATA = "salcli"  # the metadata entry that holds the description
COLORS = re.compile(r"\x1b\[[0-9;]*m")
BATCH = {0: torch.export.Dim("batch")}

Runner = Callable[[Tensor], list[Tensor]]


class DetectorGraph(nn.Module):
    """Images or vectors to the OUTPUTS: class logits, outlier score, decision, p-value.

    Normalisation is inside, and so is the frozen backbone with its crop.
    """

    calibration: Tensor
    threshold: Tensor

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        # a copy, with weights in the memory order of an export, not in the one that makes convolutions fast
        self.network = copy.deepcopy(detector.network).cpu().to(memory_format=torch.contiguous_format)
        self.method = copy.deepcopy(detector.method)
        self.embedder = copy.deepcopy(detector.embedder)
        if self.embedder is not None:
            self.embedder.cpu().to(memory_format=torch.contiguous_format)
            self.embedder.backbone.memory_format = torch.contiguous_format
        self.register_buffer("calibration", torch.from_numpy(detector.calibration.copy()))
        self.register_buffer("threshold", torch.tensor(detector.threshold, dtype=torch.float32))
        self.eval()

    def forward(self, samples: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if self.embedder is not None:  # its parts, since exporters cannot trace no_grad
            samples = self.embedder.backbone(self.embedder.normalised(samples)).float()
        logits, exact = logits_and_scores(self.network, self.method, samples)
        score = exact.float()
        n_at_least = (self.calibration >= score[:, None]).sum(1)
        p_value = (1 + n_at_least).to(torch.float32) / (len(self.calibration) + 1)
        return logits, score, ~(score <= self.threshold), p_value


def export(detector: Detector, path: Path, to: str) -> float:
    """Write the file as `to` says, a key of FORMATS. Returns the largest difference of a logit or score.

    If it does not compute what the network does, nothing is left.
    """
    missing = [name for name in NEEDED_FOR_ONNX if to == "onnx" and find_spec(name) is None]
    if missing:
        raise SalError(f"ONNX needs {', '.join(missing)}; install it with: pip install 'salcli[onnx]'")
    if path.is_dir():
        raise SalError(f"{path} is a folder; name a file in it")
    if isinstance(detector.method, InputScore):
        others = ", ".join(name for name, one in built_in().items() if not issubclass(one, InputScore))
        raise ModelError(
            f"{detector.label} takes gradients of its input, which a graph cannot express; methods that can be "
            f"exported: sal and its variants, {others}"
        )
    write, load = FORMATS[to]
    graph, takes = DetectorGraph(detector), detector.takes
    text = json.dumps(description(detector), sort_keys=True)
    # the exporters warn about their own internals, and print graphs that they cannot export
    with atomic_path(path) as partial, warnings.catch_warnings(), redirect_stderr(StringIO()):
        warnings.simplefilter("ignore")
        try:
            # another graph than the one to compare with: tracing may change the state of a custom network
            write(DetectorGraph(detector), random_samples(2, takes, seed=0), takes.kind, text, partial)
        except Exception as error:  # a custom network may fail in any way
            what = f"{(detector.embedder or detector.network).spec.backbone} with {detector.label}"
            raise ModelError(f"{what} cannot be exported to {to}: {_reason(error)}") from error
        try:
            return _compare(graph, load(partial), takes, to)
        except ModelError:
            raise
        except Exception as error:  # the other program may support less than the exporter
            raise ModelError(
                f"the exported graph ({to}) does not run: {_reason(error)}; nothing was written"
            ) from error


def description(detector: Detector) -> dict[str, Any]:
    """What a program must know to feed the graph: written into the exported file."""
    return {
        "input": _described_input(detector),
        "outputs": {
            "logits": "of the classes, before softmax",
            "score": f"outlier score of {detector.label}, higher = more OOD",
            "is_ood": "whether the score is above the threshold",
            "p_value": "conformal, against the calibration scores",
        },
        "class_names": detector.class_names,
        "method": {"name": detector.name, "label": detector.label, "reason": detector.reason},
        "id_quantile": detector.id_quantile,
        "threshold": as_json(detector.threshold),
        "n_calibration": len(detector.calibration),
        "provenance": dict(detector.provenance),
    }


def _described_input(detector: Detector) -> dict[str, Any]:
    takes = detector.takes
    if isinstance(takes, VectorFormat):
        about = {"name": takes.kind, "axes": "batch, dimensions", "dimensions": takes.dimensions, "dtype": takes.dtype}
        return about | {"normalisation": "inside the graph"}
    resize = f"shorter side to `size`, {takes.interpolation} with antialiasing as Pillow does it, then "
    inside = "" if detector.embedder is None else f"crop to {detector.embedder.spec.preprocessing.crop} and "
    return {
        "name": takes.kind,
        "axes": "batch, channels, height, width",
        "channels": "gray" if takes.channels == 1 else "RGB",
        "size": takes.size,
        "dtype": takes.dtype,
        "range": [0, 255],
        "fit": f"{resize if takes.fit == 'resize' else ''}the square in the middle",
        "orientation": "upright, as EXIF says; transparent pixels on black",
        "normalisation": f"{inside}normalisation inside the graph" if inside else "inside the graph",
    }


def random_samples(n: int, takes: ImageFormat | VectorFormat, seed: int) -> Tensor:
    """A batch of the shape and type that the detector takes."""
    generator, axes = torch.Generator().manual_seed(seed), (n, *takes.sample_shape)
    if takes.kind == "images":
        return torch.randint(0, 256, axes, dtype=torch.uint8, generator=generator)
    return torch.randn(axes, generator=generator)


def _compare(graph: DetectorGraph, run: Runner, takes: ImageFormat | VectorFormat, to: str) -> float:
    """Several batch sizes: with one, a graph that is fixed to the size it was traced with would pass."""
    largest = 0.0
    for n in BATCH_SIZES:
        samples = random_samples(n, takes, seed=n)
        with torch.inference_mode():
            expected = graph(samples)
        logits, score, is_ood, p_value = found = run(samples)
        if [one.shape for one in found] != [one.shape for one in expected]:
            raise ModelError(f"the exported graph ({to}) does not take batches of {n}; nothing was written")
        n_below, c = torch.searchsorted(graph.calibration, score), len(graph.calibration)
        has_p_values = torch.allclose(p_value, (1 + c - n_below) / (c + 1), atol=1e-6)
        if not torch.equal(is_ood, ~(score <= graph.threshold)) or not has_p_values:
            raise ModelError(f"the exported graph ({to}) does not decide as the detector does; nothing was written")
        of_score = OF_RANKS if isinstance(graph.method, Combined) else TOLERANCE
        for ours, theirs, tolerance in ((expected[0], logits, TOLERANCE), (expected[1], score, of_score)):
            difference = float(((ours - theirs).abs() / ours.abs().clamp(min=1)).max())
            largest = max(largest, difference)
            if not difference <= tolerance:
                raise ModelError(
                    f"the exported graph ({to}) differs by {difference:.2g} from the network with a batch of {n}, "
                    f"more than {tolerance:g}; nothing was written"
                )
    return largest


def _reason(error: Exception) -> str:
    """The first paragraph of what the exporters' own errors are about; advice for their authors follows."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = COLORS.sub("", describe_failure(cause)).strip()
    first, where = " ".join(text.partition("\n\n")[0].split()), re.search(r" \([^()]+, line \d+\)$", text)
    return first if where is None or first.endswith(where[0]) else first + where[0]


def _write_onnx(graph: DetectorGraph, example: Tensor, name: str, text: str, path: Path) -> None:
    program = torch.onnx.export(
        graph,
        (example,),
        dynamo=True,
        verbose=False,
        input_names=[name],
        output_names=list(OUTPUTS),
        dynamic_shapes=(BATCH,),
    )
    assert program is not None
    program.model.metadata_props[METADATA] = text
    program.save(path, external_data=False)


def _load_onnx(path: Path) -> Runner:
    import onnxruntime  # an extra

    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda samples: [torch.from_numpy(one) for one in session.run(list(OUTPUTS), {name: samples.numpy()})]


def _write_torch_export(graph: DetectorGraph, example: Tensor, name: str, text: str, path: Path) -> None:
    program = torch.export.export(graph, (example,), dynamic_shapes=(BATCH,))
    with path.open("wb") as file:  # given a name, it would insist on a suffix
        torch.export.save(program, file, extra_files={METADATA: text})


def _load_torch_export(path: Path) -> Runner:
    with path.open("rb") as file:
        module = torch.export.load(file).module()

    def run(samples: Tensor) -> list[Tensor]:
        with torch.inference_mode():
            return list(module(samples))

    return run


FORMATS: dict[str, tuple[Callable[[DetectorGraph, Tensor, str, str, Path], None], Callable[[Path], Runner]]] = {
    "onnx": (_write_onnx, _load_onnx),
    "torch-export": (_write_torch_export, _load_torch_export),
}
