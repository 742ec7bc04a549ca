"""The stage commands: each is one or more stages of dvc.yaml."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from salcli.cli.session import (
    PARAMS_YAML,
    Assignments,
    Device,
    OodSets,
    ParamsFile,
    Scratch,
    Seeds,
    Session,
    Shares,
    UnseenSets,
    Variants,
    override,
    say,
)
from salcli.errors import UsageMistakeError, unknown_name


class PreparePart(StrEnum):
    everything = "all"
    id_set = "id-set"
    ood_set = "ood-set"
    unseen_set = "unseen-set"
    id_split = "split"
    wild = "wild"


class ExtractPart(StrEnum):
    everything = "all"
    id_data = "id"
    wild = "wild"
    unseen = "unseen"


class EvaluatePart(StrEnum):
    everything = "all"
    own = "own"
    unseen = "unseen"


def fingerprints(params: ParamsFile = PARAMS_YAML) -> None:
    """Write fingerprints of what DVC cannot see: code, raw data, given files."""
    from salcli.pipeline import fingerprints as stage

    stage.run(params)


def summary(params: ParamsFile = PARAMS_YAML) -> None:
    """Write means over seeds and OOD sets, for `dvc metrics`, `dvc exp show` and `dvc plots`."""
    from salcli.report import summary as stage

    stage.run(params)


def prepare(
    part: Annotated[
        PreparePart, typer.Argument(show_choices=False, help=f"One part, as DVC runs it: {', '.join(PreparePart)}.")
    ] = PreparePart.everything,
    params: ParamsFile = PARAMS_YAML,
    ood: OodSets = None,
    pi: Shares = None,
    unseen: UnseenSets = None,
    seed: Seeds = None,
    scratch: Scratch = False,
    assignments: Assignments = None,
) -> None:
    """Decode the data, split the ID data, mix the wild data."""
    from salcli.pipeline import prepare as stage
    from salcli.report.stage_tables import prepared_table
    from salcli.store.layout import Artifact, prepared_set, unseen_set

    options: dict[str, Any] = {"ood": ood, "pi": pi, "unseen": unseen, "seed": seed}
    session = Session.open("prepare", params, assignments, **options, scratch=scratch, parallel=False)
    workspace, data = session.workspace, session.params.data
    wanted = set(PreparePart) if part is PreparePart.everything else {part}
    sets: list[tuple[str, Artifact]] = []
    if PreparePart.id_set in wanted:
        sets.append((data.id, prepared_set(data.id)))
    if PreparePart.ood_set in wanted:
        sets += [(name, prepared_set(name)) for name in dict.fromkeys(one.ood for one in session.experiments)]
    if PreparePart.unseen_set in wanted:
        sets += [(name, unseen_set(name)) for name in session.unseen_sets]
    embedder = None
    if sets and session.params.model.frozen:
        from salcli.pipeline.embed import embedder_for

        embedder = embedder_for(session.params, workspace)
    done = [
        stage.prepare_set(workspace, session.params, name, session.progress, artifact, embedder)
        for name, artifact in sets
    ]
    if PreparePart.id_split in wanted:
        done += [stage.prepare_split(workspace, data, experiment) for experiment in session.of_seeds]
    if PreparePart.wild in wanted:
        done += [stage.prepare_wild(workspace, data, experiment) for experiment in session.of_wild_sets]
    is_ready = PreparePart.wild in wanted
    session.finish(
        prepared_table(done),
        [path for result in done for path in result.written],
        "salcli train-id" if is_ready else "salcli prepare",
    )
    for result in done:
        if result.note:
            say(f"note: {result.note}", "yellow")


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
    from salcli.pipeline import train_id as stage
    from salcli.report.stage_tables import class_notes, train_id_table

    flags = {"device": device, "train_id.epochs": epochs, "train_id.lr": lr, "train_id.batch_size": batch_size}
    session = Session.open("train-id", params, assignments, flags, seed=seed, scratch=scratch)
    done = session.run(stage.run, session.of_seeds)
    session.finish(train_id_table(done), [path for one in done for path in one.written], "salcli extract-grads")
    for line, style in class_notes(done):
        say(line, style)


def extract_grads(
    part: Annotated[ExtractPart, typer.Argument(help="One part, as DVC runs it.")] = ExtractPart.everything,
    params: ParamsFile = PARAMS_YAML,
    ood: OodSets = None,
    pi: Shares = None,
    unseen: UnseenSets = None,
    seed: Seeds = None,
    device: Device = None,
    scratch: Scratch = False,
    assignments: Assignments = None,
    batch_size: Annotated[int | None, override("extract_grads.batch_size", "Images in a pass.")] = None,
) -> None:
    """Extract features and logits of all samples: the gradients of the last layer, factored."""
    from salcli.pipeline import extract
    from salcli.report.stage_tables import extracted_table

    flags = {"device": device, "extract_grads.batch_size": batch_size}
    options: dict[str, Any] = {"ood": ood, "pi": pi, "unseen": unseen, "seed": seed}
    session = Session.open("extract-grads", params, assignments, flags, **options, scratch=scratch)
    wanted = set(ExtractPart) if part is ExtractPart.everything else {part}
    done = []
    if ExtractPart.id_data in wanted:
        done += session.run(extract.run_id, session.of_seeds)
    if ExtractPart.wild in wanted:
        done += session.run(extract.run_wild, session.of_wild_sets)
    if ExtractPart.unseen in wanted:
        for name in session.unseen_sets:
            done += session.run(extract.run_unseen, session.of_wild_sets, unseen=name)
    results = [result for results in done for result in results]
    next_command = "salcli extract-grads wild" if part is ExtractPart.id_data else "salcli filter"
    session.finish(extracted_table(results), [result.written for result in results], next_command)


def filter_(
    params: ParamsFile = PARAMS_YAML,
    ood: OodSets = None,
    pi: Shares = None,
    seed: Seeds = None,
    variant: Variants = None,
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
        override("filter.score", "sal (τ), a post-hoc score (salcli methods lists them), auto, or MODULE:NAME."),
    ] = None,
    n_vectors: Annotated[int | None, override("filter.n_vectors", "Singular vectors to project on.")] = None,
) -> None:
    """Separate the candidate outliers from the wild data."""
    from salcli.pipeline import filter as stage
    from salcli.report.stage_tables import filter_view

    flags = {
        "device": device,
        "filter.threshold_quantile": threshold_quantile,
        "filter.calibration": calibration,
        "filter.svd": svd,
        "filter.score": score,
        "filter.n_vectors": n_vectors,
    }
    options: dict[str, Any] = {"ood": ood, "pi": pi, "seed": seed, "variant": variant}
    session = Session.open("filter", params, assignments, flags, **options, scratch=scratch)
    done = session.run(stage.run, session.experiments)
    view = filter_view(done, session.params.filter)
    session.finish(view, [path for one in done for path in one.written], "salcli train-ood")


def train_ood(
    params: ParamsFile = PARAMS_YAML,
    ood: OodSets = None,
    pi: Shares = None,
    seed: Seeds = None,
    device: Device = None,
    scratch: Scratch = False,
    assignments: Assignments = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="A variant of SAL or a rival; repeat for several.", show_default="all of params.yaml"),
    ] = None,
    epochs: Annotated[int | None, override("train_ood.epochs", "Passes over the ID training data.")] = None,
    lr: Annotated[float | None, override("train_ood.lr", "Learning rate at the start.")] = None,
    loss_weight: Annotated[float | None, override("train_ood.loss_weight", "Weight of the binary loss.")] = None,
    candidate_id: Annotated[
        bool | None, override("train_ood.candidate_id", "Let wild samples below the threshold count as ID.")
    ] = None,
    review: Annotated[
        str | None, override("train_ood.review", "A list of candidates that you corrected (salcli review).")
    ] = None,
) -> None:
    """Train with the wild data: SAL's OOD classifier with the candidate outliers, and rivals."""
    from salcli.methods.base import WildTrained, built_in, find_method, is_custom_method
    from salcli.pipeline import train_ood as stage
    from salcli.report.stage_tables import trained_table

    flags = {
        "device": device,
        "train_ood.epochs": epochs,
        "train_ood.lr": lr,
        "train_ood.loss_weight": loss_weight,
        "train_ood.candidate_id": candidate_id,
        "train_ood.review": review,
    }
    names, rivals = list(dict.fromkeys(method or [])), built_in(WildTrained)
    parallel = not names or not all(name in rivals and rivals[name].in_one_process for name in names)  # type: ignore[attr-defined]
    options: dict[str, Any] = {"ood": ood, "pi": pi, "seed": seed}
    session = Session.open("train-ood", params, assignments, flags, **options, scratch=scratch, parallel=parallel)
    names = names or [*session.params.variants, *session.params.rivals]
    done = []
    for name in names:
        if name in session.params.variant:
            done += session.run(stage.run, [one.with_variant(name) for one in session.of_wild_sets])
            continue
        if name not in rivals and not is_custom_method(name):
            raise unknown_name("method", name, [*session.params.variant, *rivals])
        find_method(name, WildTrained)
        done += session.run(stage.run, session.of_wild_sets, rival=name)
    session.finish(trained_table(done), [path for one in done for path in one.written], "salcli evaluate")


