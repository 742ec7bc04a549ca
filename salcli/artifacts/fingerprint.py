"""Which file was made with which: fingerprints that later stages compare."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import TYPE_CHECKING

from salcli.data.image_folder import files_below
from salcli.errors import BadArtifactError

if TYPE_CHECKING:
    from pathlib import Path

    from salcli.artifacts.layout import Found


def fingerprint(found: Found) -> str:
    """Identifies an artifact by its content."""
    return fingerprint_of_file(found.path)


def fingerprint_of_file(path: Path) -> str:
    """Identifies any file by its content; empty where there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def fingerprint_of_listing(paths: list[Path]) -> str:
    """Tells whether files and folders are still the same by names, sizes and times, without reading them."""
    lines = []
    for top in paths:
        for path in files_below(top) if top.is_dir() else [top]:
            with suppress(OSError):  # a list may name what no file can be called
                facts = path.stat()
                lines.append(f"{path.relative_to(top.parent)}\0{facts.st_size}\0{facts.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:16] if lines else ""


def check_made_with(found: Found, recorded: str, what: Found, first: str = "") -> None:
    """Refuse `found` unless it was made with `what`, for example with the classifier that is here now.

    `first`: a command that has to run before the one that makes `found`, where that one alone would not help.
    """
    here = fingerprint(what)
    if recorded != here:
        cure = f"make it again: {first}, then {found.made_by}" if first else found.cure
        raise BadArtifactError(
            f"{found.path} was made with another {what.path.name} ({recorded}) than the one here ({here}); {cure}"
        )
