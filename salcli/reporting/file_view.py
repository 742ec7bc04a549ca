"""What `inspect` shows of a file."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
from rich.console import Group
from rich.pretty import Pretty
from rich.text import Text

from salcli.artifacts.layout import Found
from salcli.errors import BadArtifactError, MissingArtifactError
from salcli.reporting.stage_tables import plain_table

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType
    from rich.table import Table

BYTES_AT_ONCE = 2**26


def file_view(path: Path, top: int) -> Group:
    """Look at the content, not at the name."""
    if not path.is_file():
        raise MissingArtifactError(f"{path} is not a file")
    path.open("rb").close()  # a file that may not be read looks damaged to some of its readers
    size = Text(f"{path}  {path.stat().st_size:,} bytes", style="bold")
    parts = _hdf5(path, top) if h5py.is_hdf5(path) else _other(path, top)
    return Group(size, *parts)


def _other(path: Path, top: int) -> list[RenderableType]:
    if path.suffix == ".safetensors":
        return _checkpoint(path)
    try:
        if path.suffix == ".json":
            return [Pretty(json.loads(path.read_text(encoding="utf-8")))]
        if path.suffix == ".csv":
            return [_rows(path.read_text(encoding="utf-8"), top)]
    except (ValueError, LookupError) as error:
        raise BadArtifactError(f"{path} is damaged or not ours ({error})") from None
    raise BadArtifactError(f"{path} is no checkpoint and no HDF5, JSON or CSV file that salcli could show")


def _rows(text: str, top: int) -> Table:
    header, *rows = csv.reader(io.StringIO(text))
    table = plain_table(f"The first {min(top, len(rows))} of {len(rows):,} rows", *header)
    for row in rows[:top]:
        table.add_row(*row)
    return table


def _checkpoint(path: Path) -> list[RenderableType]:
    from safetensors import safe_open

    from salcli.artifacts.checkpoint import read_header

    header = read_header(Found(path))
    table = plain_table("Weights", "tensor", "shape", "numbers")
    total = 0
    with safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118
            shape = file.get_slice(name).get_shape()
            count = int(np.prod(shape))
            total += count
            table.add_row(name, " × ".join(map(str, shape)) or "–", f"{count:,}")
    table.add_section()
    table.add_row("all", "", f"{total:,}")
    return [_facts({"kind": header.kind, **header.spec, **header.about}), table]


def _hdf5(path: Path, top: int) -> list[RenderableType]:
    try:
        return _content(path, top)
    except (OSError, RuntimeError, LookupError, TypeError, ValueError) as error:
        raise BadArtifactError(f"{path} is damaged or not ours ({error})") from None


def _content(path: Path, top: int) -> list[RenderableType]:
    with h5py.File(path, "r") as file:
        kind = str(file.attrs.get("kind", "unknown"))
        about = json.loads(file.attrs.get("about", "{}"))
        table = plain_table("Arrays", "array", "shape", "type", "smallest", "largest")

        def add(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset):
                low, high = _extremes(item)
                table.add_row(name, " × ".join(map(str, item.shape)), str(item.dtype), low, high)

        file.visititems(add)
        parts: list[RenderableType] = [_facts({"kind": kind, **about}), table]
        if kind == "candidates" and top:
            parts.append(_top_candidates(file, top))
        if kind == "gradients":
            parts.append(_classes(file))
    return parts


def _facts(facts: dict[str, Any]) -> Table:
    table = plain_table("", "about", "")
    table.columns[1].justify = "left"
    for name, value in facts.items():
        shown = ", ".join(f"{key}={item}" for key, item in value.items()) if isinstance(value, dict) else str(value)
        table.add_row(name, Text(shown))
    return table


def _extremes(dataset: h5py.Dataset) -> tuple[str, str]:
    if dataset.size == 0 or dataset.dtype.kind not in "iuf":
        return "", ""
    step = max(1, BYTES_AT_ONCE * len(dataset) // (dataset.size * dataset.dtype.itemsize))
    chunks = (dataset[start : start + step] for start in range(0, len(dataset), step))
    lows, highs = zip(*((chunk.min(), chunk.max()) for chunk in chunks), strict=True)
    return f"{min(lows):.4g}", f"{max(highs):.4g}"


def _top_candidates(file: h5py.File, top: int) -> Table:
    table = plain_table(f"Top {top} candidates", "place in the wild set", "score", "predicted class")
    for row in np.argsort(-file["score"][:], kind="stable")[:top]:
        table.add_row(str(file["index"][row]), f"{file['score'][row]:.4g}", str(file["predicted"][row]))
    return table


def _classes(file: h5py.File) -> Table:
    table = plain_table("Samples of each class", "class", "label", "predicted")
    n_classes = file["residual"].shape[1]
    counts = [np.bincount(file[name][:], minlength=n_classes) for name in ("label", "predicted")]
    for k in range(min(n_classes, 20)):
        table.add_row(str(k), f"{counts[0][k]:,}", f"{counts[1][k]:,}")
    if n_classes > 20:
        table.add_row("…", "", "")
    return table
