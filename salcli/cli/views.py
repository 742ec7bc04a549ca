"""Commands that show what is there."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from salcli.cli.options import PARAMS_YAML, RUN, ParamsFile


class Format(StrEnum):
    """How a table is written."""

    rich = "rich"
    markdown = "markdown"
    latex = "latex"
    csv = "csv"
    json = "json"


def table(
    params: ParamsFile = PARAMS_YAML,
    scratch: Annotated[
        bool, typer.Option("--scratch", help="Show the evaluations in scratch/.", rich_help_panel=RUN)
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also show seeds and OOD sets that params.yaml does not name.")
    ] = False,
    output_format: Annotated[Format, typer.Option("--format", help="How to write the table.")] = Format.rich,
) -> None:
    """Collect every evaluation of the workspace: mean ± std over seeds, best value bold."""
    from salcli.artifacts.layout import RUNS, SCRATCH
    from salcli.params import load_params
    from salcli.reporting import results_table as render
    from salcli.reporting.console import console
    from salcli.reporting.results import Results

    root = params.parent / SCRATCH if scratch else params.parent
    only = None
    if not (everything or scratch):
        wanted, _ = load_params(params)
        only = {(ood, seed) for ood in wanted.data.ood for seed in wanted.seeds}
    results = Results.from_folder(root / RUNS, only)
    match output_format:
        case Format.rich:
            if scratch:
                console.print(f"from {SCRATCH}/: runs by hand, not what `dvc repro` builds", style="yellow")
            console.print(render.rich_table(results, console.width))
        case Format.markdown:
            print(render.markdown(results))
        case Format.latex:
            print(render.latex(results))
        case Format.csv:
            print(render.flat(results).to_csv(index=False), end="")
        case Format.json:
            print(render.flat(results).to_json(orient="records", indent=2))


def inspect(
    file: Annotated[Path, typer.Argument(help="A checkpoint, gradient file, candidate file or other artifact.")],
    top: Annotated[
        int, typer.Option(min=0, help="Candidates to list, highest score first, or rows of a CSV file.")
    ] = 10,
) -> None:
    """Show what is in a file that salcli wrote."""
    from salcli.reporting.console import console
    from salcli.reporting.file_view import file_view

    console.print(file_view(file, top))
