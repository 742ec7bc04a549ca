"""Places365: a published sample of its validation images."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from salcli.data.image_set import Source
from salcli.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = "val_256"
LIST = "lists/places365.txt"


def places365_names() -> list[str]:
    """The names of the 10,000 images. The protocol's own sample was never published, so this is ours."""
    lines = files("salcli.data").joinpath(LIST).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def load_places365(root: Path) -> Source:
    """The images on the list, whatever else there is."""
    names = places365_names()
    there = {path.name for path in (root / FOLDER).iterdir()}
    missing = [name for name in names if name not in there]
    if missing:
        raise DataError(
            f"{root / FOLDER} lacks {len(missing):,} of the {len(names):,} images of places365 "
            f"({missing[0]}, …); get them again: salcli data fetch places365"
        )
    return Source(tuple(root / FOLDER / name for name in names))
