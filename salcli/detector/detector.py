"""The detector: networks, a method and its scores of held-out ID data, in one safetensors file without code.

From Python:

    detector = Detector.load("detector.safetensors")
    found = detector(["a.png", "b.png"])
    print(found.is_ood, found.p_values)

A detector takes images or vectors, as its training data were. One with a frozen backbone takes images, and embeds them.
Its method is any row of the table: SAL, a rival, or a post-hoc score with what it was fitted to.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from salcli.conformal.evidence import calibration_needed, false_discovery_cutoff, least_flagged, p_values, threshold
from salcli.data.decoding import one_ahead
from salcli.data.sets import LARGEST_SIDE, some_of
from salcli.data.vectors import ANY, Columns
from salcli.detector.images import ImageFormat, as_paths
from salcli.detector.vectors import VectorFormat
from salcli.engine.device import resolve_device
from salcli.errors import BadArtifactError, MissingArtifactError, SalError, printable
from salcli.methods.base import IdTrained, InputScore, Method, PostHoc, Trained, find_method, is_custom_method
from salcli.methods.sal import Sal, variant_label
from salcli.models.backbones import is_hooked, takes_vectors
from salcli.models.custom import check_may_import
from salcli.models.network import Classifier, NetworkSpec, with_weights
from salcli.models.pretrained import Embedder, EmbedderSpec
from salcli.pipeline.embed import ON_A_CPU
from salcli.sal.gradients import Representation
from salcli.sal.metrics import ID_QUANTILE
from salcli.store.files import Found, Header, as_json, read_header, read_tensors, write_tensors
from salcli.store.formats import as_described

if TYPE_CHECKING:
    import pandas as pd

KIND = "detector"
MADE_BY = "salcli detector"
NETWORK, EMBEDDER, METHOD = "network.", "embedder.", "method."  # prefixes of the names of tensors
BACKBONES = (EMBEDDER, f"{NETWORK}backbone.")  # what float16 is for
CALIBRATION = "calibration_scores"
SIGN = "outlier scores: higher = more OOD"  # in the header; files without it have the other sign
BATCH_SIZE = 256
MOST_PIXELS = 2**22  # in one pass, whatever the batch size: 83 images of 224 × 224
ROUNDING = 1e-3  # largest relative error of a tensor that is stored in float16

Picture = str | os.PathLike[str] | Image.Image
Given = Picture | Sequence[Picture] | np.ndarray[Any, Any] | Tensor


class Scores(NamedTuple):
    """What the network and the method say about some samples."""

    label: NDArray[np.int64]  # n, the predicted class
    probability: NDArray[np.float32]  # n, of that class
    score: NDArray[np.float32]  # n, the outlier score, higher = more OOD


def logits_and_scores(network: Classifier, method: Method, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Class logits (n, K) and outlier scores (n) of a batch. Methods compute on the CPU, as in `evaluate`."""
    if isinstance(method, PostHoc):
        feature, logits = (one.float().cpu() for one in network.features_and_logits(samples))
        return logits, method.score(Representation(feature, logits, logits.argmax(dim=1)))
    if isinstance(method, InputScore):
        return network(samples), method.score(method.outputs(network)(samples).cpu())
    assert isinstance(method, Trained)
    found = method.outputs(network)(samples)
    outputs = [one.float().cpu() for one in ((found,) if isinstance(found, Tensor) else found)]
    return method.class_logits(outputs), method.score(network, outputs)


