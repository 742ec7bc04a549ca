"""The stage commands: each is one or more stages of dvc.yaml."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from salcli.cli.options import ALL, DEVICE, OOD, PARAMS, PI, SCRATCH, SEED, SET, UNSEEN, VARIANT, override, taking
from salcli.cli.session import Session, say, say_last, written
from salcli.errors import SalError, unknown_name

EPOCHS, START_LR = "Passes over the ID training data.", "Learning rate at the start."


PreparePart = StrEnum("PreparePart", ["all", "id-set", "ood-set", "unseen-set", "split", "wild"])
ExtractPart = StrEnum("ExtractPart", ["all", "id", "wild", "unseen"])
EvaluatePart = StrEnum("EvaluatePart", ["all", "own", "unseen"])


def _parts(part: StrEnum) -> set[str]:
    """What to do of a command that DVC runs in parts."""
    return {*type(part)} if part == "all" else {part}


@taking(PARAMS)
def fingerprints(params: Path) -> None:
    """Write fingerprints of what DVC cannot see: code, raw data, given files."""
    from salcli.pipeline import fingerprints as stage

    stage.run(params)


@taking(PARAMS)
def summary(params: Path) -> None:
    """Write means over seeds and OOD sets, for `dvc metrics`, `dvc exp show` and `dvc plots`."""
    from salcli.report import summary as stage

    say_last(stage.run(params))


@taking(PARAMS, OOD, PI, UNSEEN, SEED, SCRATCH, SET)
def prepare(
    part: Annotated[
        PreparePart, typer.Argument(show_choices=False, help=f"One part, as DVC runs it: {', '.join(PreparePart)}.")
    ] = PreparePart["all"],
    **given: Any,
) -> None:
    """Decode the data, split the ID data, mix the wild data."""
    from salcli.pipeline import prepare as stage
    from salcli.report.stage_tables import counts_text, prepared_table
    from salcli.store.layout import prepared_set, unseen_set

    session = Session.open("prepare", given, parallel=False)
    workspace, params = session.workspace, session.params
    wanted, sets = _parts(part), {}
    if "id-set" in wanted:
        sets[prepared_set(params.data.id)] = params.data.id
    if "ood-set" in wanted:
        sets |= {prepared_set(one.ood): one.ood for one in session.experiments}
    if "unseen-set" in wanted:
        sets |= {unseen_set(name): name for name in session.unseen_sets}
    embedder = None
    if sets and params.model.frozen:
        from salcli.pipeline.embed import embedder_for

        embedder = embedder_for(params, workspace)
    done = [
        stage.prepare_set(workspace, params, name, session.progress, artifact, embedder)
        for artifact, name in sets.items()
    ]
    if "split" in wanted:
        done += [stage.prepare_split(workspace, params.data, experiment) for experiment in session.of_seeds]
    if "wild" in wanted:
        done += [stage.prepare_wild(workspace, params.data, experiment) for experiment in session.of_wild_sets]
    next_command = "salcli train-id" if "wild" in wanted else "salcli prepare"
    counts = ", ".join(f"{one.what}: {counts_text(one)}" for one in done)
    session.finish(prepared_table(done), written(done), next_command, short=f"prepared {counts}")
    for result in done:
        if result.note:
            say(f"note: {result.note}", "yellow")


@taking(
    PARAMS, SEED, DEVICE, SCRATCH, SET,
    override("train_id.epochs", int, EPOCHS),
    override("train_id.lr", float, START_LR),
    override("train_id.batch_size", int, "Images in a step."),
)  # fmt: skip
def train_id(**given: Any) -> None:
    """Train the classifier on labeled ID data."""
    from salcli.pipeline import train_id as stage
    from salcli.report.stage_tables import class_notes, train_id_table

    session = Session.open("train-id", given)
    done = session.run(stage.run, session.of_seeds)
    session.finish(train_id_table(done), written(done), "salcli extract-grads")
    for line, style in class_notes(done):
        say(line, style)


@taking(
    PARAMS, OOD, PI, UNSEEN, SEED, DEVICE, SCRATCH, SET,
    override("extract_grads.batch_size", int, "Images in a pass."),
)  # fmt: skip
def extract_grads(
    part: Annotated[ExtractPart, typer.Argument(help="One part, as DVC runs it.")] = ExtractPart["all"],
    **given: Any,
) -> None:
    """Extract features and logits of all samples: the gradients of the last layer, factored."""
    from salcli.pipeline import extract
    from salcli.report.stage_tables import extracted_table

    session = Session.open("extract-grads", given)
    wanted, done = _parts(part), []
    if "id" in wanted:
        done += session.run(extract.run_id, session.of_seeds)
    if "wild" in wanted:
        done += session.run(extract.run_wild, session.of_wild_sets)
    if "unseen" in wanted:
        for name in session.unseen_sets:
            done += session.run(extract.run_unseen, session.of_wild_sets, unseen=name)
    results = [result for results in done for result in results]
    next_command = "salcli extract-grads wild" if part == "id" else "salcli filter"
    files, counts = [one.written for one in results], ", ".join(f"{one.what} {one.n_samples:,}" for one in results)
    session.finish(extracted_table(results), files, next_command, short=f"gradients of {counts}")


@taking(
    PARAMS, OOD, PI, SEED, VARIANT, DEVICE, SCRATCH, SET,
    override("filter.threshold_quantile", float, "Quantile of the calibration scores."),
    override("filter.fdr", float, "Instead: largest expected share of ID data among the candidates."),
    override("filter.certified", float, "Instead: the longest list of which this share is certified."),
    override("filter.directions", str, "v of pool (calibration and wild data) or of wild (the paper's)."),
    override("filter.calibration", str, "holdout, train or id-svd."),
    override("filter.svd", str, "class-conditional or class-agnostic."),
    override("filter.score", str, "sal (τ), sal-plus, a post-hoc score (salcli methods lists them), or MODULE:NAME."),
    override("filter.n_vectors", int, "Singular vectors to project on."),
)  # fmt: skip
def filter_(**given: Any) -> None:
    """Separate the candidate outliers from the wild data."""
    from salcli.pipeline import filter as stage
    from salcli.report.stage_tables import filter_view

    session = Session.open("filter", given)
    done = session.run(stage.run, session.experiments)
    view, notes = filter_view(done), [note for one in done for note in (*one.notes, one.label_shift) if note]
    trained = any(one.experiment.variant in session.params.variants for one in done)
    session.finish(view, written(done), "salcli train-ood" if trained else "salcli evaluate", notes=notes)


@taking(
    PARAMS, OOD, PI, SEED, DEVICE, SCRATCH, SET,
    override("train_ood.epochs", int, EPOCHS),
    override("train_ood.lr", float, START_LR),
    override("train_ood.loss_weight", float, "Weight of the binary loss."),
    override(
        "train_ood.candidate_id",
        bool,
        "Let wild samples below the threshold count as ID.",
        "--candidate-id/--no-candidate-id",
    ),
    override("train_ood.review", str, "A list of candidates that you corrected (salcli review)."),
)  # fmt: skip
def train_ood(
    method: Annotated[
        list[str] | None,
        typer.Option(help="A variant of SAL or a rival; repeat for several.", show_default=ALL),
    ] = None,
    **given: Any,
) -> None:
    """Train with the wild data: SAL's OOD classifier with the candidate outliers, and rivals."""
    from salcli.methods.base import WildTrained, built_in, find_method, is_custom_method
    from salcli.pipeline import train_ood as stage
    from salcli.report.stage_tables import trained_table

    names, rivals = list(dict.fromkeys(method or [])), built_in(WildTrained)
    parallel = not names or not all(name in rivals and rivals[name].in_one_process for name in names)  # type: ignore[attr-defined]
    session = Session.open("train-ood", given, parallel=parallel)
    done = []
    for name in names or [*session.params.variants, *session.params.rivals]:
        if name in session.params.filters:
            raise SalError(f"{name} is only filtered (filters of params.yaml); there is nothing to train")
        if name in session.params.variant:
            done += session.run(stage.run, [one.with_variant(name) for one in session.of_wild_sets])
            continue
        if name not in rivals and not is_custom_method(name):
            raise unknown_name("method", name, [*session.params.variant, *rivals])
        find_method(name, WildTrained)
        done += session.run(stage.run, session.of_wild_sets, rival=name)
    session.finish(trained_table(done), written(done), "salcli evaluate")


