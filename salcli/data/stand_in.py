"""What a user put in the place of a data set: a folder of images or a .npz file under its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def stand_ins(name: str, root: Path) -> list[Path]:
    """NAME and NAME.npz below the data root, as far as they are there.

    Compared letter by letter: where the file system takes iSUN/ for isun/, the former is no stand-in.
    """
    present = {path.name for path in root.iterdir()} if root.is_dir() else set()
    return [root / own for own in (name, f"{name}.npz") if own in present]
