"""The command that trains with the wild data: one stage of dvc.yaml for SAL, one for its rivals."""

from __future__ import annotations

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
    override,
)


def train_ood(
    params: ParamsFile = PARAMS_YAML,
    ood: OodSets = None,
    seed: Seeds = None,
    device: Device = None,
    scratch: Scratch = False,
    assignments: Assignments = None,
    method: Annotated[
        list[str] | None, typer.Option(help="sal or one of the rivals; repeat for several. Default: sal and rivals.")
    ] = None,
    epochs: Annotated[int | None, override("train_ood.epochs", "Passes over the ID training data.")] = None,
    lr: Annotated[float | None, override("train_ood.lr", "Learning rate at the start.")] = None,
    loss_weight: Annotated[float | None, override("train_ood.loss_weight", "Weight of the binary loss.")] = None,
    candidate_id: Annotated[
        bool | None, override("train_ood.candidate_id", "Let wild samples below the threshold count as ID.")
    ] = None,
    review: Annotated[
        str | None, override("train_ood.review", "A list of candidates that you corrected: see `salcli review`.")
    ] = None,
) -> None:
    """Train with the wild data: SAL's OOD classifier with the candidate outliers, and rivals."""
    from salcli.cli.session import Session, evaluate_command
    from salcli.errors import unknown_name
    from salcli.reporting.console import console
    from salcli.reporting.stage_tables import train_ood_table
    from salcli.stages import train_ood as stage

    for name in method or []:
        if name not in stage.METHODS:
            raise unknown_name("method", name, stage.METHODS)

    flags = {
        "device": device,
        "train_ood.epochs": epochs,
        "train_ood.lr": lr,
        "train_ood.loss_weight": loss_weight,
        "train_ood.candidate_id": candidate_id,
        "train_ood.review": review,
    }
    session = Session.open(
        params,
        assignments,
        flags,
        reads=("data.id", "numerics", "rivals", "extract_grads.batch_size", "train_ood", "train_rival"),
        ood=ood,
        seed=seed,
        scratch=scratch,
        parallel=set(method or []) != {"step"},  # which is trained in one process
    )
    methods = tuple(dict.fromkeys(method or [])) or ("sal", *session.params.rivals)
    with session.processes():
        done = [
            stage.run(session.workspace, session.params, *experiment, session.progress, method=name)
            for experiment in session.experiments()
            for name in methods
        ]
    console.print(train_ood_table(done))
    next_command = evaluate_command("rivals", session.params.rivals, methods)
    session.finish([path for result in done for path in result.written], next_command)
