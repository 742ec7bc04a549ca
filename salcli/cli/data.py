"""`salcli data`: which data sets there are, and getting them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from salcli.cli.options import PARAMS_YAML

app = typer.Typer(
    help="List data sets and fetch them from the web.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Format(StrEnum):
    """How the list is written."""

    rich = "rich"
    json = "json"


Root = Annotated[
    Path | None,
    typer.Option(
        "--root",
        help="Where data sets lie.",
        show_default="$SALCLI_DATA, data.root of ./params.yaml, or data/raw",
    ),
]


def _known_sets() -> list[str]:
    from salcli.fetching.registry import SOURCES

    return [name for name, source in SOURCES.items() if not source.is_embedded]


@app.command("list")
def list_(
    root: Root = None,
    output_format: Annotated[Format, typer.Option("--format", help="How to write the list.")] = Format.rich,
) -> None:
    """Show every data set by name: what it is, where it comes from, and whether it is here."""
    from salcli.fetching.fetch import status
    from salcli.fetching.registry import SOURCES
    from salcli.reporting.console import console
    from salcli.reporting.data_table import data_json, data_table

    folder = _root(root)
    found = {source: status(name, folder) for name, source in SOURCES.items()}
    own = _own_sets()
    if output_format is Format.json:
        print(data_json(found, own))
        return
    console.print(data_table(found, console.width))
    for name, place in own.items():
        state = "✓" if place.exists() else "missing"
        console.print(f"{name}: {place} ({state})", highlight=False, markup=False, soft_wrap=True)
    option = f" --root {quote(str(root))}" if root else ""
    for line in (
        f"\n✓ found below {folder}",
        "own: a folder of images NAME/ or an array file NAME.npz there stands in for the set, any of them",
        "not stated: the authors name no licence",
        f"get a set: salcli data fetch NAME{option}",
    ):
        console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)


@app.command("fetch")
def fetch_(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME", help="Data sets, as `salcli data list` names them.", autocompletion=_known_sets),
    ],
    root: Root = None,
) -> None:
    """Download data sets, compare their checksums and unpack them. Goes on where it broke off."""
    from salcli.fetching.fetch import fetch
    from salcli.reporting.console import console
    from salcli.reporting.progress import ConsoleProgress

    try:
        for done in fetch(names, _root(root), ConsoleProgress()):
            where = ", ".join(str(path) for path in done.paths) or "comes with salcli, nothing to fetch"
            outcome = f"{done.outcome}: " if done.paths else ""
            console.print(f"{done.name}: {outcome}{where}", highlight=False, markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print("what has arrived is kept: the same command goes on from there", style="dim", highlight=False)
        raise


def _own_sets() -> dict[str, Path]:
    """The sets of data.own of ./params.yaml, with their places."""
    from salcli.data.root import own_place
    from salcli.params_file import lookup, read_yaml

    own = lookup(read_yaml(PARAMS_YAML), "data.own") if PARAMS_YAML.exists() else None
    return {str(name): own_place(str(place), Path()) for name, place in own.items()} if isinstance(own, dict) else {}


def _root(option: Path | None) -> Path:
    from salcli.data.root import data_root, params_data_root

    return data_root(option, None if option else params_data_root(PARAMS_YAML))
