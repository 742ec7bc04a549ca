"""Decoded image sets on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from salcli.artifacts.hdf5 import about, creating, reading
from salcli.data.image_set import ImageSet

if TYPE_CHECKING:
    from pathlib import Path

    from salcli.artifacts.layout import Found

KIND = "image-set"


def write_image_set(path: Path, image_set: ImageSet, name: str) -> None:
    """Store what the set has."""
    with creating(path, KIND, {"name": name, "class_names": image_set.class_names}) as file:
        file.create_dataset("images", data=image_set.images)
        for part in ("labels", "region"):
            array = getattr(image_set, part)
            if array is not None:
                file.create_dataset(part, data=array)


def read_image_set(found: Found) -> ImageSet:
    """The whole set in memory."""
    with reading(found, KIND) as file:
        return ImageSet(
            images=np.asarray(file["images"]),
            labels=np.asarray(file["labels"]) if "labels" in file else None,
            class_names=tuple(about(file)["class_names"]),
            region=np.asarray(file["region"]) if "region" in file else None,
        )
