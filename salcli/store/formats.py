"""What each kind of file holds: samples, splits, representations, candidates, networks, the state of a training."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from salcli.data.duplicates import DIGEST_BYTES, Digests, sample_digests
from salcli.data.sets import LARGEST_VALUE, Samples, shown, some_of
from salcli.data.splits import IdSplit, Index
from salcli.errors import BadArtifactError, ModelError, SalError, UnknownNameError, check_regular
from salcli.models.backbones import is_hooked
from salcli.models.network import Classifier, NetworkSpec, with_weights
from salcli.progress import Task
from salcli.sal.gradients import Representation
from salcli.store.files import (
    DAMAGED,
    Found,
    Header,
    about_of,
    atomic_path,
    creating,
    mapped,
    read_arrays,
    read_header,
    read_tensors,
    reading,
    sealed_file,
    write_arrays,
    write_tensors,
)

N = TypeVar("N", bound=Classifier)

# -- samples

SAMPLES = "samples"
IMAGES, VECTORS = "images", "vectors"
MARKS = ("labels", "is_test", "is_calibration")  # n each
TEXTS = ("class_names", "files", "row_ids", "origin_files")
ROWS_AT_ONCE = 1024
TOO_SMALL_TO_ASK = 10_000_000  # bytes: if the disk is full, writing these fails soon enough


def write_samples(path: Path, samples: Samples, about: Mapping[str, Any]) -> None:
    """A prepared set. Its array may be a map of another file: it is copied piece by piece."""
    array = samples.array
    rest = samples, sample_digests(array), about
    write_streamed_samples(path, array.shape, array.dtype, _pieces(array), lambda: rest)


def write_streamed_samples(
    path: Path,
    shape: tuple[int, ...],  # n, …
    dtype: np.dtype[Any],
    pieces: Iterable[NDArray[Any]],
    describe: Callable[[], tuple[Samples, Digests, Mapping[str, Any]]],
) -> None:
    """Store up to n samples as they come, then what `describe` says of them when all are there.

    That is all but the array of Samples, the digests of the pixels or values that were read, and how the set was made.
    The size of a mapped array is fixed when its first row is written: if fewer than n came, they are written again.
    """
    _check_space(path, shape, dtype)
    with atomic_path(path) as partial:
        with sealed_file(partial, SAMPLES, {}) as file:
            stored, n_written = _write_rows(file, shape, dtype, pieces)
            rest = describe()
            _write_description(file, *rest)
            rows = mapped(partial, stored)
        if n_written < shape[0]:
            array = rows()[:n_written]
            partial.unlink()  # the map keeps its content
            with sealed_file(partial, SAMPLES, {}) as file:
                _write_rows(file, array.shape, dtype, _pieces(array))
                _write_description(file, *rest)


def _write_rows(
    file: h5py.File, shape: tuple[int, ...], dtype: np.dtype[Any], pieces: Iterable[NDArray[Any]]
) -> tuple[h5py.Dataset, int]:
    """The array, and how many of its rows were written."""
    stored, n_written = file.create_dataset(VECTORS if len(shape) == 2 else IMAGES, shape, dtype), 0
    for piece in pieces:
        if len(piece):
            stored[n_written : n_written + len(piece)] = piece
        n_written += len(piece)
    return stored, n_written


def _pieces(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    return (array[start : start + ROWS_AT_ONCE] for start in range(0, len(array), ROWS_AT_ONCE))


def read_samples(found: Found) -> Samples:
    """A prepared set, with its array as a read-only map of the file."""
    with reading(found, SAMPLES) as file:
        marks: dict[str, Any] = {name: np.asarray(file[name]) for name in MARKS if name in file}
        stored = file[VECTORS if VECTORS in file else IMAGES]
        names = tuple(os.fsdecode(name) for name in file.get("class_names", ()))
        samples = Samples(mapped(found.path, stored)(), class_names=names, **marks)
        n_axes, dtype = (2, np.float32) if VECTORS in file else (4, np.uint8)
        if samples.array.ndim != n_axes or samples.array.dtype != dtype or 0 in samples.array.shape[1:]:
            raise ValueError(f"its samples are {shown(samples.array)}")
        if any(array.shape != (len(samples),) for array in marks.values()):
            raise ValueError(f"it has {len(samples)} samples, but another number of labels or marks")
        if samples.labels is not None and samples.class_names:
            _check_within(samples.labels, len(samples.class_names), "labels")
        if file["digest"].shape != (len(samples), DIGEST_BYTES):
            raise ValueError(f"it has {len(samples)} samples, but another number of digests")
        return samples


def _check_within(numbers: NDArray[Any], n: int, what: str) -> None:
    """Numbers of rows or classes must be integers from 0 to n − 1."""
    if numbers.dtype.kind not in "iu":
        raise ValueError(f"its {what} are no integers")
    wrong = np.flatnonzero((numbers < 0) | (numbers >= n))
    if len(wrong):
        first = ", ".join(str(numbers[i]) for i in wrong[:3])
        raise ValueError(f"{len(wrong)} of its {len(numbers)} {what} are not between 0 and {n - 1}, the first: {first}")


class Origin(NamedTuple):
    """Where the user finds a sample: X[row] of the array in `file`, or an image, which may be on row `row` of a list.

    Files are relative to the path of their set, where they are below it.
    """

    file: str
    row: int | None = None  # counted from 0, after the header; None: an image in a folder
    id: str = ""

    @property
    def is_image_file(self) -> bool:
        """Whether `file` is the sample itself, not an array that it is a row of."""
        return bool(self.file) and (self.row is None or self.id == self.file)

    def __str__(self) -> str:
        return self.id or (self.file if self.row is None else f"{self.file}:{self.row}")


def names_of(found: Found, index: NDArray[np.int64]) -> list[Origin]:
    """The origin of some samples of a prepared set, whatever was held out, left out or joined since."""
    with reading(found, SAMPLES) as file:
        files, ids, tables = (
            [os.fsdecode(one) for one in file.get(name, ())] for name in ("files", "row_ids", "origin_files")
        )
        if "origin" not in file:
            return [Origin(files[i]) for i in index]
        origins = file["origin"][()][index].tolist()
        return [
            Origin(files[i], row, files[i]) if files else Origin(tables[k], row, ids[i] if ids else "")
            for i, (k, row) in zip(index, origins, strict=True)
        ]


def read_file_names(found: Found) -> tuple[str, ...]:
    """The file of each image, relative to the path of its set, or the id of each row; empty where there are none."""
    with reading(found, SAMPLES) as file:
        return tuple(os.fsdecode(name) for name in file.get("files", file.get("row_ids", ())))


def read_digests(found: Found) -> Digests:
    """One digest for each sample; samples that were equal when they were read have equal ones."""
    with reading(found, SAMPLES) as file:
        return np.asarray(file["digest"], np.uint8).view(f"V{DIGEST_BYTES}")[:, 0]


def read_shown(found: Found) -> dict[str, tuple[str, ...]]:
    """The columns that people want to see beside the samples, by name."""
    with reading(found, SAMPLES) as file:
        return {name: _read_texts(file, f"shown/{i}") for i, name in enumerate(about_of(file).get("shown", ()))}


def _write_description(file: h5py.File, samples: Samples, digests: Digests, about: Mapping[str, Any]) -> None:
    for name in (*MARKS, "origin"):
        array = getattr(samples, name)
        if array is not None:
            file.create_dataset(name, data=array)
    for name in TEXTS:  # no attributes: those may not be longer than 64 kB
        if texts := getattr(samples, name):
            file.create_dataset(name, data=np.array([os.fsencode(text) for text in texts]))
    file.create_dataset("digest", data=digests.view(np.uint8).reshape(-1, DIGEST_BYTES))
    for i, cells in enumerate(samples.shown.values()):  # a column's name may be no name for HDF5
        _write_texts(file, f"shown/{i}", cells)
    shown = {"shown": [*samples.shown]} if samples.shown else {}
    file.attrs["about"] = json.dumps({**about, **shown}, sort_keys=True)


def _write_texts(file: h5py.File, name: str, texts: tuple[str, ...]) -> None:
    """End to end: in an array of strings, each would take as much room as the longest one."""
    encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
    file.create_dataset(f"{name}/text", data=np.frombuffer(b"".join(encoded), np.uint8))
    file.create_dataset(f"{name}/end", data=np.cumsum([len(text) for text in encoded], dtype=np.int64))


def _read_texts(file: h5py.File, name: str) -> tuple[str, ...]:
    content, ends = file[f"{name}/text"][()].tobytes(), file[f"{name}/end"][()].tolist()
    return tuple(content[i:j].decode("utf-8", "surrogateescape") for i, j in pairwise([0, *ends]))


def _check_space(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Fails now rather than after hours of decoding."""
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    needed, free = math.prod(shape) * dtype.itemsize, shutil.disk_usage(folder).free
    if needed > max(free, TOO_SMALL_TO_ASK):
        smaller = ", or choose a smaller data.image_size" if len(shape) == 4 else ""
        raise SalError(f"{path} needs {needed / 1e9:,.2f} GB, {free / 1e9:,.2f} GB are free; make room{smaller}")


