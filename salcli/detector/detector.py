"""The detector: a scorer and its scores of held-out ID data, in one safetensors file without code.

From Python:

    detector = Detector.load("detector.safetensors")
    found = detector(["a.png", "b.png"])
    print(found.is_ood, found.p_values)
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from salcli.detector.images import ImageFormat, Images, as_array, as_paths, one_ahead, read_files
from salcli.engine.device import resolve_device
from salcli.errors import (
    BadArtifactError,
    DataError,
    DeviceError,
    MissingArtifactError,
    ModelError,
    UnknownNameError,
    UsageMistakeError,
    printable,
)
from salcli.models.backbones import is_hooked
from salcli.models.custom import ImportRefusedError, check_may_import
from salcli.models.network import NetworkSpec, OodClassifier
from salcli.sal.metrics import ID_QUANTILE, is_below, p_values, threshold_that_keeps
from salcli.store.files import DAMAGED, Found, Header, read_header, read_tensors, write_tensors

if TYPE_CHECKING:
    import pandas as pd

KIND = "detector"
MADE_BY = "salcli detector"
NETWORK = "network."  # prefix of the names of the weights
CALIBRATION = "calibration_scores"
BATCH_SIZE = 256


class Scores(NamedTuple):
    """What the scorer says about some images."""

    label: NDArray[np.int64]  # n, the predicted class
    probability: NDArray[np.float32]  # n, of that class
    score: NDArray[np.float32]  # n, the OOD score, higher = more ID-like


def score_images(scorer: OodClassifier, images: Tensor, batch_size: int = BATCH_SIZE) -> Scores:
    """Score images (n, C, H, W), batch by batch, on the scorer's device.

    Calibration and prediction share this code and float32, so that their scores can be compared on every machine.
    """
    device = scorer.mean.device
    parts = [(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.float32))]
    for batch in images.split(batch_size) if len(images) else ():  # type: ignore[no-untyped-call]
        try:
            with torch.inference_mode():
                logits, score = scorer(batch.to(device))
                probability, label = logits.softmax(1).max(1)
                parts.append((label.cpu().numpy(), probability.cpu().numpy(), score.cpu().numpy()))
        except torch.OutOfMemoryError:
            raise DeviceError(
                f"{len(batch)} images at a time do not fit in the memory of {device}; use a smaller batch size"
            ) from None
    return Scores(*(np.concatenate(column) for column in zip(*parts, strict=True)))


@dataclass(frozen=True)
class Predictions:
    """One entry for each image, in the order in which they were given."""

    classes: tuple[str, ...]  # names of the predicted classes
    probabilities: NDArray[np.float32]  # n, of the predicted class
    scores: NDArray[np.float32]  # n, higher = more ID-like
    is_ood: NDArray[np.bool_]  # n, whether the score is below the detector's threshold
    p_values: NDArray[np.float64]  # n, against the calibration scores
    names: tuple[str, ...] = ()  # of the files, where images came from files

    def __len__(self) -> int:
        return len(self.classes)

    def to_frame(self) -> pd.DataFrame:
        """A pandas table with one row for each image."""
        import pandas as pd  # 0.35 s that `salcli predict` does without

        columns = {
            "class": list(self.classes),
            "probability": self.probabilities,
            "score": self.scores,
            "is_ood": self.is_ood,
            "p_value": self.p_values,
        }
        return pd.DataFrame({"path": list(self.names), **columns} if self.names else columns)


@dataclass(frozen=True)
class Scanned:
    """Some consecutive files and their predictions."""

    files: tuple[Path, ...]
    predictions: Predictions  # of the files that could be read, in their order
    failed: dict[int, str]  # index in `files` → why it could not be read


class Detector:
    """Tells ID images from OOD images: `detector = Detector.load("detector.safetensors"); detector(images)`."""

    def __init__(
        self,
        scorer: OodClassifier,  # images (n, C, H, W) → class logits (n, K), OOD score (n)
        image_format: ImageFormat,
        class_names: tuple[str, ...],
        calibration: NDArray[np.float32],  # sorted OOD scores of held-out ID data
        provenance: Mapping[str, Any],
        *,
        id_quantile: float = ID_QUANTILE,
        device: str = "auto",
        batch_size: int = BATCH_SIZE,
    ) -> None:
        if not 0 < id_quantile < 1:
            raise UsageMistakeError(
                f"the ID quantile must be greater than 0 and less than 1, got {id_quantile:g}; "
                "it is the share of ID data to keep, for example 0.95"
            )
        if batch_size < 1:
            raise UsageMistakeError(f"the batch size must be at least 1, got {batch_size}")
        self.scorer = scorer.to(_device(device)).eval()
        self.image_format, self.class_names = image_format, class_names
        self.calibration, self.provenance = calibration, provenance
        self.id_quantile, self.batch_size = id_quantile, batch_size
        self.threshold = threshold_that_keeps(calibration, id_quantile)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        id_quantile: float = ID_QUANTILE,
        device: str = "auto",
        batch_size: int = BATCH_SIZE,
        allow_import: bool = False,
    ) -> Self:
        """Read a file that `salcli detector` made. No code from the file is run.

        `id_quantile`: the share of ID calibration data that `is_ood` keeps. `allow_import`: import the module that the
        file names, if its network is a custom one.
        """
        found = Found(Path(path), MADE_BY)
        try:
            found.path.open("rb").close()
        except FileNotFoundError:
            raise MissingArtifactError(f"{found.path} is not there; make a detector with: {MADE_BY}") from None
        header = read_header(found, KIND)
        try:
            check_may_import(str(header.spec["backbone"]), str(found.path), allowed=allow_import)
            content = _assemble(NetworkSpec.from_json(header.spec), header.about, read_tensors(found))
        except ImportRefusedError:
            raise
        except (ModelError, UnknownNameError, *DAMAGED) as error:
            if isinstance(error, ModelError) and is_hooked(str(header.spec.get("backbone"))):
                raise  # the custom code is missing or has changed; the file is fine
            raise BadArtifactError(f"{found.path} does not fit its own description ({error}); {found.fix}") from None
        return cls(*content, id_quantile=id_quantile, device=device, batch_size=batch_size)

    def save(self, path: Path) -> None:
        """Write the file. The same detector gives the same bytes."""
        about = {
            "images": asdict(self.image_format),
            "class_names": self.class_names,
            "id_quantile": ID_QUANTILE,  # this and the threshold are for people and other programs; `load` ignores them
            "threshold": threshold_that_keeps(self.calibration, ID_QUANTILE),
            "provenance": dict(self.provenance),
        }
        tensors = {NETWORK + name: tensor for name, tensor in self.scorer.state_dict().items()}
        tensors[CALIBRATION] = torch.from_numpy(self.calibration)
        write_tensors(path, Header(KIND, about, asdict(self.scorer.spec)), tensors)

    def __call__(self, images: Images) -> Predictions:
        """Predict paths, PIL images, or an array or tensor (n, C, H, W) of uint8; several or one. A bad file raises."""
        files = as_paths(images)
        if files is None:
            array = as_array(images, self.image_format)
            return self._judge(score_images(self.scorer, torch.from_numpy(array), self.batch_size))
        parts = list(self.scan(files))
        for part in parts:
            for i, reason in part.failed.items():
                raise DataError(f"{printable(part.files[i])} cannot be decoded: {reason}; leave it out")
        return _joined([part.predictions for part in parts])

    def scan(self, files: Sequence[str | os.PathLike[str]]) -> Generator[Scanned]:
        """Predict files in their order, part by part; files that cannot be read are reported, not raised.

        Threads decode the next files while the network computes. Memory does not grow with the number of files.
        """
        self.image_format.check_takes_pictures()
        paths = tuple(file if isinstance(file, Path) else Path(file) for file in files)
        with closing(one_ahead(read_files(paths, self.image_format, self.batch_size))) as parts:
            for part in parts:
                found = score_images(self.scorer, torch.from_numpy(part.images), self.batch_size)
                names = tuple(str(file) for i, file in enumerate(part.files) if i not in part.failed)
                yield Scanned(part.files, self._judge(found, names), part.failed)

    def _judge(self, found: Scores, names: tuple[str, ...] = ()) -> Predictions:
        return Predictions(
            classes=tuple(self.class_names[k] for k in found.label),
            probabilities=found.probability,
            scores=found.score,
            is_ood=is_below(found.score, self.threshold),
            p_values=p_values(self.calibration, found.score),
            names=names,
        )


def _assemble(
    spec: NetworkSpec, about: Mapping[str, Any], tensors: dict[str, Tensor]
) -> tuple[OodClassifier, ImageFormat, tuple[str, ...], NDArray[np.float32], Mapping[str, Any]]:
    """The first arguments of Detector, from the content of its file. A ValueError says what is wrong."""
    calibration = tensors.pop(CALIBRATION).numpy()
    network = OodClassifier(spec)
    network.load_state_dict({name.removeprefix(NETWORK): tensor for name, tensor in tensors.items()})
    images = ImageFormat(**about["images"])
    names = tuple(str(name) for name in about["class_names"])
    if len(names) != spec.n_classes:
        raise ValueError(f"it has {spec.n_classes} classes, but {len(names)} names for them")
    if images.channels != len(spec.mean) or images.size < 1:
        raise ValueError(f"its network does not take images of {images.channels} channels and {images.size} pixels")
    if images.fit not in ("resize", "crop") or images.dtype not in ("uint8", "float32"):
        raise ValueError("it converts images in a way that this salcli does not know")
    in_order = calibration.ndim == 1 and len(calibration) and (calibration[1:] >= calibration[:-1]).all()
    if not in_order or calibration.dtype.name != "float32":  # NaN is in no order
        raise ValueError("its calibration scores are not in order")
    return network, images, names, calibration, about["provenance"]


def _joined(parts: list[Predictions]) -> Predictions:
    return Predictions(
        tuple(name for part in parts for name in part.classes),
        np.concatenate([part.probabilities for part in parts]),
        np.concatenate([part.scores for part in parts]),
        np.concatenate([part.is_ood for part in parts]),
        np.concatenate([part.p_values for part in parts]),
        tuple(name for part in parts for name in part.names),
    )


def _device(name: str) -> torch.device:
    """params.yaml is checked before a stage reads it, but this name comes straight from a caller."""
    try:
        return resolve_device(name)
    except RuntimeError:
        raise DeviceError(f"device {name} is not known; use auto, cpu, cuda, cuda:N or mps") from None
