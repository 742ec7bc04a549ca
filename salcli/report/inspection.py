"""What `salcli inspect` shows of a file: facts about it, its arrays or weights, its first rows."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.pretty import Pretty
from rich.table import Table
from rich.text import Text

from salcli.errors import BadArtifactError, MissingArtifactError
from salcli.report.console import plain_table, records_table
from salcli.store.files import Found, check_claims, read_header, reading_json

BYTES_AT_ONCE = 2**26
SHOWN_NUMBERS = 20


def file_view(path: Path, top: int) -> Group:
    """Looks at the content, not at the name alone. `top`: candidates or rows to list."""
    if not path.is_file():
        raise MissingArtifactError(f"{path} is not a file")
    path.open("rb").close()  # a file that may not be read looks damaged to some of its readers
    size = Text(f"{path}  {path.stat().st_size:,} bytes", style="bold")
    return Group(size, *(_hdf5(path, top) if h5py.is_hdf5(path) else _other(path, top)))


def _other(path: Path, top: int) -> list[RenderableType]:
    if path.suffix == ".safetensors":
        return _checkpoint(path)
    if path.suffix == ".json":
        with reading_json(Found(path)) as content:
            return [Pretty(content)]
    if path.suffix == ".csv":
        try:
            return [_rows(path.read_text(encoding="utf-8"), top)]
        except (ValueError, LookupError) as error:
            raise Found(path).damaged(error) from None
    raise BadArtifactError(f"{path} is no checkpoint and no HDF5, JSON or CSV file that salcli could show")


def _rows(text: str, top: int) -> Table:
    header, *rows = csv.reader(io.StringIO(text))
    table = plain_table(f"The first {min(top, len(rows))} of {len(rows):,} rows", *map(escape, header))
    for row in rows[:top]:
        table.add_row(*map(Text, row))
    return table


def _checkpoint(path: Path) -> list[RenderableType]:
    from safetensors import safe_open

    header = read_header(Found(path))
    table = plain_table("Weights", "tensor", "shape", "numbers", "type")
    total = 0
    with safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118
            stored = file.get_slice(name)
            count = int(np.prod(stored.get_shape()))
            total += count
            table.add_row(name, " × ".join(map(str, stored.get_shape())) or "–", f"{count:,}", str(stored.get_dtype()))
    table.add_section()
    table.add_row("all", "", f"{total:,}", "")
    about = {"frozen backbone" if name == "embedder" else name: value for name, value in header.about.items()}
    return [_facts({"kind": header.kind, **header.spec, **about}), table]


def _hdf5(path: Path, top: int) -> list[RenderableType]:
    try:
        with h5py.File(path, "r") as file:
            check_claims(file, path.stat().st_size)
            kind = str(file.attrs.get("kind", "unknown"))
            about = json.loads(file.attrs.get("about", "{}"))
            parts: list[RenderableType] = [_facts({"kind": kind, **about}), _arrays(file)]
            if kind == "candidates" and top:
                scores, predicted, index = (file[name][:] for name in ("wild_score", "predicted", "index"))
                highest = index[np.argsort(-scores[index], kind="stable")[:top]]
                rows = [
                    {"index in the wild set": f"{i}", "score": f"{scores[i]:.4g}", "predicted class": f"{predicted[i]}"}
                    for i in highest
                ]
                parts.append(records_table(f"Top {top} candidates", rows))
            return parts
    except (OSError, RuntimeError, LookupError, TypeError, ValueError) as error:
        raise Found(path).damaged(error) from None


def _arrays(file: h5py.File) -> Table:
    table = plain_table("Arrays", "array", "shape", "type", "smallest", "largest")

    def add(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            table.add_row(name, " × ".join(map(str, item.shape)), str(item.dtype), *_extremes(item))

    file.visititems(add)
    return table


def _extremes(dataset: h5py.Dataset) -> tuple[str, str]:
    if dataset.size == 0 or dataset.dtype.kind not in "iuf":
        return "", ""
    step = max(1, BYTES_AT_ONCE * len(dataset) // (dataset.size * dataset.dtype.itemsize))
    chunks = (dataset[start : start + step] for start in range(0, len(dataset), step))
    lows, highs = zip(*((chunk.min(), chunk.max()) for chunk in chunks), strict=True)
    return f"{min(lows):.4g}", f"{max(highs):.4g}"


def _facts(facts: dict[str, Any]) -> Table:
    table = plain_table("", "about", "", n_left=2)
    for name, value in facts.items():
        table.add_row(name, Text(_shown(value, at_top=True)))
    return table


def _shown(value: Any, *, at_top: bool = False) -> str:
    """On one line; of a long list of numbers, such as the mean of vectors, only what they are like."""
    if isinstance(value, dict):
        items = ", ".join(f"{key}={_shown(item)}" for key, item in value.items())
        return items if at_top else f"{{{items}}}"
    if isinstance(value, list) and value and all(isinstance(one, float) for one in value):
        if len(value) > SHOWN_NUMBERS:
            return f"{len(value):,} numbers from {min(value):.4g} to {max(value):.4g}"
        return f"[{', '.join(f'{one:.6g}' for one in value)}]"
    return str(value)
