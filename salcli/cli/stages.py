"""The stage commands up to the filter: each is one stage of dvc.yaml."""

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

# What the scores of `filter` other than τ read beyond its own section.
FILTER_ALSO_READS = (
    "data.id",
    "numerics",
    "extract_grads.batch_size",
    "evaluate.odin_temperature",
    "evaluate.odin_epsilon",
    "evaluate.knn_k",
    "evaluate.react_percentile",
    "evaluate.dice_percentile",
    "evaluate.ash_percentile",
    "evaluate.vim_dim",
)


class PreparePart(StrEnum):
    """What `prepare` can make on its own."""

    everything = "all"
    id_set = "id-set"
    ood_set = "ood-set"
    unseen_set = "unseen-set"
    id_split = "split"
    wild = "wild"


class ExtractPart(StrEnum):
    """What `extract-grads` can make on its own."""

    everything = "all"
    id_data = "id"
    wild = "wild"


def prepare(
    part: Annotated[PreparePart, typer.Argument(help="One part of the work, as DVC runs it.")] = PreparePart.everything,
    params: ParamsFile = PARAMS_YAML,
    ood: OodSets = None,
    unseen: UnseenSets = None,
    seed: Seeds = None,
    scratch: Scratch = False,
    assignments: Assignments = None,
    pi: Annotated[float | None, override("data.pi", "Share of OOD in the wild data.")] = None,
) -> None:
    """Decode the data, split the ID data, mix the wild data."""
    from salcli.cli.session import Session
    from salcli.reporting.console import console
    from salcli.reporting.stage_tables import prepared_table
    from salcli.stages import prepare as stage

    session = Session.open(
        params, assignments, {"data.pi": pi}, reads=("data",), ood=ood, unseen=unseen, seed=seed, scratch=scratch
    )
    workspace, data = session.workspace, session.params.data
    wanted = set(PreparePart) if part is PreparePart.everything else {part}
    done = []
    if PreparePart.id_set in wanted:
        done.append(stage.prepare_set(workspace, data, data.id, session.progress))
    if PreparePart.ood_set in wanted:
        done += [stage.prepare_set(workspace, data, name, session.progress) for name in session.ood_sets]
    if PreparePart.unseen_set in wanted:
        done += [stage.prepare_unseen_set(workspace, data, name, session.progress) for name in session.unseen_sets]
    if PreparePart.id_split in wanted:
        done += [stage.prepare_split(workspace, data, one_seed, session.progress) for one_seed in session.seeds]
    if PreparePart.wild in wanted:
        done += [
            stage.prepare_wild(workspace, data, *experiment, session.progress) for experiment in session.experiments()
        ]
    console.print(prepared_table(done))
    for note in filter(None, (result.note for result in done)):
        console.print(note, style="yellow", highlight=False, markup=False)
    written = [path for result in done for path in result.written]
    if PreparePart.wild in wanted:
        session.finish(written, "salcli train-id", takes=("--seed",))
    else:
        session.finish(written, "salcli prepare")


def train_id(
    params: ParamsFile = PARAMS_YAML,
    seed: Seeds = None,
    device: Device = None,
    scratch: Scratch = False,
    assignments: Assignments = None,
    epochs: Annotated[int | None, override("train_id.epochs", "Passes over the ID training data.")] = None,
    lr: Annotated[float | None, override("train_id.lr", "Learning rate at the start.")] = None,
    batch_size: Annotated[int | None, override("train_id.batch_size", "Images in a step.")] = None,
) -> None:
    """Train the classifier on labeled ID data."""
    from salcli.cli.session import Session
    from salcli.reporting.class_notes import class_notes
    from salcli.reporting.console import console
    from salcli.reporting.stage_tables import train_id_table
    from salcli.stages import train_id as stage

    flags = {
        "device": device,
        "train_id.epochs": epochs,
        "train_id.lr": lr,
        "train_id.batch_size": batch_size,
    }
    session = Session.open(
        params,
        assignments,
        flags,
        reads=("data.id", "numerics", "model", "train_id"),
        seed=seed,
        scratch=scratch,
        parallel=True,
    )
    with session.processes():
        done = [stage.run(session.workspace, session.params, one, session.progress) for one in session.seeds]
    console.print(train_id_table(done))
    for line, style in class_notes(done):
        console.print(line, style=style, highlight=False, markup=False)
    session.finish([path for result in done for path in result.written], "salcli extract-grads")


