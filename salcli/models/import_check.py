"""Which backbones are code of somebody's own, that building them would import and so run."""

from __future__ import annotations

from salcli.errors import ModelError


class ImportRefusedError(ModelError):
    """A file names code that nobody has allowed to run."""


# NAME of these libraries, not a module's path
LIBRARIES = ("torchvision", "timm")


def import_path(backbone: str) -> str | None:
    """module:Name, or None where the backbone is one of ours or of a known library."""
    library, colon, _ = backbone.partition(":")
    return backbone if colon and library not in LIBRARIES else None


def check_may_import(backbone: str, where: str, *, allowed: bool) -> None:
    """Refuse to run code that a file merely names."""
    path = import_path(backbone)
    if path and not allowed:
        raise ImportRefusedError(
            f"{where} was made with a network of somebody's own: to load it, {path} would be imported, which runs its "
            "code; allow that with --allow-import (in Python: allow_import=True) if you trust it"
        )
