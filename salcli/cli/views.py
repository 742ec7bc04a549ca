"""Commands that show what is there."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from salcli.cli.options import PARAMS_YAML, RUN, ParamsFile
from salcli.errors import ParamsError


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
    paper: Annotated[
        bool, typer.Option("--paper", help="Set them beside the figures of the paper's tables that fit params.yaml.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Show what the runs in scratch/ changed: before → after.")
    ] = False,
    output_format: Annotated[Format, typer.Option("--format", help="How to write the table.")] = Format.rich,
) -> None:
    """Collect every evaluation of the workspace: mean ± std over seeds, best value bold."""
    from salcli.artifacts.layout import RUNS, SCRATCH
    from salcli.params import load_params
    from salcli.reporting import results_table as render
    from salcli.reporting.console import console
    from salcli.reporting.results import Results, asked_for

    if compare:
        _compare_with_scratch(params, paper=paper, output_format=output_format)
        return
    if paper:
        _refuse(scratch=scratch, everything=everything)
        _compare_with_paper(params, output_format)
        return
    root = params.parent / SCRATCH if scratch else params.parent
    only = None
    if not (everything or scratch):
        wanted, _ = load_params(params)
        only = asked_for(wanted)
    results = Results.from_folder(root / RUNS, only)
    match output_format:
        case Format.rich:
            if scratch:
                others = "runs by hand, not what `dvc repro` builds (--compare sets both side by side)"
                console.print(f"from {SCRATCH}/: {others}", style="yellow")
            console.print(render.rich_table(results, console.width))
        case Format.markdown:
            print(render.markdown(results))
        case Format.latex:
            print(render.latex(results))
        case Format.csv:
            print(render.flat(results).to_csv(index=False), end="")
        case Format.json:
            print(render.flat(results).to_json(orient="records", indent=2))


def _compare_with_scratch(params: Path, *, paper: bool, output_format: Format) -> None:
    """Before: what `dvc repro` built; after: the runs by hand."""
    from salcli.artifacts.layout import RUNS, SCRATCH
    from salcli.reporting.compare_table import compare_table
    from salcli.reporting.console import console
    from salcli.reporting.results import Results

    if paper or output_format is not Format.rich:
        option = "--paper" if paper else f"--format {output_format}"
        raise ParamsError(f"--compare shows two runs in the terminal; leave {option} out")
    before, after = (Results.from_folder(folder / RUNS) for folder in (params.parent, params.parent / SCRATCH))
    console.print(compare_table(before, after))


def _refuse(*, scratch: bool, everything: bool) -> None:
    """The paper's table is found by params.yaml, which does not tell how other runs were made."""
    if scratch or everything:
        option = "--scratch" if scratch else "--all"
        raise ParamsError(f"--paper compares what params.yaml asks for; leave {option} out")


def _compare_with_paper(params: Path, output_format: Format) -> None:
    from salcli.artifacts.layout import RUNS
    from salcli.params import load_params
    from salcli.reporting import paper_table as render
    from salcli.reporting.console import console
    from salcli.reporting.paper_comparison import compare
    from salcli.reporting.paper_match import matching_settings
    from salcli.reporting.results import Results, asked_for

    wanted, _ = load_params(params)
    matching_settings(wanted)  # whether there is anything to compare with, before anything is read
    comparisons = compare(Results.from_folder(params.parent / RUNS, asked_for(wanted)), wanted)
    match output_format:
        case Format.rich:
            for comparison in comparisons:
                console.print(render.rich_table(comparison))
        case Format.markdown:
            print(render.markdown(comparisons))
        case Format.latex:
            print(render.latex(comparisons))
        case Format.csv:
            print(render.flat(comparisons).to_csv(index=False), end="")
        case Format.json:
            print(render.flat(comparisons).to_json(orient="records", indent=2))


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
