"""The command that scores the test sets: one stage of dvc.yaml for each kind of test set."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from salcli.cli.options import (
    PARAMS_YAML,
    Assignments,
    Device,
    OodSets,
    ParamsFile,
    Scratch,
    Seeds,
    UnseenSets,
    override,
)
from salcli.errors import UsageMistakeError


class EvaluatePart(StrEnum):
    """What `evaluate` can do on its own."""

    everything = "all"
    own = "own"
    unseen = "unseen"


def evaluate(
    part: Annotated[
        EvaluatePart, typer.Argument(help="On the OOD set of the wild data, or on those of data.test_ood.")
    ] = EvaluatePart.everything,
    params: ParamsFile = PARAMS_YAML,
    ood: OodSets = None,
    seed: Seeds = None,
    device: Device = None,
    scratch: Scratch = False,
    assignments: Assignments = None,
    unseen: UnseenSets = None,
    method: Annotated[list[str] | None, override("evaluate.methods", "Method; repeat for several.")] = None,
    knn_k: Annotated[int | None, override("evaluate.knn_k", "Neighbours that KNN looks at.")] = None,
) -> None:
    """Score the test sets with every method: FPR95, AUROC, AUPR, accuracy."""
    from salcli.cli.session import Session
    from salcli.reporting.console import console
    from salcli.reporting.results import Results
    from salcli.reporting.results_table import rich_table
    from salcli.stages import evaluate as stage

    flags = {"device": device, "evaluate.methods": method or None, "evaluate.knn_k": knn_k}
    session = Session.open(
        params,
        assignments,
        flags,
        reads=("data.id", "numerics", "filter", "rivals", "encoders", "evaluate"),
        ood=ood,
        unseen=unseen,
        seed=seed,
        scratch=scratch,
        parallel=True,
    )
    test_sets: list[str | None] = []
    if part is not EvaluatePart.unseen:
        test_sets.append(None)
    if part is not EvaluatePart.own:
        test_sets += session.unseen_sets
    if not test_sets:
        raise UsageMistakeError(
            "there is nothing to test on: data.test_ood is empty; name a set there, or with --unseen"
        )
    with session.processes():
        done = [
            stage.run(session.workspace, session.params, *experiment, session.progress, unseen=test_set)
            for experiment in session.experiments()
            for test_set in test_sets
        ]
    console.print(rich_table(Results.from_evaluations(done), console.width))
    session.finish([path for result in done for path in result.written], "salcli table", takes=())
