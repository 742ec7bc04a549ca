"""The Typer application."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from salcli import __version__
from salcli.cli import (
    data,
    detector,
    encoders,
    evaluate,
    fingerprints,
    projects,
    report,
    review,
    stages,
    sweep,
    theory,
    train_ood,
    views,
)
from salcli.cli.errors import friendly_errors
from salcli.cli.lazy_group import MARKUP, LazyGroup, build_later

if TYPE_CHECKING:
    from click import Context

HELP = """Find out-of-distribution data with the help of unlabeled data from the wild.

SAL, Separate And Learn (Du et al., ICLR 2024), as stages that `dvc repro` runs when their inputs change.
By hand: prepare, train-id, extract-grads, filter, train-ood, evaluate, table.
"""


class _Group(LazyGroup):
    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:  # type: ignore[override]
        with friendly_errors():
            return super().parse_args(ctx, args)  # type: ignore[arg-type]

    def invoke(self, ctx: Context) -> Any:  # type: ignore[override]
        with friendly_errors():
            return super().invoke(ctx)  # type: ignore[arg-type]


app = typer.Typer(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=MARKUP,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"salcli {__version__}")
        raise typer.Exit


@app.callback()
def _salcli(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


EXPERIMENTS, PIPELINE, RESULTS = "Data and experiments", "The pipeline, stage by stage", "Results and files"
NEW_IMAGES = "New images"
app.command(rich_help_panel=EXPERIMENTS)(projects.init)
app.command(rich_help_panel=EXPERIMENTS)(projects.presets)
app.command(rich_help_panel=EXPERIMENTS)(theory.toy)
app.command(rich_help_panel=PIPELINE)(stages.prepare)
app.command("train-id", rich_help_panel=PIPELINE)(stages.train_id)
app.command("extract-grads", rich_help_panel=PIPELINE)(stages.extract_grads)
app.command("filter", rich_help_panel=PIPELINE)(stages.filter_)
app.command("train-ood", rich_help_panel=PIPELINE)(train_ood.train_ood)
app.command("train-encoder", rich_help_panel=PIPELINE)(encoders.train_encoder)
app.command(rich_help_panel=PIPELINE)(evaluate.evaluate)
app.command(rich_help_panel=PIPELINE)(detector.detector)
app.command(rich_help_panel=NEW_IMAGES)(detector.predict)
app.command(rich_help_panel=NEW_IMAGES)(detector.export)
app.command(hidden=True)(fingerprints.fingerprints)
app.command(rich_help_panel=RESULTS)(views.table)
app.command(rich_help_panel=RESULTS)(report.report)
app.command(rich_help_panel=RESULTS)(review.review)
app.command(rich_help_panel=RESULTS)(views.inspect)
app.command(rich_help_panel=RESULTS)(theory.theory)
app.command("sweep-pi", rich_help_panel=RESULTS)(sweep.sweep_pi)
app.add_typer(data.app, name="data", rich_help_panel=EXPERIMENTS)
build_later(app)