# -- splits and the wild set

ID_SPLIT, WILD_TRUTH = "id-split", "wild-truth"
# Kinds of lists of samples. The first two count through the ID data, then through the OOD data.
WILD_SET, WILD_HOLDOUT, OOD_TEST = "wild-set", "wild-holdout", "ood-test"


def write_id_split(path: Path, split: IdSplit, about: Mapping[str, Any]) -> None:
    write_arrays(path, ID_SPLIT, asdict(split), about)


def read_id_split(found: Found) -> IdSplit:
    split = IdSplit(*_read_rows(found, ID_SPLIT, *(part.name for part in fields(IdSplit))))
    rows = np.concatenate([*vars(split).values()])
    if n_more := len(rows) - len(np.unique(rows)):
        raise found.damaged(f"{n_more} of its {len(rows)} rows stand there twice")
    return split


def _read_rows(found: Found, kind: str, *names: str) -> list[Index]:
    """Lists of row numbers. Whether there are so many samples is checked when they are read."""
    arrays = read_arrays(found, kind)
    for name in names:
        rows = arrays.get(name)
        if rows is None or rows.ndim != 1 or rows.dtype.kind not in "iu" or (rows < 0).any():
            raise found.damaged(f"its {name} are not a list of numbers from 0 on")
    return [arrays[name] for name in names]