@taking(PARAMS, SEED, DEVICE, SCRATCH, SET)
def train_encoder(
    encoder: Annotated[
        list[str] | None,
        typer.Option(help="A method such as knn-plus or csi; repeat for several.", show_default="encoders"),
    ] = None,
    **given: Any,
) -> None:
    """Train rivals' networks from scratch on the ID data."""
    from salcli.methods.base import IdTrained, find_method
    from salcli.pipeline import train_ood as stage
    from salcli.report.stage_tables import trained_table

    session = Session.open("train-encoder", given, parallel=False)
    names = list(dict.fromkeys(encoder or session.params.encoders))
    if not names:
        raise SalError("there is nothing to train: encoders is empty; name one there, or with --encoder")
    for name in names:
        find_method(name, IdTrained)
    done = [one for name in names for one in session.run(stage.run_encoder, session.of_seeds, encoder=name)]
    session.finish(trained_table(done), written(done), "salcli evaluate")


@taking(
    PARAMS, OOD, PI, SEED, DEVICE, SCRATCH, SET, UNSEEN,
    override("evaluate.methods", list[str], "Method to evaluate; repeat for several.", "--method"),
)  # fmt: skip
def evaluate(
    part: Annotated[
        EvaluatePart, typer.Argument(help="On the OOD set of the wild data, or on those of data.test_ood.")
    ] = EvaluatePart["all"],
    **given: Any,
) -> None:
    """Score the test sets with every method: FPR95, AUROC, AUPR, accuracy."""
    from salcli.pipeline import evaluate as stage
    from salcli.report.console import console
    from salcli.report.results import Results, results_view

    session = Session.open("evaluate", given)
    tests = [""] if "own" in _parts(part) else []
    tests += session.unseen_sets if "unseen" in _parts(part) else []
    if not tests:
        raise SalError("there is nothing to test on: data.test_ood is empty; name a set there, or with --unseen")
    done = [one for name in tests for one in session.run(stage.run, session.of_wild_sets, unseen=name)]
    results = Results.read([one.written[1] for one in done])
    view = results_view(results.without_notes(), console.width)
    session.finish(view, written(done), "salcli table", notes=results.notes)


