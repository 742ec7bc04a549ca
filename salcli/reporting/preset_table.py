"""The presets as a table, and one of them as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.syntax import Syntax
from rich.table import Table

from salcli.fetching.registry import data_source
from salcli.presets.estimate import estimated_gigabytes, estimated_images

if TYPE_CHECKING:
    from collections.abc import Iterable

    from salcli.presets import Preset

COMES_WITH_SALCLI = "°"
FIVE_SETS = ["svhn", "places365", "lsun-c", "lsun-r", "textures"]
CAPTION = f"""\
Five sets: {", ".join(FIVE_SETS)}. After a +: only tested on, not wild.
Sets marked {COMES_WITH_SALCLI} come with salcli; the others have to be fetched: salcli data fetch NAME.
GPU: memory of a training step, estimated. Work: images through a network, estimated, in millions,
over all seeds and OOD sets: training images × epochs, and the passes for gradients and scores.
A folder for one: salcli init DIR --preset NAME. What is in one: salcli presets NAME."""


def preset_table(presets: Iterable[Preset]) -> Table:
    """What each shows, where the paper has it, the data it needs, and what it will cost."""
    table = Table(title="Presets", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, caption=CAPTION)
    table.title_justify = table.caption_justify = "left"
    table.title_style = "bold"
    table.add_column("name", no_wrap=True, style="bold")
    table.add_column("what it shows")
    table.add_column("paper", no_wrap=True)
    table.add_column("data: ID ← OOD", max_width=23)
    table.add_column("GPU", justify="right", no_wrap=True)
    table.add_column("work", justify="right", no_wrap=True)
    for preset in presets:
        gigabytes = estimated_gigabytes(preset.params)
        table.add_row(
            preset.name,
            preset.title,
            preset.paper.partition(",")[0].partition(" (")[0] or "–",
            _data(preset),
            "–" if gigabytes < 1 else f"{gigabytes:.0f} GB",
            _millions(estimated_images(preset.params)),
        )
    return table


def preset_syntax(preset: Preset) -> Syntax:
    """Its YAML, highlighted."""
    return Syntax(preset.text.rstrip("\n"), "yaml", background_color="default", word_wrap=True)


def _data(preset: Preset) -> str:
    data = preset.params["data"]
    unseen = [name for name in data["test_ood"] if name not in data["ood"]]
    return f"{_listed([data['id']])} ← {_listed(data['ood'])}{f' + {_listed(unseen)}' if unseen else ''}"


def _listed(names: list[str]) -> str:
    """The sets of most tables get one name, lest they fill the whole table."""
    if names == FIVE_SETS:
        return "five sets"
    return ", ".join(name + COMES_WITH_SALCLI if data_source(name).is_embedded else name for name in names)


def _millions(n_images: int) -> str:
    return f"{n_images / 1e6:.0f} M" if n_images >= 1e6 else f"{n_images / 1e6:.1g} M"