def extract_grads(
    part: Annotated[ExtractPart, typer.Argument(help="One part of the work, as DVC runs it.")] = ExtractPart.everything,
    params: ParamsFile = PARAMS_YAML,
    ood: OodSets = None,
    seed: Seeds = None,
    device: Device = None,
    scratch: Scratch = False,
    assignments: Assignments = None,
    batch_size: Annotated[int | None, override("extract_grads.batch_size", "Images in a pass.")] = None,
) -> None:
    """Take the gradients of ID and wild data."""
    from salcli.cli.session import Session
    from salcli.reporting.console import console
    from salcli.reporting.stage_tables import gradients_table
    from salcli.stages import extract_grads as stage

    flags = {"device": device, "extract_grads.batch_size": batch_size}
    session = Session.open(
        params,
        assignments,
        flags,
        reads=("data.id", "numerics", "extract_grads"),
        ood=ood,
        seed=seed,
        scratch=scratch,
        parallel=True,
    )
    done = []
    with session.processes():
        if part is not ExtractPart.wild:
            for one in session.seeds:
                done += stage.run_id(session.workspace, session.params, one, session.progress)
        if part is not ExtractPart.id_data:
            for experiment in session.experiments():
                done.append(stage.run_wild(session.workspace, session.params, *experiment, session.progress))
    console.print(gradients_table(done))
    next_command = "salcli extract-grads wild" if part is ExtractPart.id_data else "salcli filter"
    session.finish([result.written for result in done], next_command)


def filter_(
    params: ParamsFile = PARAMS_YAML,
    ood: OodSets = None,
    seed: Seeds = None,
    device: Device = None,
    scratch: Scratch = False,
    assignments: Assignments = None,
    threshold_quantile: Annotated[
        float | None, override("filter.threshold_quantile", "Quantile of the calibration scores.")
    ] = None,
    calibration: Annotated[str | None, override("filter.calibration", "holdout, train or id-svd.")] = None,
    svd: Annotated[str | None, override("filter.svd", "class-conditional or class-agnostic.")] = None,
    score: Annotated[
        str | None,
        override(
            "filter.score",
            "sal (τ), gradnorm, msp, odin, mahalanobis, energy, knn, react, dice, ash, vim, or auto: the one that "
            "finds most, but τ unless another is surely better.",
        ),
    ] = None,
    n_vectors: Annotated[int | None, override("filter.n_vectors", "Singular vectors to project on.")] = None,
) -> None:
    """Separate the candidate outliers from the wild data."""
    from salcli.cli.session import Session
    from salcli.reporting.console import console
    from salcli.reporting.filter_view import filter_view
    from salcli.stages import filter as stage

    flags = {
        "device": device,
        "filter.threshold_quantile": threshold_quantile,
        "filter.calibration": calibration,
        "filter.svd": svd,
        "filter.score": score,
        "filter.n_vectors": n_vectors,
    }
    session = Session.open(
        params,
        assignments,
        flags,
        reads=("filter", *FILTER_ALSO_READS),
        ood=ood,
        seed=seed,
        scratch=scratch,
        parallel=True,
    )
    with session.processes():
        done = [
            stage.run(session.workspace, session.params, *experiment, session.progress)
            for experiment in session.experiments()
        ]
    console.print(filter_view(done, session.params.filter))
    session.finish([path for result in done for path in result.written], "salcli train-ood")
