"""How a params.yaml names a place outside of it."""

from __future__ import annotations

import os
from pathlib import Path

from salcli.errors import ProjectError


def as_written(place: Path, project: Path) -> str:
    """From the project's folder where it lies inside, so that both can be moved; else from the root."""
    # links are kept: they may be there for a reason
    absolute, top = Path(os.path.abspath(place.expanduser())), Path(os.path.abspath(project))  # noqa: PTH100
    written = str(absolute.relative_to(top) if absolute.is_relative_to(top) else absolute)
    try:
        written.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(written).decode(errors="replace")
        raise ProjectError(
            f"the name of {shown} is not valid UTF-8, so params.yaml cannot hold it; rename it, or name a link to it "
            "(ln -s). Names of files inside of it may be as they are"
        ) from None
    return written
