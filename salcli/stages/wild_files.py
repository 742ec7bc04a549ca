"""Which files wild samples come from, for people who look at them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from salcli.artifacts import layout
from salcli.artifacts.images import read_file_names
from salcli.stages.inputs import wild_images

if TYPE_CHECKING:
    import numpy as np

    from salcli.artifacts.layout import Workspace


def wild_files(workspace: Workspace, id_name: str, ood: str, seed: int, index: np.ndarray) -> list[str]:
    """A name for each sample, empty where none is known.

    In wild data that salcli mixed itself, names would tell ID from OOD samples, so they are not told.
    """
    wild = wild_images(workspace, id_name, ood, seed)
    n_id = len(wild.sets[0])
    if (wild.source < n_id).any():
        return [""] * len(index)
    names = read_file_names(workspace.find(layout.prepared_ood_set(ood)))
    return [names[i - n_id] if names else "" for i in wild.source[index]]
