"""The command that trains rivals from scratch on the ID data."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from salcli.cli.options import PARAMS_YAML, Assignments, Device, ParamsFile, Scratch, Seeds


def train_encoder(
    params: ParamsFile = PARAMS_YAML,
    encoder: Annotated[
        list[str] | None,
        typer.Option(help="knn-plus or csi, instead of encoders in params.yaml; repeat for several."),
    ] = None,
    seed: Seeds = None,
    device: Device = None,
    scratch: Scratch = False,
    assignments: Assignments = None,
) -> None:
    """Train KNN+ or CSI on labeled ID data, by contrast."""
    from salcli.cli.session import Session, evaluate_command
    from salcli.errors import UsageMistakeError, unknown_name
    from salcli.method_names import Encoder
    from salcli.reporting.console import console
    from salcli.reporting.stage_tables import train_encoder_table
    from salcli.stages import train_encoder as stage

    known = get_args(Encoder)
    for name in encoder or ():
        if name not in known:
            raise unknown_name("encoder", name, known)
    # in one process: each loss compares all views of a batch
    session = Session.open(
        params,
        assignments,
        {"device": device},
        reads=("data.id", "encoders", "numerics", "model", "train_encoder"),
        seed=seed,
        scratch=scratch,
    )
    wanted = tuple(dict.fromkeys(encoder or session.params.encoders))
    if not wanted:
        raise UsageMistakeError(
            f"there is nothing to train: encoders in {params.name} is empty; name {' or '.join(known)} there, "
            "or with --encoder"
        )
    done = [
        stage.run(session.workspace, session.params, name, one_seed, session.progress)
        for one_seed in session.seeds
        for name in wanted
    ]
    console.print(train_encoder_table(done))
    next_command = evaluate_command("encoders", session.params.encoders, wanted)
    session.finish([path for result in done for path in result.written], next_command, takes=("--seed",))