def score_samples(
    network: Classifier,
    method: Method,
    samples: Tensor,
    batch_size: int = BATCH_SIZE,
    embedder: Embedder | None = None,
) -> Scores:
    """Score images (n, C, H, W) or vectors (n, D), batch by batch, on the network's device.

    Calibration and prediction share this code and float32, so that their scores can be compared on every machine.
    """
    device = network.mean.device
    batch_size = min(batch_size, max(1, MOST_PIXELS // math.prod(samples.shape[2:])))
    parts = [(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.float32))]
    for batch in samples.split(batch_size) if len(samples) else ():  # type: ignore[no-untyped-call]
        try:
            with torch.inference_mode():
                given = batch.to(device)
                if embedder is not None:
                    at_once = ON_A_CPU if device.type == "cpu" else batch_size
                    given = torch.cat([embedder(some) for some in given.split(at_once)])
                logits, score = logits_and_scores(network, method, given)
                probability, label = logits.softmax(1).max(1)
                parts.append((label.cpu().numpy(), probability.cpu().numpy(), score.float().cpu().numpy()))
        except torch.OutOfMemoryError:
            raise SalError(
                f"{len(batch)} samples at a time do not fit in the memory of {device}; use a smaller batch size"
            ) from None
    return Scores(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def round_to_float16(network: nn.Module) -> None:
    """Round the weights to what float16 can hold, where that changes little. Biases and batch norms stay exact."""
    for tensor in network.state_dict().values():
        if tensor.ndim >= 2 and tensor.is_floating_point():
            rounded = tensor.half().to(tensor.dtype)
            if float((rounded - tensor).norm()) <= ROUNDING * float(tensor.norm()):  # not if one becomes infinite
                tensor.copy_(rounded)


@dataclass(frozen=True)
class Predictions:
    """One entry for each image or vector, in the order in which they were given."""

    classes: tuple[str, ...]  # names of the predicted classes
    probabilities: NDArray[np.float32]  # n, of the predicted class
    scores: NDArray[np.float32]  # n, higher = more OOD
    is_ood: NDArray[np.bool_]  # n, whether the score is above the detector's threshold
    p_values: NDArray[np.float64]  # n, against the calibration scores
    names: tuple[str, ...] = ()  # paths of images, ids of vectors, where they came from files
    name_column: str = "path"

    def __len__(self) -> int:
        return len(self.classes)

    def to_frame(self) -> pd.DataFrame:
        """A pandas table with one row for each of them."""
        import pandas as pd  # 0.35 s that `salcli predict` does without

        columns = {
            "class": list(self.classes),
            "probability": self.probabilities,
            "score": self.scores,
            "is_ood": self.is_ood,
            "p_value": self.p_values,
        }
        return pd.DataFrame({self.name_column: list(self.names), **columns} if self.names else columns)


@dataclass(frozen=True)
class Scanned:
    """Some consecutive images or vectors and their predictions."""

    names: tuple[str, ...]  # paths of images, ids of vectors
    predictions: Predictions  # of those that could be read, in their order
    failed: dict[int, str]  # index in `names` → why it could not be read


class Detector:
    """Tells ID from OOD samples: `detector = Detector.load("detector.safetensors"); detector(samples)`."""

    def __init__(
        self,
        network: Classifier,  # of images, of vectors, or of what the embedder makes of images
        takes: ImageFormat | VectorFormat,
        class_names: tuple[str, ...],
        calibration: NDArray[np.float32],  # sorted outlier scores of held-out ID data
        provenance: Mapping[str, Any],
        *,
        method: Method | None = None,  # with what it was fitted to; SAL's OOD classifier by itself
        name: str = Sal.name,  # of its row in the table
        reason: str = "",  # why `detector.method: auto` chose it
        embedder: Embedder | None = None,  # the frozen backbone
        float16: bool = False,  # round the weights of backbones, and store them in half the bytes
        id_quantile: float = ID_QUANTILE,
        device: str = "auto",
        batch_size: int = BATCH_SIZE,
    ) -> None:
        if not 0 < id_quantile < 1:
            raise SalError(
                f"the ID quantile must be greater than 0 and less than 1, got {id_quantile:g}; "
                "it is the share of ID data to keep, for example 0.95"
            )
        if batch_size < 1:
            raise SalError(f"the batch size must be at least 1, got {batch_size}")
        self.network, self.method = network.to(_device(device)).eval(), method or Sal()
        self.name, self.reason = name, reason
        self.embedder = None if embedder is None else embedder.to(_device(device))
        self.takes, self.class_names = takes, class_names
        self.calibration, self.provenance, self.float16 = calibration, provenance, float16
        self.id_quantile, self.batch_size = id_quantile, batch_size
        self.threshold = threshold(calibration, 1 - id_quantile)  # infinite: it scores samples, but flags none
        if float16:
            round_to_float16(self.network.backbone)
            if self.embedder is not None:
                round_to_float16(self.embedder)

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
        """Read a file that `salcli detector` made. No code from the file is run, and nothing is downloaded.

        `id_quantile`: the share of ID calibration data that `is_ood` keeps. `allow_import`: import the module that the
        file names, if its network or its method is a custom one.
        """
        found = Found(Path(path), MADE_BY)
        try:
            header = read_header(found, KIND)
        except FileNotFoundError:
            raise MissingArtifactError(f"{found.path} is not there; make a detector with: {MADE_BY}") from None
        custom = custom_code(header)
        if header.about.get("scores") != SIGN:
            raise BadArtifactError(
                f"{found.path} was made by a former version of salcli, whose scores had the other sign; {found.fix}"
            )
        for name in custom:
            check_may_import(name, str(found.path), allowed=allow_import)
        with as_described(found, has_custom_code=bool(custom)):
            content = _assemble(header, read_tensors(found))
        return cls(**content, id_quantile=id_quantile, device=device, batch_size=batch_size)

    def save(self, path: Path) -> None:
        """Write the file. The same detector gives the same bytes."""
        about = {
            self.takes.kind: asdict(self.takes),
            "class_names": self.class_names,
            "id_quantile": ID_QUANTILE,  # this and the threshold are for people and other programs; `load` ignores them
            "threshold": as_json(threshold(self.calibration, 1 - ID_QUANTILE)),
            "scores": SIGN,
            "float16": self.float16,
            "method": {
                "name": self.method.name,
                "row": self.name,
                "settings": self.method.settings(),
                **({"reason": self.reason} if self.reason else {}),
            },
            "provenance": dict(self.provenance),
        }
        tensors = {NETWORK + name: tensor for name, tensor in self.network.state_dict().items()}
        tensors |= {METHOD + name: tensor for name, tensor in self.method.state().items()}
        if self.embedder is not None:
            about["embedder"] = asdict(self.embedder.spec)
            tensors |= {EMBEDDER + name: tensor for name, tensor in self.embedder.state_dict().items()}
        if self.float16:
            tensors = {
                name: _halved(tensor) if name.startswith(BACKBONES) else tensor for name, tensor in tensors.items()
            }
        tensors[CALIBRATION] = torch.from_numpy(self.calibration)
        write_tensors(path, Header(KIND, about, asdict(self.network.spec)), tensors)

    @property
    def label(self) -> str:
        """What a table calls its method."""
        return variant_label(self.name) if isinstance(self.method, Sal) else self.method.label

    def __call__(self, samples: Given, columns: Columns = ANY) -> Predictions:
        """Predict paths, PIL images, or one array or tensor of images (n, C, H, W) in uint8; several or one.

        A detector of vectors takes an array or tensor (n, D), or paths of .npz, .npy and .parquet files, of which
        `columns` are read. What cannot be read raises.
        """
        files = as_paths(samples)
        if files is None:
            return self._judge(self._score(self.takes.as_array(samples)))
        parts = list(self.scan(files, columns))
        failed = {part.names[i]: reason for part in parts for i, reason in part.failed.items()}
        for name, reason in failed.items():
            if self.takes.kind == "images":
                raise SalError(f"{printable(name)} cannot be decoded: {reason}; leave it out")
            n = sum(len(part.names) for part in parts)
            rows = some_of([*failed])
            raise SalError(f"{len(failed):,} of {n:,} vectors cannot be used (rows {rows}): {reason}; leave them out")
        return _joined([part.predictions for part in parts])

    def select(self, samples: Given, *, fdr: float, columns: Columns = ANY) -> Predictions:
        """As a call, but `is_ood` flags so many of these samples that on average at most a share `fdr` of them is ID.

        That is the procedure of Benjamini and Hochberg on the p-values of all samples. A warning says if the
        calibration sample is too small for it to flag any.
        """
        self.check_fdr(fdr)
        found = self(samples, columns)
        found = replace(found, is_ood=found.p_values <= false_discovery_cutoff(found.p_values, fdr))
        if not found.is_ood.any() and (reason := self.too_few_for(fdr, len(found))):
            warnings.warn(reason, stacklevel=2)
        return found

    @property
    def is_exact(self) -> bool:
        """Whether p-values of any samples are exact: nothing was learned or chosen by calibration or wild data."""
        if self.reason:  # auto compares methods on both
            return False
        if isinstance(self.method, PostHoc):
            return not (self.method.needs_wild or self.method.needs_calibration)
        return isinstance(self.method, InputScore | IdTrained)

    @property
    def too_few(self) -> str:
        """Why no sample can be above the threshold; empty if one can be."""
        if self.threshold < math.inf:
            return ""
        return (
            f"{len(self.calibration):,} calibration samples are too few to keep {self.id_quantile:.4g} of ID data, so "
            f"samples are scored, but none is OOD: {calibration_needed(1 - self.id_quantile):,} would do "
            "(data.id_shares.calibration)"
        )

    def check_fdr(self, fdr: float) -> None:
        """Refuse a false discovery rate at which nothing could ever be flagged."""
        if not 0 < fdr < 1:
            raise SalError(
                f"the false discovery rate must be greater than 0 and less than 1, got {fdr:g}; for example 0.1"
            )
        if self.too_few_for(fdr, 1):
            raise SalError(
                f"a false discovery rate of {fdr:g} needs at least {calibration_needed(fdr):,} calibration samples, "
                f"and this detector has {len(self.calibration):,}; ask for a higher rate, or give "
                "data.id_shares.calibration a larger share"
            )

    def too_few_for(self, fdr: float, n_samples: int) -> str:
        """Why few outliers cannot be flagged in a batch of this size; empty if even one can be."""
        n, least = len(self.calibration), least_flagged(len(self.calibration), n_samples, fdr)
        if least <= 1:
            return ""
        return (
            f"with {n:,} calibration samples no p-value is below 1/{n + 1:,}, so fewer than {least:,} outliers among "
            f"{n_samples:,} samples cannot be flagged at a false discovery rate of {fdr:g}; "
            f"{calibration_needed(fdr / n_samples):,} would do for one outlier"
        )

    def scan(self, files: Sequence[str | os.PathLike[str]], columns: Columns = ANY) -> Generator[Scanned]:
        """Predict files in their order, part by part; what cannot be read is reported, not raised.

        The next samples are read while the networks compute. Memory does not grow with their number, except for .npz.
        """
        paths = tuple(file if isinstance(file, Path) else Path(file) for file in files)
        for path in paths:
            self.takes.check_file(path)
        with closing(one_ahead(self.takes.read(paths, self.batch_size, columns))) as parts:
            for part in parts:
                names = tuple(name for i, name in enumerate(part.names) if i not in part.failed)
                yield Scanned(part.names, self._judge(self._score(part.array), names), part.failed)

    def _score(self, array: NDArray[Any]) -> Scores:
        return score_samples(self.network, self.method, torch.from_numpy(array), self.batch_size, self.embedder)

    def _judge(self, found: Scores, names: tuple[str, ...] = ()) -> Predictions:
        return Predictions(
            classes=tuple(self.class_names[k] for k in found.label),
            probabilities=found.probability,
            scores=found.score,
            is_ood=~(found.score <= self.threshold),  # also what is NaN
            p_values=p_values(self.calibration, found.score),
            names=names,
            name_column=self.takes.name_column,
        )


def custom_code(header: Header) -> list[str]:
    """The code beyond salcli that loading a detector would import: of a network, a frozen backbone, a method."""
    about = [header.about.get(key) for key in ("embedder", "method")]
    embedder, method = (one if isinstance(one, dict) else {} for one in about)
    networks = [str(name) for name in (header.spec.get("backbone"), embedder.get("backbone")) if name]
    methods = [str(method.get("name"))]
    return [*filter(is_hooked, networks), *filter(is_custom_method, methods)]


def network_class(method: type[Method]) -> type[Classifier]:
    """Post-hoc scores are of the ID classifier."""
    return method.network if issubclass(method, Trained) else Classifier


def _halved(tensor: Tensor) -> Tensor:
    """In float16, where that is exact: what `round_to_float16` has rounded."""
    half = tensor.half()
    return half if tensor.ndim >= 2 and torch.equal(half.to(tensor.dtype), tensor) else tensor


def _assemble(header: Header, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The arguments of Detector, from the content of its file. A ValueError says what is wrong."""
    spec, about = NetworkSpec.from_json(header.spec), header.about
    names = tuple(str(name) for name in about["class_names"])
    if len(names) != spec.n_classes:
        raise ValueError(f"it has {spec.n_classes} classes, but {len(names)} names for them")
    calibration = tensors.pop(CALIBRATION).numpy()
    in_order = calibration.ndim == 1 and (calibration[1:] >= calibration[:-1]).all()
    if not in_order or calibration.dtype.name != "float32":  # NaN is in no order
        raise ValueError("its calibration scores are not in order")
    parts = {
        prefix: {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
        for prefix in (NETWORK, EMBEDDER, METHOD)
    }
    embedder, content = None, about.get("embedder")
    if content is not None:
        given = EmbedderSpec.from_json(content)
        embedder = with_weights(given.backbone, lambda: Embedder(given), parts[EMBEDDER])
    stored = about["method"]
    # variants of SAL are one class, which is not among the methods that have a name of their own
    kind = Sal if stored["name"] == Sal.name else find_method(str(stored["name"]))
    network = with_weights(spec.backbone, lambda: network_class(kind)(spec), parts[NETWORK])
    takes = _takes(spec, about, embedder)
    method = kind.from_settings(stored["settings"])
    if parts[METHOD]:
        method.restore(parts[METHOD])
        shape = (len(spec.mean),) if takes_vectors(spec.backbone) else takes.sample_shape
        with torch.inference_mode():  # what it was fitted to must fit the features and classes of the network
            _, score = logits_and_scores(network.eval(), method, torch.zeros(1, *shape))
        if score.shape != (1,) or not score.is_floating_point():
            raise ValueError(f"what {method.name} was fitted to does not fit its network")
    return {
        "network": network,
        "takes": takes,
        "class_names": names,
        "calibration": calibration,
        "provenance": about["provenance"],
        "method": method,
        "name": str(stored["row"]),
        "reason": str(stored.get("reason", "")),
        "embedder": embedder,
        "float16": bool(about.get("float16")),
    }


def _takes(spec: NetworkSpec, about: Mapping[str, Any], embedder: Embedder | None) -> ImageFormat | VectorFormat:
    """What the file says of its samples, if its networks take such samples."""
    is_of_vectors = takes_vectors(spec.backbone)
    if is_of_vectors and embedder is None:
        stored = about["vectors"]
        named: dict[str, Any] = {
            key: tuple(one) if isinstance(one, list) else one for key, one in stored["columns"].items()
        }
        if stored["dimensions"] != len(spec.mean):
            raise ValueError(f"its network takes vectors of {len(spec.mean)} dimensions, not {stored['dimensions']}")
        return VectorFormat(stored["dimensions"], Columns(**named))
    images = ImageFormat(**{name: value for name, value in about["images"].items() if name != "dtype"})
    if not isinstance(images.size, int) or images.size > LARGEST_SIDE:
        raise ValueError(f"it takes images of {images.size!r:.40} pixels")
    if images.fit not in ("resize", "crop") or images.interpolation not in ("bilinear", "bicubic"):
        raise ValueError("it converts images in a way that this salcli does not know")
    does_not = f"take images of {images.channels} channels and {images.size} pixels"
    if embedder is None:
        if is_of_vectors or images.channels != len(spec.mean) or images.size < 1:
            raise ValueError(f"its network does not {does_not}")
        return images
    wanted = embedder.spec.preprocessing
    if not is_of_vectors or len(spec.mean) != embedder.n_features:
        raise ValueError(f"its network does not take the {embedder.n_features} features of its frozen backbone")
    is_placed = images.crop in (None, wanted.crop)  # older files do not say it
    if images.channels not in (1, wanted.channels) or images.size != wanted.resize or not is_placed:
        raise ValueError(f"its frozen backbone does not {does_not}")
    return images


def _joined(parts: list[Predictions]) -> Predictions:
    return Predictions(
        tuple(name for part in parts for name in part.classes),
        np.concatenate([part.probabilities for part in parts]),
        np.concatenate([part.scores for part in parts]),
        np.concatenate([part.is_ood for part in parts]),
        np.concatenate([part.p_values for part in parts]),
        tuple(name for part in parts for name in part.names),
        parts[0].name_column,
    )


def _device(name: str) -> torch.device:
    """params.yaml is checked before a stage reads it, but this name comes straight from a caller."""
    try:
        return resolve_device(name)
    except RuntimeError:
        raise SalError(f"device {name} is not known; use auto, cpu, cuda, cuda:N or mps") from None