@taking(
    PARAMS, OOD, PI, SEED, DEVICE, SCRATCH, SET,
    override("detector.method", str, "A variant of SAL, a rival, an encoder, a post-hoc score, or auto."),
    override("detector.float16", bool, "Store the weights of backbones in half the bytes.", "--float16"),
)  # fmt: skip
def detector(
    out: Annotated[
        Path | None,
        typer.Option(help="Write this file instead.", show_default="runs/SEED/OOD/pi-PI/detector.safetensors"),
    ] = None,
    **given: Any,
) -> None:
    """Put a method, its network and its calibration scores into one file, for `predict` and `export`.

    Without --method it is that of detector.method. Another one goes to scratch/, or to --out.
    """
    import os
    from shlex import quote

    from salcli.detector import stage
    from salcli.models.backbones import import_path
    from salcli.report.stage_tables import detector_view

    elsewhere = ("detector.method", "detector.float16") if out else ()
    session = Session.open("detector", given, parallel=False, elsewhere=elsewhere)
    experiments = session.of_wild_sets
    if out and len(experiments) > 1:
        raise SalError(
            f"--out is for one detector, but these are {len(experiments)}; choose one with --ood, --pi and --seed"
        )
    if out and out.is_dir():
        raise SalError(f"--out {out} is a folder; name a file in it")
    done = session.run(stage.run, experiments, out=out)
    session.finish(detector_view(done), written(done))
    if "DVC_STAGE" not in os.environ:
        is_foreign = out and import_path(session.params.model.backbone)  # those below runs/ are known to be our own
        allowed = " --allow-import" if is_foreign else ""
        say(f"next: salcli predict --detector {quote(str(written(done)[0]))}{allowed} FOLDER", "dim")
