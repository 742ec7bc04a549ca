"""What `init` found in the user's own data, and what it plans to do with them: one table."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from pathlib import Path

    from salcli.planning.own_data import Copies, OwnData, OwnSet
    from salcli.planning.training_plan import Plan

SHOWN = 2  # names of files
SHOWN_CLASSES = 6


def plan_table(data: OwnData, plan: Plan, n_images: int) -> Table:
    """First what is there, then the plan. `n_images`: how many go through a network in all."""
    table = Table(title="Own data", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), width=98)
    table.title_justify, table.title_style = "left", "bold"
    for name, width in (("what", 14), ("found, or planned", 42), ("", 38)):
        table.add_column(name, min_width=width, overflow="fold")
    roles = ["labeled (ID)", "wild", *["odd, for tests"] * len(data.tests)]
    for role, own in zip(roles, data.sets, strict=True):
        table.add_row(role, Text(f"{own.name}: {_amount(own)}"), Text(_sizes(own)))
        if own is data.id:
            table.add_row("classes", Text(_classes(own)), Text(_class_sizes(own)))
        for name, text in (("not read", _bad(own)), ("no images", _others(own))):
            if text:
                table.add_row(name, *(Text(part) for part in text))
    for copies in data.copies:
        table.add_row("copies", *(Text(part) for part in _copies(copies)))
    if not data.copies:
        table.add_row("copies", "none", "no file of one set has the bytes of another's")
    table.add_section()
    for choice in plan.choices:
        table.add_row(choice.what, Text(choice.chosen), Text(choice.why))
    table.add_row("work", f"{n_images / 1e6:.2g} million images through a network", "estimated, all stages together")
    return table


def _amount(own: OwnSet) -> str:
    return f"{len(own.source):,} images"


def _sizes(own: OwnSet) -> str:
    seen = own.look
    low, high = ("×".join(map(str, size)) for size in (seen.smallest, seen.largest))
    colours = "gray" if seen.is_gray else "colour"
    sizes = low if low == high else f"{low} to {high}"
    sample = f" ({seen.n_looked_at:,} looked at)" if seen.n_looked_at < len(own.source) else ""
    return f"{sizes} pixels, {colours}{sample}"


def _classes(own: OwnSet) -> str:
    names = [printable_name(name) for name in own.source.class_names]
    more = f", … ({len(names)} in all)" if len(names) > SHOWN_CLASSES else ""
    return ", ".join(names[:SHOWN_CLASSES]) + more


def _class_sizes(own: OwnSet) -> str:
    counts = Counter(np.asarray(own.source.labels).tolist())
    low, high = min(counts, key=lambda k: counts[k]), max(counts, key=lambda k: counts[k])
    if counts[low] == counts[high]:
        return f"{counts[low]:,} images each"
    names = own.source.class_names
    return f"from {counts[low]:,} ({printable_name(names[low])}) to {counts[high]:,} ({printable_name(names[high])})"


def _bad(own: OwnSet) -> tuple[str, str] | None:
    bad = own.look.bad
    if not bad:
        return None
    shown = ", ".join(f"{own.shown(path)} ({reason})" for path, reason in bad[:SHOWN])
    return f"{len(bad):,} files of {own.name}, left out", shown + (", …" if len(bad) > SHOWN else "")


def _others(own: OwnSet) -> tuple[str, str] | None:
    if not own.n_other_files:
        return None
    return f"{own.n_other_files:,} files of {own.name}, left out", "their suffix is not that of a known image format"


def _copies(copies: Copies) -> tuple[str, str]:
    own = copies.own
    where = "elsewhere in it" if copies.other == own.name else f"in {copies.other}, too"
    return f"{len(copies.paths):,} files of {own.name}, left out", f"{where}: {_named(own, copies.paths)}"


def _named(own: OwnSet, paths: tuple[Path, ...]) -> str:
    return ", ".join(own.shown(path) for path in paths[:SHOWN]) + (", …" if len(paths) > SHOWN else "")


def printable_name(name: str) -> str:
    """A class's name is that of a folder, which need not be text, and may have several lines."""
    return name.encode(errors="surrogateescape").decode(errors="replace").replace("\n", "⏎")


def plan_notes(data: OwnData, plan: Plan, *, is_trained: bool, normalised: bool) -> list[str]:
    """What a table has no room for."""
    notes = []
    if not all(own.look.was_decoded and own.look.n_looked_at >= len(own.source) for own in data.sets):
        notes.append("not every file was read to its end; what else is bad is left out, and named, by `prepare`")
    if is_trained and not normalised:
        notes.append(
            "the network's input is normalised with mean and std of your training images, which is a guess: give what "
            "it was trained with (--mean, --std), or --mean 0 --std 1 if it normalises by itself"
        )
    return notes