def write_index(path: Path, kind: str, index: Index, about: Mapping[str, Any]) -> None:
    write_arrays(path, kind, {"index": index}, about)


def read_index(found: Found, kind: str) -> Index:
    return _read_rows(found, kind, "index")[0]


def write_wild_truth(path: Path, is_ood: NDArray[np.bool_] | None, about: Mapping[str, Any]) -> None:
    """Which wild samples are OOD; without an array if that is not known."""
    write_arrays(path, WILD_TRUTH, {} if is_ood is None else {"is_ood": is_ood}, about)


def read_wild_truth(found: Found) -> NDArray[np.bool_] | None:
    return read_arrays(found, WILD_TRUTH).get("is_ood")


# -- representations

REPRESENTATION = "representation"
CHUNK_BYTES = 2**23  # of features and logits that are in memory at a time


def not_usable(numbers: Tensor) -> str:
    """How many rows hold NaN, infinity or what overflows when it is squared, and which; empty if none does."""
    if not numbers.numel() or max(abs(float(one)) for one in numbers.aminmax()) <= LARGEST_VALUE:  # without copies
        return ""
    rows = torch.nonzero(~(numbers.abs() <= LARGEST_VALUE).all(dim=1)).flatten().tolist()
    return f"{len(rows)} of {len(numbers)} samples is NaN, infinite or above {LARGEST_VALUE:g} (rows {some_of(rows)})"


