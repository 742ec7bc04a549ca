"""Splits and the wild mixture on disk. The truth about the wild data lies in a file of its own."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from salcli.artifacts.hdf5 import about, read_array, reading, write_arrays
from salcli.data.splits import IdSplit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from salcli.artifacts.layout import Found
    from salcli.data.splits import Index

ID_SPLIT = "id-split"
WILD_MIXTURE = "wild-mixture"
WILD_TRUTH = "wild-truth"


def write_id_split(path: Path, split: IdSplit, made_with: Mapping[str, Any]) -> None:
    """Store the four parts."""
    write_arrays(path, ID_SPLIT, asdict(split), made_with)


def read_id_split(found: Found) -> IdSplit:
    """The four parts."""
    return IdSplit(*(read_array(found, ID_SPLIT, part.name) for part in fields(IdSplit)))


def write_wild_mixture(path: Path, source: Index, ood_test: Index, made_with: Mapping[str, Any]) -> None:
    """Store which images make the wild set, and which OOD images are left for the test."""
    write_arrays(path, WILD_MIXTURE, {"source": source, "ood_test": ood_test}, made_with)


def read_wild_source(found: Found) -> Index:
    """The wild set: indices that count through the ID data, then through the OOD data."""
    return read_array(found, WILD_MIXTURE, "source")


def read_split_of_mixture(found: Found) -> str:
    """The fingerprint of the ID split that the wild set was drawn from."""
    with reading(found, WILD_MIXTURE) as file:
        return str(about(file)["split"])


def read_ood_test(found: Found) -> Index:
    """The OOD test set: indices into the OOD data."""
    return read_array(found, WILD_MIXTURE, "ood_test")


def write_wild_truth(path: Path, is_ood: NDArray[np.bool_] | None, made_with: Mapping[str, Any]) -> None:
    """Store the truth, or that it is unknown."""
    known = {} if is_ood is None else {"is_ood": is_ood}
    write_arrays(path, WILD_TRUTH, known, {**made_with, "truth": "known" if known else "unknown"})


def read_wild_truth(found: Found) -> NDArray[np.bool_] | None:
    """For diagnosis only; None where it is unknown."""
    with reading(found, WILD_TRUTH) as file:
        return None if about(file).get("truth") == "unknown" else np.asarray(file["is_ood"])