def train_encoder(
    params: ParamsFile = PARAMS_YAML,
    seed: Seeds = None,
    device: Device = None,
    scratch: Scratch = False,
    assignments: Assignments = None,
    encoder: Annotated[
        list[str] | None,
        typer.Option(help="A method such as knn-plus or csi; repeat for several.", show_default="encoders"),
    ] = None,
) -> None:
    """Train rivals' networks from scratch on the ID data."""
    from salcli.methods.base import IdTrained, find_method
    from salcli.pipeline import train_ood as stage
    from salcli.report.stage_tables import trained_table

    flags = {"device": device}
    session = Session.open("train-encoder", params, assignments, flags, seed=seed, scratch=scratch, parallel=False)
    names = list(dict.fromkeys(encoder or session.params.encoders))
    if not names:
        raise UsageMistakeError("there is nothing to train: encoders is empty; name one there, or with --encoder")
    for name in names:
        find_method(name, IdTrained)
    done = [one for name in names for one in session.run(stage.run_encoder, session.of_seeds, encoder=name)]
    session.finish(trained_table(done), [path for one in done for path in one.written], "salcli evaluate")


def evaluate(
    part: Annotated[
        EvaluatePart, typer.Argument(help="On the OOD set of the wild data, or on those of data.test_ood.")
    ] = EvaluatePart.everything,
    params: ParamsFile = PARAMS_YAML,
    ood: OodSets = None,
    pi: Shares = None,
    seed: Seeds = None,
    device: Device = None,
    scratch: Scratch = False,
    assignments: Assignments = None,
    unseen: UnseenSets = None,
    method: Annotated[list[str] | None, override("evaluate.methods", "Method to evaluate; repeat for several.")] = None,
) -> None:
    """Score the test sets with every method: FPR95, AUROC, AUPR, accuracy."""
    from salcli.pipeline import evaluate as stage
    from salcli.report.console import console
    from salcli.report.results import Results, results_view

    flags = {"device": device, "evaluate.methods": method or None}
    options: dict[str, Any] = {"ood": ood, "pi": pi, "seed": seed, "unseen": unseen}
    session = Session.open("evaluate", params, assignments, flags, **options, scratch=scratch)
    tests = [""] if part is not EvaluatePart.unseen else []
    tests += session.unseen_sets if part is not EvaluatePart.own else []
    if not tests:
        raise UsageMistakeError(
            "there is nothing to test on: data.test_ood is empty; name a set there, or with --unseen"
        )
    done = [one for name in tests for one in session.run(stage.run, session.of_wild_sets, unseen=name)]
    written = [path for one in done for path in one.written]
    view = results_view(Results.read([one.written[1] for one in done]), console.width)
    session.finish(view, written, "salcli table")


