"""Commands on the paper's theory: its quantities on your data, and its example in the plane."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from salcli.cli.options import PARAMS_YAML, Assignments, OodSets, ParamsFile, Scratch, Seeds, override


def theory(
    params: ParamsFile = PARAMS_YAML,
    ood: OodSets = None,
    seed: Seeds = None,
    scratch: Scratch = False,
    assignments: Assignments = None,
    knn_k: Annotated[int | None, override("evaluate.knn_k", "Neighbours that KNN looks at, to estimate π.")] = None,
) -> None:
    """Measure what the theorems speak of: the discrepancy ζ, π, τ and the errors against T."""
    from salcli.artifacts import layout
    from salcli.cli.session import Session
    from salcli.reporting.console import console
    from salcli.reporting.figure_file import FORMATS
    from salcli.reporting.theory_figure import write_theory_figure
    from salcli.reporting.theory_table import theory_view
    from salcli.stages import theory as stage

    flags = {"evaluate.knn_k": knn_k}
    session = Session.open(params, assignments, flags, reads=("evaluate.knn_k",), ood=ood, seed=seed, scratch=scratch)
    done, written = [], []
    for name, one_seed in session.experiments():
        result = stage.run(session.workspace, session.params, name, one_seed, session.progress)
        figures = [session.workspace.target(layout.theory_figure(name, one_seed, kind)) for kind in FORMATS]
        write_theory_figure(result, figures)
        done.append(result)
        written += [*result.written, *figures]
    console.print(theory_view(done))
    session.finish(written, "salcli train-ood")


def toy(
    folder: Annotated[Path, typer.Argument(help="Where to put the figure.")] = Path("toy"),
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds; the figure is of the first.")] = 10,
    first_seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    calibration: Annotated[
        str, typer.Option(help="Whose threshold the figure shows: train, holdout or id-svd.")
    ] = "train",
) -> None:
    """Run the paper's example in the plane: three Gaussians, two kinds of outliers, one figure."""
    from salcli.errors import unknown_name
    from salcli.reporting.console import console
    from salcli.reporting.figure_file import FORMATS
    from salcli.reporting.progress import ConsoleProgress
    from salcli.reporting.toy_figure import write_toy_figure
    from salcli.reporting.toy_table import toy_table
    from salcli.stages import toy as stage

    if calibration not in stage.CALIBRATIONS:
        raise unknown_name("calibration", calibration, stage.CALIBRATIONS)
    done = stage.run(range(first_seed, first_seed + seeds), progress=ConsoleProgress())
    written = [folder / f"toy.{kind}" for kind in FORMATS]
    write_toy_figure([result for result in done if result.seed == first_seed], calibration, written)
    console.print(toy_table(done))
    console.print(f"wrote {', '.join(str(path) for path in written)}", style="dim", highlight=False, markup=False)
