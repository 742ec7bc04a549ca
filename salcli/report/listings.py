"""Lists: the plan for custom data, presets, data sets, candidates for review, predictions, methods, stages."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from salcli.data.catalogue import DataSet, data_set
from salcli.errors import printable
from salcli.params.presets import Preset, resolved, text
from salcli.project.cost import estimated_gigabytes, estimated_images
from salcli.report.console import Cell, Grid, first_few, plain_table, records_table, shortened

if TYPE_CHECKING:  # load torch
    from salcli.detector.detector import Scanned
    from salcli.methods.base import Method
    from salcli.project.custom_data import CustomSet
    from salcli.project.planning import Plan
    from salcli.project.review import ReviewRow

SHOWN_CLASSES, SHOWN_FILES = 6, 2


# --- the plan for custom data


def plan_table(plan: Plan) -> Table:
    """First what `init` found in the data, then what it plans."""
    data = plan.data
    table = plain_table("Custom data", "what", "found, or planned", "", n_left=3)
    table.width = 98
    for column, width in zip(table.columns, (14, 42, 38), strict=True):
        column.min_width, column.overflow = width, "fold"
    for custom in data.sets:
        role = {"id": "labeled (ID)", "odd": "odd, for tests"}.get(custom.role, custom.role)
        table.add_row(role, Text(f"{custom.name}: {len(custom.source):,} {data.kind}"), Text(_sizes(custom)))
        if custom is data.id:
            names = [printable(name) for name in custom.source.class_names]
            more = f" ({len(names)} in all)" if len(names) > SHOWN_CLASSES else ""
            table.add_row("classes", Text(first_few(names, SHOWN_CLASSES) + more), Text(_class_sizes(custom)))
        if bad := [f"{custom.shown(path)} ({reason})" for path, reason in custom.bad]:
            _add_left_out(table, "not read", len(bad), custom, first_few(bad, SHOWN_FILES))
        if custom.n_other_files:
            why = "their suffix is not that of a known image format"
            _add_left_out(table, "no images", custom.n_other_files, custom, why)
    for copies in data.copies:
        where = "elsewhere in it" if copies.other == copies.of.name else f"in {copies.other} too"
        _add_left_out(table, "copies", len(copies.index), copies.of, f"{where}: {first_few(copies.names, SHOWN_FILES)}")
    if not data.copies:
        same = "no two vectors are equal" if data.is_vectors else "no file of one set has the bytes of another's"
        table.add_row("copies", "none", same)
    table.add_section()
    for choice in plan.choices:
        table.add_row(choice.what, Text(choice.chosen), Text(choice.why))
    return table


def _add_left_out(table: Table, what: str, n: int, custom: CustomSet, why: str) -> None:
    unit = "files" if custom.source.files else custom.source.kind
    table.add_row(what, Text(f"{n:,} {unit} of {custom.name}, left out"), Text(why))


def _sizes(custom: CustomSet) -> str:
    seen = custom.look
    if seen is None:
        return f"{custom.n_dimensions:,} dimensions"
    low, high = ("×".join(map(str, size)) for size in (seen.smallest, seen.largest))
    sizes = low if low == high else f"{low} to {high}"
    sample = f" ({seen.n_looked_at:,} looked at)" if seen.n_looked_at < len(custom.source) else ""
    return f"{sizes} pixels, {'gray' if seen.is_gray else 'color'}{sample}"


def _class_sizes(custom: CustomSet) -> str:
    counts = Counter(np.asarray(custom.source.labels).tolist())
    low, high = min(counts, key=lambda k: counts[k]), max(counts, key=lambda k: counts[k])
    if counts[low] == counts[high]:
        return f"{counts[low]:,} {custom.source.kind} each"
    names = custom.source.class_names
    return f"from {counts[low]:,} ({printable(names[low])}) to {counts[high]:,} ({printable(names[high])})"


# --- presets

COMES_WITH_SALCLI = "°"
FIVE_SETS = ["svhn", "places365", "lsun-c", "lsun-r", "textures"]
PRESET_NOTES = (
    f"Five sets: {', '.join(FIVE_SETS)}. After a +: only tested on, not wild.",
    f"Sets marked {COMES_WITH_SALCLI} come with salcli; the others have to be fetched: salcli data fetch NAME.",
    "GPU: memory of a training step, estimated. Work: images through a network, estimated, in millions,",
    "over all seeds and OOD sets: training images × epochs, and the passes for gradients and scores.",
    "To start from one: salcli init DIR --preset NAME. To see what is in one: salcli presets NAME.",
    "To add to any of them, with one more --preset:",
)


def preset_table(presets: Iterable[Preset], additions: Iterable[Preset]) -> Table:
    """What each shows, where the paper has it, the data it needs, and what it costs."""
    rows = []
    for preset in presets:
        params = resolved(preset)
        gigabytes, n_images = estimated_gigabytes(params), estimated_images(params)
        row = {
            "name": preset.name,
            "what it shows": preset.title,
            "paper": preset.paper.partition(",")[0].partition(" (")[0] or "–",
            "data: ID ← OOD": _preset_data(params["data"]),
            "GPU": "–" if gigabytes < 1 else f"{gigabytes:.0f} GB",
            "work": f"{n_images / 1e6:.0f} M" if n_images >= 1e6 else f"{n_images / 1e6:.1g} M",
        }
        rows.append(row)
    caption = (*PRESET_NOTES, *(f"  {one.name}: {one.title}" for one in additions))
    table = records_table("Presets", rows, n_left=4, caption=caption)
    table.pad_edge = False
    for column in table.columns:
        column.no_wrap = column.header not in ("what it shows", "data: ID ← OOD")
    table.columns[0].style, table.columns[3].max_width = "bold", 23
    return table


def preset_syntax(preset: Preset) -> Syntax:
    """Its complete params.yaml, highlighted."""
    return Syntax(text(preset).rstrip("\n"), "yaml", background_color="default", word_wrap=True)


def _preset_data(data: Mapping[str, Any]) -> str:
    unseen = [name for name in data["test_ood"] if name not in data["ood"]]
    return f"{_listed([data['id']])} ← {_listed(data['ood'])}{f' + {_listed(unseen)}' if unseen else ''}"


def _listed(names: list[str]) -> str:
    """The five sets of most tables get one name, or they would fill the table."""
    if names == FIVE_SETS:
        return "five sets"
    return ", ".join(name + COMES_WITH_SALCLI if data_set(name).is_embedded else name for name in names)


# --- data sets

MARKS = {"here": "[green]✓[/]", "custom": "[green]custom[/]", "partial": "[yellow]partial[/]", "missing": "[dim]–[/]"}
ROLES = {"id": "ID", "ood": "OOD", "both": "both"}
NEEDS_WIDTH = {"where from": 100, "licence": 79}


def data_table(found: Mapping[DataSet, str], width: int) -> Table:
    """One row for each set, with its status. A narrow terminal gets no column of origins, then none of licences."""
    rows = [
        {
            "name": record.name,
            "role": ROLES[record.role],
            "size": record.size,
            "licence": record.licence,
            "where from": where_from(record),
            "samples": f"{record.n_images:,}",
            "download": _download(record),
            "here": MARKS[state],
        }
        for record, state in found.items()
    ]
    shown = [{name: cell for name, cell in row.items() if width >= NEEDS_WIDTH.get(name, 0)} for row in rows]
    table = records_table("Data sets", shown)
    table.show_edge = False
    for column in table.columns:
        column.no_wrap, column.justify = True, "right" if column.header in ("samples", "download") else "left"
    return table


def data_json(found: Mapping[DataSet, str], custom: Mapping[str, Sequence[Path]] | None = None) -> str:
    """All that is known, for programs; of custom sets, their paths."""
    sets = [record.facts() | {"status": state} for record, state in found.items()]
    sets += [
        {"name": name, "path": str(path), "status": "here" if path.exists() else "missing"}
        for name, paths in (custom or {}).items()
        for path in paths
    ]
    return json.dumps(sets, indent=2, ensure_ascii=False)


def where_from(record: DataSet) -> str:
    """The server it is on (ox.ac.uk, mit.edu), or what it comes with."""
    if record.is_embedded:
        return "inside scikit-learn" if record.home else "made by salcli"
    address = record.files[0].url if record.files else record.home
    labels = (urlsplit(address).hostname or address).split(".")
    return ".".join(labels[-3:] if labels[-2:-1] == ["ac"] else labels[-2:])


def _download(record: DataSet) -> str:
    if record.is_embedded:
        return "–"
    if record.by_hand:
        return "by hand"
    return f"{record.n_bytes / 1e6:,.0f} MB" if record.n_bytes else "?"


# --- lists for review


def review_table(rows: Sequence[ReviewRow]) -> Table:
    """How many samples each list holds, one row for each experiment."""
    records = []
    for (ood, mark, seed), group in groupby(rows, key=lambda row: (row.ood, row.filter, row.seed)):
        own = list(group)
        n_candidates, scores = sum(row.decision in ("keep", "drop") for row in own), [row.score for row in own]
        record = {
            "wild OOD": ood,
            "filter": mark.removeprefix("filter-").rpartition("-")[0],  # variant and π, without the fingerprint
            "seed": str(seed),
            "candidates": f"{n_candidates:,}",
            "just below T": f"{len(own) - n_candidates:,}",
            "highest score": f"{max(scores):.4g}",
            "lowest": f"{min(scores):.4g}",
        }
        records.append(record)
    return records_table("For review", records, n_left=2)


# --- predictions

SHOWN_IMAGES = 40
CLASS_WIDTH = 16
OTHER_COLUMNS = 60  # the width of all columns but the path
SHORTEST_PATH = 16


class HighestScores:
    """The images or vectors with the highest outlier scores, for people. Keeps no more than it will show."""

    def __init__(self) -> None:
        self._highest, self._n, self._names = list[tuple[Any, ...]](), 0, "path"

    def write(self, part: Scanned) -> None:
        from salcli.detector.predict import rows

        self._names = part.predictions.name_column
        good = [row for row in rows(part) if row[-1] is None]
        self._n += len(good)
        self._highest = nlargest(
            SHOWN_IMAGES, [*self._highest, *good], key=lambda row: math.inf if row[3] is None else row[3]
        )

    def table(self, width: int) -> Table:
        """No wider than `width`: of a long path the end is shown."""
        what = "images" if self._names == "path" else "vectors"
        more = (
            f"The {len(self._highest)} highest outlier scores of {self._n:,} {what}"
            if self._n > len(self._highest)
            else ""
        )
        table = plain_table(more, self._names, "class", "probability", "score", "OOD", "p-value")
        for path, name, probability, score, is_ood, p_value, _ in self._highest:
            table.add_row(
                Text(shortened(printable(path), max(SHORTEST_PATH, width - OTHER_COLUMNS))),
                Text(shortened(printable(name), CLASS_WIDTH)),
                "none" if probability is None else f"{probability:.3f}",
                "none" if score is None else f"{score:.3f}",
                Text("OOD", style="bold red") if is_ood else Text("–", style="dim"),
                "none" if p_value is None else f"{p_value:.4f}",
            )
        return table


# --- methods


def needs(method: type[Method]) -> str:
    """What a method needs, as it declares."""
    from salcli.methods.base import IdTrained, WildTrained

    if issubclass(method, WildTrained | IdTrained):
        return "training with wild data" if issubclass(method, WildTrained) else "training on ID data"
    data = [name for name in ("wild", "calibration") if getattr(method, f"needs_{name}", False)]
    return f"the ID classifier, {' and '.join(data)} data" if data else "the ID classifier"


def methods_grid(methods: Mapping[str, type[Method]], *, with_summary: bool = False) -> Grid:
    """Every method by what it needs, for the terminal and for docs/rivals.md."""
    sections: dict[str, list[list[Cell]]] = {}
    for name, method in methods.items():
        summary = [(method.__doc__ or "").strip().split("\n")[0]] if with_summary else []
        cells = needs(method), name, method.label, method.paper, *summary, ", ".join(method.Params.model_fields)
        sections.setdefault(cells[0], []).append([Cell(text) for text in cells])
    ordered = [own for _, own in sorted(sections.items(), key=lambda one: (one[0].startswith("training"), one[0]))]
    header = ["needs", "name", "label", "paper", *(["score or loss"] if with_summary else []), "hyper-parameters"]
    notes = ["Hyper-parameters are in params.yaml under methods.NAME. SAL itself: filter, train_ood and variants."]
    return Grid("Methods", header, ordered, notes, n_left=len(header))
