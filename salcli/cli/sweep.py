"""The command that runs the experiments for many values of π."""

from __future__ import annotations

from typing import Annotated

import typer

from salcli.cli.options import PARAMS_YAML, RUN, Assignments, Device, OodSets, ParamsFile, Scratch, Seeds
from salcli.errors import ParamsError


def sweep_pi(
    params: ParamsFile = PARAMS_YAML,
    pi: Annotated[
        list[float] | None,
        typer.Option(
            help="Share of OOD in the wild data; repeat for several.", show_default="the paper's", rich_help_panel=RUN
        ),
    ] = None,
    ood: OodSets = None,
    seed: Seeds = None,
    device: Device = None,
    scratch: Scratch = False,
    assignments: Assignments = None,
) -> None:
    """Run SAL for many shares π of OOD data: ERR_in, ERR_out and FPR95 against π, with the paper's points."""
    from dataclasses import asdict

    from salcli.artifacts import layout
    from salcli.artifacts.curve import write_curve
    from salcli.cli.session import Session
    from salcli.ranks import is_main
    from salcli.reporting.console import console
    from salcli.reporting.figure_file import FORMATS
    from salcli.reporting.paper_by_pi import paper_curves, shares_of_the_paper
    from salcli.reporting.sweep_figure import write_sweep_figure
    from salcli.reporting.sweep_table import sweep_table
    from salcli.stages import pi_sweep as stage

    shares = sorted({_checked(one) for one in pi}) if pi else shares_of_the_paper()
    session = Session.open(
        params,
        assignments,
        {"device": device},
        reads=("data.id", "data.ood_wild_share", "numerics", "extract_grads", "filter", "train_ood", "evaluate"),
        ood=ood,
        seed=seed,
        scratch=scratch,
        parallel=True,
    )  # fmt: skip
    if session.params.data.pi == "unknown":
        raise ParamsError("data.pi is unknown: the wild data come as they are, so there is nothing to mix or to sweep")
    with session.processes():
        done = stage.run(session.workspace, session.params, shares, session.experiments(), session.progress)
    for gap in done.gaps:
        console.print(gap, style="yellow", highlight=False, markup=False)
    if not done.points:
        raise ParamsError("the filter worked for no π; what it says above tells which filter.threshold_quantile works")
    table, *figures = (session.workspace.target(layout.pi_sweep_summary(suffix)) for suffix in ("csv", *FORMATS))
    if is_main():
        write_curve(table, [asdict(point) for point in done.points])
        setting = f"{session.params.data.id}, {session.params.model.backbone}"
        write_sweep_figure(done.points, paper_curves(session.params, session.ood_sets), setting, figures)
    console.print(sweep_table(done.points))
    if done.n_known:
        console.print(f"{done.n_known} of {len(done.points)} experiments are those of an earlier run", style="dim")
    session.finish([table, *figures], "")


def _checked(pi: float) -> float:
    if not 0 < pi <= 1:
        percent = f" (did you mean {pi / 100:g}?)" if 1 < pi <= 100 else ""
        raise ParamsError(f"--pi {pi:g}: must be above 0 and at most 1, the share of OOD in the wild data{percent}")
    return pi
