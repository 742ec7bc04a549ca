"""Which backbones are code of somebody's own, that building them would import and so run."""

from __future__ import annotations

from salcli.errors import ModelError


class ImportRefusedError(ModelError):
    """A file names code that nobody has allowed to run."""


# NAME of these libraries, not a module's path
LIBRARIES = ("torchvision", "timm")


def own_code(backbone: str) -> str | None:
    """The backbone where it is, or could be taken for, a path to import; None for ours and those of known libraries."""
    library, colon, _ = backbone.partition(":")
    return backbone if colon and library not in LIBRARIES else None


def check_may_import(backbone: str, where: str, *, allowed: bool) -> None:
    """Refuse to run code that a file merely names."""
    path = own_code(backbone)
    if path and not allowed:
        raise ImportRefusedError(
            f"{where} was made with a network of somebody's own: to load it, {path} would be imported, which runs its "
            "code; allow that with --allow-import (in Python: allow_import=True) if you trust it"
        )
