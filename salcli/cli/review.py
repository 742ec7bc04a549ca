"""The command that writes candidate outliers down for a person to correct."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from salcli.cli.options import PARAMS_YAML, OodSets, ParamsFile, Scratch, Seeds


def review(
    params: ParamsFile = PARAMS_YAML,
    ood: OodSets = None,
    seed: Seeds = None,
    scratch: Scratch = False,
    out: Annotated[Path, typer.Option(help="The list to write.")] = Path("review.csv"),
    below: Annotated[int, typer.Option(min=0, help="Wild samples just below T to list as well.")] = 20,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a list that is there.")] = False,
) -> None:
    """Write the candidate outliers to a CSV that a person can correct, for `train-ood --review`.

    In the column **decision**, `keep` or `drop` each candidate; `add` a sample below the threshold to take it for an
    outlier, too. A candidate without a line stays.
    """
    from os.path import relpath
    from shlex import quote

    from salcli.artifacts.review import write_review
    from salcli.cli.session import Session
    from salcli.errors import ReviewError
    from salcli.reporting.console import console
    from salcli.reporting.review_table import review_table
    from salcli.stages import review as stage

    if out.exists() and not force:
        raise ReviewError(
            f"{out} is there already, perhaps with decisions; name another --out, or overwrite with --force"
        )
    session = Session.open(params, None, {}, reads=(), ood=ood, seed=seed, scratch=scratch)
    rows = [
        row
        for name, one_seed in session.experiments()
        for row in stage.run(session.workspace, session.params, name, one_seed, below)
    ]
    write_review(out, rows)
    console.print(review_table(rows))
    command = f"salcli train-ood --method sal --review {quote(relpath(out, params.parent))}"
    session.finish([], f"correct the column decision, then: {command}", outside=[out])
