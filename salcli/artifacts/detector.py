"""The detector on disk: one safetensors file with all that a prediction needs, and no code."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from salcli.artifacts.atomic import atomic_path
from salcli.artifacts.checkpoint import SCHEMA, Header, read_header
from salcli.calibration import ID_QUANTILE, threshold_that_keeps
from salcli.errors import BadArtifactError, ModelError, UnknownNameError
from salcli.models.backbone_names import is_hooked
from salcli.models.import_check import ImportRefusedError, check_may_import
from salcli.models.network import NetworkSpec, OodClassifier

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np

    from salcli.artifacts.layout import Found

KIND = "detector"
NETWORK = "network."  # stands before the names of the weights
CALIBRATION = "calibration_scores"
# how a description shows that it is not that of the tensors beside it
UNFIT = (
    SafetensorError, ModelError, UnknownNameError, OSError, RuntimeError, LookupError, TypeError, ValueError,
    AttributeError,
)  # fmt: skip


@dataclass(frozen=True)
class ImageFormat:
    """What images are brought to, just as `prepare` did it. Points in the plane are float32, all else is uint8."""

    channels: int
    size: int  # height and width
    fit: Literal["resize", "crop"] = "resize"
    dtype: Literal["uint8", "float32"] = "uint8"


@dataclass(frozen=True)
class StoredDetector:
    """All that is in the file."""

    network: OodClassifier
    images: ImageFormat
    class_names: tuple[str, ...]
    calibration: np.ndarray[Any, np.dtype[np.float32]]  # sorted OOD scores of held-out ID data
    provenance: Mapping[str, Any]


def write_detector(path: Path, detector: StoredDetector) -> None:
    """The same detector gives the same bytes."""
    about = {
        "images": asdict(detector.images),
        "class_names": detector.class_names,
        "id_quantile": ID_QUANTILE,  # and the threshold: for people and other programs; ours takes the scores
        "threshold": threshold_that_keeps(detector.calibration, ID_QUANTILE),
        "provenance": dict(detector.provenance),
    }
    header = Header(KIND, SCHEMA, asdict(detector.network.spec), about)
    state = detector.network.state_dict()
    tensors = {NETWORK + name: tensor.cpu().contiguous().clone() for name, tensor in state.items()}  # layers may share
    tensors[CALIBRATION] = torch.from_numpy(detector.calibration)
    content = save(tensors, metadata={"salcli": json.dumps(asdict(header), sort_keys=True)})
    with atomic_path(path) as partial:
        partial.write_bytes(content)


def read_detector(found: Found, *, allow_import: bool = False) -> StoredDetector:
    """The detector, ready for inference. A network of one's own is imported only where that is allowed."""
    header = read_header(found)
    if header.kind != KIND:
        raise BadArtifactError(f"{found.path} holds a {header.kind}, not a {KIND}; {found.cure}")
    try:
        check_may_import(header.spec["backbone"], str(found.path), allowed=allow_import)
        return _assemble(NetworkSpec.from_json(header.spec), header.about, load_file(found.path))
    except ImportRefusedError:
        raise
    except UNFIT as error:
        if isinstance(error, ModelError) and is_hooked(str(header.spec.get("backbone"))):
            raise  # it is the code that is missing or has changed, not the file
        raise BadArtifactError(f"{found.path} does not fit its own description ({error}); {found.cure}") from None


def _assemble(spec: NetworkSpec, about: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> StoredDetector:
    calibration = tensors.pop(CALIBRATION).numpy()
    network = OodClassifier(spec)
    network.load_state_dict({name.removeprefix(NETWORK): tensor for name, tensor in tensors.items()})
    images = ImageFormat(**about["images"])
    names = tuple(str(name) for name in about["class_names"])
    _check(spec, images, names, calibration)
    return StoredDetector(network.eval(), images, names, calibration, about["provenance"])


def _check(spec: NetworkSpec, images: ImageFormat, names: tuple[str, ...], calibration: np.ndarray[Any, Any]) -> None:
    if len(names) != spec.n_classes:
        raise ValueError(f"it has {spec.n_classes} classes, but {len(names)} names for them")
    if images.channels != len(spec.mean) or images.size < 1:
        raise ValueError(f"its network does not take images of {images.channels} channels and {images.size} pixels")
    if images.fit not in ("resize", "crop") or images.dtype not in ("uint8", "float32"):
        raise ValueError("it brings images to a form that this salcli does not know")
    in_order = calibration.ndim == 1 and len(calibration) and (calibration[1:] >= calibration[:-1]).all()
    if not in_order or calibration.dtype.name != "float32":  # a NaN is in no order
        raise ValueError("its calibration scores are not in order")
