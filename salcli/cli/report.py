"""The command that writes the report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from salcli.cli.options import PARAMS_YAML, RUN, ParamsFile, Scratch


def report(
    params: ParamsFile = PARAMS_YAML,
    ood: Annotated[
        str | None,
        typer.Option(help="The OOD set to show in full.", show_default="the first", rich_help_panel=RUN),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="The seed to show in full.", show_default="the first", rich_help_panel=RUN)
    ] = None,
    unseen: Annotated[
        str | None,
        typer.Option(help="Show the test on this set of data.test_ood.", rich_help_panel=RUN),
    ] = None,
    scratch: Scratch = False,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    top: Annotated[int, typer.Option(min=1, max=500, help="Candidates to show, highest score first.")] = 120,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the charts there, too, as PNG and SVG.")
    ] = None,
    show: Annotated[
        bool | None,
        typer.Option("--open/--no-open", help="Open it in a browser.", show_default="in a terminal"),
    ] = None,
) -> None:
    """Write one HTML page: table, candidates, scores, mistakes, training, theory, provenance.

    It needs no network and opens from disk. The table is about all experiments, the rest about one.
    """
    from salcli.cli.session import Session
    from salcli.errors import UsageMistakeError
    from salcli.reporting.console import console
    from salcli.reporting.report.collect import collect
    from salcli.reporting.report.page import write_page

    if out.is_dir():
        raise UsageMistakeError(f"--out {out} is a folder; name a file, for example {out / 'report.html'}")
    session = Session.open(
        params,
        None,
        {},
        reads=(),
        ood=[ood] if ood else None,
        unseen=[unseen] if unseen else None,
        seed=None if seed is None else [seed],
        scratch=scratch,
    )
    made = collect(
        session.workspace,
        session.params,
        params,
        session.ood_sets[0],
        session.seeds[0],
        session.progress,
        unseen=unseen,
        top=top,
    )
    written = []
    for chart in made.charts if figures else []:
        assert figures
        written += chart.write(figures)
    write_page(out, made)
    session.finish([], "", outside=[out, *written])
    if show or (show is None and console.is_terminal):
        import webbrowser

        webbrowser.open(out.resolve().as_uri())
