"""Every data set by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from salcli.data.digits import load_digits_0_7, load_digits_8_9
from salcli.data.photo_patches import load_photo_patches
from salcli.errors import unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from salcli.data.image_set import ImageSet


@dataclass(frozen=True)
class DataSet:
    """What is known of a data set before it is loaded."""

    name: str
    role: Literal["id", "ood"]
    load: Callable[[], ImageSet]


DATA_SETS = {
    entry.name: entry
    for entry in (
        DataSet("digits-0-7", "id", load_digits_0_7),
        DataSet("digits-8-9", "ood", load_digits_8_9),
        DataSet("photo-patches", "ood", load_photo_patches),
    )
}


def data_set(name: str) -> DataSet:
    """Look a data set up."""
    if name not in DATA_SETS:
        raise unknown_name("data set", name, DATA_SETS)
    return DATA_SETS[name]