@contextmanager
def writing_representation(
    path: Path, n_samples: int, n_classes: int, n_features: int, about: Mapping[str, Any]
) -> Iterator[Callable[[Representation], None]]:
    """A function that stores the next samples."""
    filled = 0

    def append(chunk: Representation) -> None:
        nonlocal filled
        for name, numbers in (("features", chunk.feature), ("logits", chunk.logits)):
            if wrong := not_usable(numbers):
                raise ModelError(f"{name} of the network: that of {wrong}; train it again, or check its weights")
        rows = slice(filled, filled + len(chunk))
        for name in ("feature", "logits", "label", "predicted"):
            file[name][rows] = getattr(chunk, name).numpy()
        filled = rows.stop

    with creating(path, REPRESENTATION, about) as file:
        file.create_dataset("feature", (n_samples, n_features), np.float32)
        file.create_dataset("logits", (n_samples, n_classes), np.float32)
        for name in ("label", "predicted"):
            file.create_dataset(name, (n_samples,), np.int64)
        yield append


@dataclass(frozen=True, eq=False)
class RepresentationFile:
    """Features, logits and labels that stream from disk (a RepresentationSource). Wild labels are predicted ones."""

    found: Found
    about: dict[str, Any]
    columns: tuple[Callable[[], NDArray[Any]], Callable[[], NDArray[Any]]]  # maps of features and logits
    label: Tensor
    predicted: Tensor
    n_features: int
    n_classes: int
    rows: Tensor | None = None  # the rows of the file that belong to this source, in rising order; None: all

    @classmethod
    def open(cls, found: Found) -> RepresentationFile:
        """Reads everything but features and logits."""
        with reading(found, REPRESENTATION) as file:
            n, n_classes = file["logits"].shape
            for name in ("label", "predicted"):
                _check_within(file[name][:], n_classes, f"{name} numbers")
            if not len(file["label"]) == len(file["predicted"]) == len(file["feature"]) == n:
                raise ValueError("its columns have different lengths")
            columns = mapped(found.path, file["feature"]), mapped(found.path, file["logits"])
            label, predicted = (torch.from_numpy(file[name][:]) for name in ("label", "predicted"))
            return cls(found, about_of(file), columns, label, predicted, file["feature"].shape[1], n_classes)

    def __len__(self) -> int:
        return len(self.label)

    def chunks(self) -> Iterator[Representation]:
        """Some rows at a time; rows that do not belong to this source are not read."""
        for start in range(0, len(self), self._rows_per_chunk):
            piece = slice(start, min(start + self._rows_per_chunk, len(self)))
            yield self._read(piece if self.rows is None else self.rows[piece].numpy(), self.label[piece])

    def take(self, rows: Tensor) -> RepresentationFile | Representation:
        of_file = rows if self.rows is None else self.rows[rows]
        if 0 < len(rows) <= self._rows_per_chunk:
            return self._read(of_file.numpy(), self.label[rows])
        return replace(self, label=self.label[rows], predicted=self.predicted[rows], rows=of_file)

    def whole(self) -> Representation:
        """All rows in memory."""
        return self._read(slice(None) if self.rows is None else self.rows.numpy(), self.label)

    @property
    def _rows_per_chunk(self) -> int:
        return max(1, CHUNK_BYTES // (4 * (self.n_classes + self.n_features)))

    def _read(self, rows: slice | NDArray[np.int64], label: Tensor) -> Representation:
        """Some rows of the file."""
        # new maps each time: with one for all reads, every row ever read would count as memory of this process
        feature, logits = (torch.from_numpy(np.array(column()[rows])) for column in self.columns)
        for name, numbers in (("feature", feature), ("logits", logits)):
            if wrong := not_usable(numbers):
                raise self.found.damaged(f"the {name} of {wrong}")
        return Representation(feature, logits, label)


# -- candidates

CANDIDATES = "candidates"


@dataclass(frozen=True)
class Candidates:
    """The outcome of the filter. All scores are outlier scores (higher = outlier) by `score_name`; "sal" is τ."""

    index: np.ndarray  # of the candidates in the wild set, rising
    wild_score: np.ndarray  # of every wild sample
    predicted: np.ndarray  # the predicted class of every wild sample
    calibration_score: np.ndarray
    p_value: np.ndarray  # of every wild sample; NaN where the score has no exact ones
    certified: np.ndarray  # of the first k wild samples by falling score, at least so many are outliers (95%)
    threshold: float
    score_name: str

    @property
    def is_candidate(self) -> np.ndarray:
        """For every wild sample."""
        mask = np.zeros(len(self.wild_score), bool)
        mask[self.index] = True
        return mask

    @property
    def score(self) -> np.ndarray:
        """Of the candidates."""
        scores: np.ndarray = self.wild_score[self.index]
        return scores


def write_candidates(path: Path, candidates: Candidates, about: Mapping[str, Any]) -> None:
    content = vars(candidates)
    arrays = {name: value for name, value in content.items() if isinstance(value, np.ndarray)}
    facts = {name: value for name, value in content.items() if name not in arrays}
    write_arrays(path, CANDIDATES, arrays, {**about, **facts})


def read_candidates(found: Found) -> Candidates:
    facts, arrays = read_header(found, CANDIDATES).about, read_arrays(found, CANDIDATES)
    try:
        candidates = Candidates(**arrays, threshold=facts["threshold"], score_name=facts["score_name"])
        _check_within(candidates.index, len(candidates.wild_score), "candidates")
    except (KeyError, TypeError, ValueError) as error:
        raise found.damaged(error) from None
    for name in ("wild_score", "calibration_score"):
        if n_bad := int((~np.isfinite(arrays[name])).sum()):
            raise found.damaged(f"{n_bad} of {len(arrays[name])} numbers of {name} are NaN or infinite")
    return candidates


# -- networks


def write_network(path: Path, network: Classifier, about: Mapping[str, Any]) -> None:
    """The weights, and what is needed to build the network again."""
    write_tensors(path, Header(network.kind, dict(about), asdict(network.spec)), network.state_dict())


def read_network(found: Found, network_class: type[N]) -> N:
    """The network with its weights, ready for inference."""
    spec = read_header(found, network_class.kind).spec
    with as_described(found, has_custom_code=is_hooked(str(spec.get("backbone")))):
        own = NetworkSpec.from_json(spec)
        return with_weights(own.backbone, lambda: network_class(own), read_tensors(found)).eval()


@contextmanager
def as_described(found: Found, *, has_custom_code: bool) -> Iterator[None]:
    """What goes wrong inside means that a file does not fit its header, or that the custom code has changed."""
    try:
        yield
    except (ModelError, UnknownNameError, *DAMAGED) as error:
        if isinstance(error, ModelError) and has_custom_code:
            raise
        reason = str(error).partition("\n")[0]
        raise BadArtifactError(f"{found.path} does not fit its own description ({reason}); {found.fix}") from None


# -- the state of an unfinished training

DIGEST = 32  # bytes of a checksum, before the state


class ResumePoint:
    """Keeps the state of a training run outside of what DVC tracks, so that it survives a kill.

    `settings` are everything that the run depends on: a state that was saved with other settings is not used.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], task: Task) -> None:
        everything = {**settings, "torch": torch.__version__}
        self._path, self._task = path, task
        self._settings = hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()

    def load(self) -> dict[str, Any] | None:
        """The state that an earlier run left, if it can be used."""
        try:
            check_regular(self._path)
            content = self._path.read_bytes()
            if hashlib.sha256(content[DIGEST:]).digest() != content[:DIGEST]:
                raise ValueError("its content does not match its checksum")
            loaded = torch.load(io.BytesIO(content[DIGEST:]), map_location="cpu", weights_only=True)
            settings, state = loaded["config"], loaded["state"]
        except FileNotFoundError:
            return None
        except Exception:  # whatever is wrong with it, it cannot be used
            self._task.note("starts from the beginning: the state of the stopped run cannot be read")
            return None
        if settings != self._settings:
            self._task.note("starts from the beginning: params or inputs have changed since the run that was stopped")
            return None
        assert isinstance(state, dict)
        return state

    def save(self, state: dict[str, Any]) -> None:
        content = io.BytesIO()  # torch's own writer does not report a full disk as an OSError
        torch.save({"config": self._settings, "state": state}, content)
        with atomic_path(self._path) as partial:
            partial.write_bytes(hashlib.sha256(content.getbuffer()).digest() + content.getbuffer())