def detector(
    params: ParamsFile = PARAMS_YAML,
    ood: OodSets = None,
    pi: Shares = None,
    seed: Seeds = None,
    method: Annotated[
        str | None,
        override("detector.method", "A variant of SAL, a rival, an encoder, a post-hoc score, or auto.", "--method"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write this file instead.", show_default="runs/SEED/OOD/pi-PI/detector.safetensors"),
    ] = None,
    float16: Annotated[
        bool, typer.Option("--float16", help="Store the weights of backbones in half the bytes (detector.float16).")
    ] = False,
    device: Device = None,
    scratch: Scratch = False,
    assignments: Assignments = None,
) -> None:
    """Put a method, its network and its calibration scores into one file, for `predict` and `export`.

    Without --method it is that of detector.method. Another one goes to scratch/, or to --out.
    """
    import os
    from shlex import quote

    from salcli.detector import stage
    from salcli.report.stage_tables import detector_view

    options: dict[str, Any] = {"ood": ood, "pi": pi, "seed": seed}
    flags = {"device": device, "detector.method": method, "detector.float16": float16 or None}
    elsewhere = ("detector.method", "detector.float16") if out else ()
    session = Session.open(
        "detector", params, assignments, flags, **options, scratch=scratch, parallel=False, elsewhere=elsewhere
    )
    experiments = session.of_wild_sets
    if out and len(experiments) > 1:
        raise UsageMistakeError(
            f"--out is for one detector, but these are {len(experiments)}; choose one with --ood, --pi and --seed"
        )
    if out and out.is_dir():
        raise UsageMistakeError(f"--out {out} is a folder; name a file in it")
    done = session.run(stage.run, experiments, **({"out": out} if out else {}))
    written = [path for one in done for path in one.written]
    session.finish(detector_view(done), [] if out else written, outside=written if out else ())
    if "DVC_STAGE" not in os.environ:
        say(f"next: salcli predict --detector {quote(str(written[0]))} FOLDER", "dim")
