"""Commands that show results and files: table, report, review, inspect, verify, theory, toy."""

from enum import StrEnum
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from salcli.cli.options import OOD, PARAMS, PI, READ_SCRATCH, RUN, SCRATCH, SEED, SET, VARIANT, option, taking
from salcli.cli.session import Session, say, say_last, written
from salcli.errors import BadArtifactError, ParamsError, SalError, escaped, unknown_name

if TYPE_CHECKING:
    import pandas as pd

    from salcli.report.console import Grid


Format = StrEnum("Format", ["rich", "markdown", "latex", "csv", "json"])
Convention = StrEnum("Convention", ["id-positive", "ood-positive"])
STANDARD = Convention["id-positive"]
Sort = StrEnum("Sort", ["fpr95", "auroc", "aupr-in", "aupr-out", "id-accuracy"])
Exchange = StrEnum("Exchange", ["label-studio"])
Order = StrEnum("Order", ["uncertainty", "score"])


@taking(PARAMS)
def table(
    *,
    params: Path,
    scratch: Annotated[
        bool, typer.Option("--scratch", help="Show the evaluations in scratch/.", rich_help_panel=RUN)
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also show experiments that params.yaml does not name.")
    ] = False,
    paper: Annotated[
        bool, typer.Option("--paper", help="Show them beside the paper's tables that fit params.yaml.")
    ] = False,
    estimates: Annotated[
        bool,
        typer.Option("--estimates", help="Show estimates without labels, beside what is measured on the same OOD set."),
    ] = False,
    intervals: Annotated[
        bool, typer.Option("--intervals", help="Show 95% intervals of FPR95 and AUROC over the test samples.")
    ] = False,
    fpr95: Annotated[
        Convention, typer.Option(help="Which class is positive in FPR95; OpenOOD's tables: ood-positive.")
    ] = STANDARD,
    sort: Annotated[
        Sort | None,
        typer.Option(
            metavar="COLUMN",
            help=f"Sort each section by {', '.join(Sort)}.",
            show_default="all by the average FPR95",
        ),
    ] = None,
    output_format: Annotated[
        Format, typer.Option("--format", metavar="FORMAT", help=f"How to write the table: {', '.join(Format)}.")
    ] = Format.rich,
) -> None:
    """Collect every evaluation of the project: mean ± std over seeds, best value bold."""
    from dataclasses import replace

    from salcli.params.reading import read_yaml
    from salcli.report.console import ConsoleProgress, console, side_console
    from salcli.report.intervals import has_scores, with_scores
    from salcli.report.last_word import last_word
    from salcli.report.results import Results, asked_for, groups_of, results_frame, results_grids, results_view
    from salcli.store.layout import RUNS, SCRATCH, Workspace

    is_other = fpr95 is not STANDARD
    given = {"--intervals": intervals, "--fpr95": is_other, "--sort": sort is not None}
    if paper:
        given |= {"--scratch": scratch, "--all": everything, "--estimates": estimates}
        if flag := next((flag for flag, is_given in given.items() if is_given), ""):
            raise ParamsError(f"--paper compares what params.yaml asks for; leave {flag} out")
        _compare_with_paper(params, output_format)
        return
    if estimates and (intervals or is_other):
        raise ParamsError(
            "--estimates have their own intervals, with ID as positive; leave --intervals and --fpr95 out"
        )
    root, is_free = params.parent / SCRATCH if scratch else params.parent, everything or scratch
    raw = {} if is_free and not params.exists() else read_yaml(params)
    results = Results.from_folder(root / RUNS, None if is_free else asked_for(raw), groups_of(raw))
    results = replace(results, sort=sort.replace("-", "_") if sort else "", intervals=intervals)
    has_verdict = output_format not in (Format.csv, Format.json) and not estimates and has_scores(results)
    if intervals or is_other or has_verdict:
        results = with_scores(results, ConsoleProgress(side_console), fpr95)
    if output_format is Format.rich:
        if scratch:
            say(f"from {SCRATCH}/: runs by hand, not what `dvc repro` builds", "yellow")
        elif raw and not estimates:
            say_last(last_word(Workspace(params.parent), raw, results.labels))
        console.print(results_view(results, console.width, estimates=estimates))
    else:
        grids, frame = results_grids(results, estimates=estimates), results_frame(results, estimates=estimates)
        _print(grids, frame, output_format)


def _compare_with_paper(params_file: Path, output_format: Format) -> None:
    from salcli.params.reading import read_yaml
    from salcli.params.schema import load_params
    from salcli.report.console import console
    from salcli.report.paper import beside_the_paper, matching_tables
    from salcli.report.results import Results, asked_for
    from salcli.store.layout import RUNS

    params, _ = load_params(params_file)
    matching_tables(params)  # whether there is anything to compare with, before anything is read
    results = Results.from_folder(params_file.parent / RUNS, asked_for(read_yaml(params_file)))
    grids, frame = beside_the_paper(results, params)
    if output_format is Format.rich:
        for grid in grids:
            console.print(grid.rich())
    else:
        _print(grids, frame, output_format)


def _print(grids: "list[Grid]", frame: "pd.DataFrame", output_format: Format) -> None:
    match output_format:
        case Format.markdown:
            print(escaped("\n\n".join(grid.markdown() for grid in grids)))
        case Format.latex:
            print(escaped("\n\n".join(grid.latex() for grid in grids)))
        case Format.csv:
            print(escaped(frame.to_csv(index=False)), end="")
        case Format.json:
            print(frame.to_json(orient="records", indent=2))


def inspect(
    file: Annotated[Path, typer.Argument(help="A checkpoint, representation, candidate file or other artifact.")],
    top: Annotated[
        int, typer.Option(min=0, help="Candidates to list, highest score first, or rows of a CSV file.")
    ] = 10,
) -> None:
    """Show what is in a file that salcli wrote."""
    from salcli.report.console import console
    from salcli.report.inspection import file_view

    console.print(file_view(file, top))


def _one(name: str, text: str, kind: type = str, default: str = "the first", **limits: Any) -> Parameter:
    return option(kind | None, name, text, show_default=default, rich_help_panel=RUN, **limits)


A_VARIANT = _one("--variant", "The variant of SAL.")


@taking(
    PARAMS,
    _one("--ood", "The OOD set to show in full."),
    _one("--pi", "The share π."),
    _one("--seed", "The seed to show in full.", int, min=0),
    A_VARIANT,
    option(str | None, "--unseen", "Show the test on this set of data.test_ood.", rich_help_panel=RUN),
    READ_SCRATCH,
)
def report(
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    top: Annotated[int, typer.Option(min=1, max=500, help="Candidates to show, highest score first.")] = 120,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the charts there, too, as PNG and SVG.")
    ] = None,
    show: Annotated[
        bool | None, typer.Option("--open/--no-open", help="Open it in a browser.", show_default="in a terminal")
    ] = None,
    *,
    params: Path,
    scratch: bool,
    **shown: Any,
) -> None:
    """Write one HTML page: table, candidates, scores, mistakes, training, theory, provenance.

    It needs no network and opens from disk. The table is about all experiments, the rest about one.
    """
    from salcli.report.console import console
    from salcli.report.page import collect, render
    from salcli.store.files import write_text

    if out.is_dir():
        raise SalError(f"--out {out} is a folder; name a file, for example {out / 'report.html'}")
    chosen = {name: [value] for name, value in shown.items() if value not in (None, "")}
    session = Session.open("report", {"params": params, "scratch": scratch, **chosen}, parallel=False)
    filtered = (one for one in session.experiments if session.workspace.has(one.candidates))
    experiment, unseen = next(filtered, session.experiments[0]), shown["unseen"] or ""
    page = collect(session.workspace, session.params, params, experiment, session.progress, unseen=unseen, top=top)
    drawn = [path for chart in page["charts"] for path in chart.write(figures)] if figures else []
    write_text(out, render(page))
    session.finish("", [out, *drawn])
    if show or (show is None and console.is_terminal):
        import webbrowser

        webbrowser.open(out.resolve().as_uri())


@taking(
    PARAMS,
    _one("--ood", "The wild data."),
    _one("--seed", "The seed.", int, min=0),
    A_VARIANT,
    READ_SCRATCH,
)
def select(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="A new or empty folder.")],
    link: Annotated[bool, typer.Option("--link", help="Link the files instead of copying them.")] = False,
    *,
    params: Path,
    scratch: bool,
    **chosen: Any,
) -> None:
    """Copy the files of the wild samples that the filter flags; of vectors, their rows of wild.csv."""
    from salcli.project.select import select as write

    given = {name: [value] for name, value in chosen.items() if value is not None}
    session = Session.open("select", {"params": params, "scratch": scratch, **given}, parallel=False)
    done = write(session.workspace, session.params, session.experiments[0], out, link=link)
    if done:
        session.finish("", done)
    else:
        say("no sample is flagged")


@taking(PARAMS, OOD, PI, SEED, A_VARIANT, READ_SCRATCH)
def review(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="With --to, the tasks to write; with --from, the JSON that Label Studio exported.",
            show_default="label-studio.json with --to",
        ),
    ] = None,
    to: Annotated[Exchange | None, typer.Option(help="Write tasks for Label Studio, not a CSV.")] = None,
    back: Annotated[
        Exchange | None, typer.Option("--from", help="Write the CSV from the labels that Label Studio exported.")
    ] = None,
    by: Annotated[
        Order | None,
        typer.Option(
            help="Which samples come first: those next to T, where a label teaches most, or those with the highest "
            "score.",
            show_default="uncertainty with --to, else score",
        ),
    ] = None,
    images: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="With --to: where Label Studio finds the images, as a prefix of their file names.",
            show_default="copies of 512 pixels in the tasks",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The list to write.")] = Path("review.csv"),
    below: Annotated[int, typer.Option(min=0, help="Wild samples just below T to list as well.")] = 20,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing list.")] = False,
    *,
    variant: str | None,
    **given: Any,
) -> None:
    """Write the candidate outliers to a CSV that a person can correct, for `train-ood --review`.

    In the column `decision`, keep or drop each candidate; add a sample below the threshold to count it as an outlier,
    too. A candidate without a line stays. With --to label-studio and --from label-studio, people do that in their
    browser.
    """
    from os.path import relpath
    from shlex import quote

    from salcli.project import review as lists
    from salcli.report.listings import review_table
    from salcli.report.page_data import wild_addresses
    from salcli.store.review import ADD, DROP

    target = file or Path("label-studio.json") if to else out
    if to and back:
        raise SalError("--to writes tasks and --from reads their labels; use one of them")
    if file and not (to or back):
        raise SalError("FILE goes with --to or --from; name the list to write with --out")
    if back and not file:
        raise SalError("name the file that Label Studio exported: salcli review --from label-studio FILE")
    if images is not None and not to:
        raise SalError("--images goes with --to label-studio")
    if to and target.suffix.lower() != ".json":
        raise SalError(f"{target}: Label Studio imports tasks from a file that ends in .json")
    if target.exists() and not force:
        raise SalError(
            f"{target} exists already, perhaps with decisions; name another {'FILE' if to else '--out'}, or overwrite "
            "with --force"
        )
    session = Session.open("review", {**given, "variant": [variant] if variant else None}, parallel=False)
    workspace, params = session.workspace, session.params
    train = f"salcli train-ood --review {quote(relpath(out, given['params'].parent))}"
    if back and file:
        rows = lists.read_label_studio(file, workspace, params, session.experiments)
        lists.write_review(out, rows)
        n_dropped, n_added = (sum(row.decision == word for row in rows) for word in (DROP, ADD))
        say(f"labels in {file}: {n_dropped} candidates dropped, {n_added} samples added")
        session.finish(review_table(rows), [out], train)
        return
    shown = variant or params.variants[0]  # what SAL trains on; of two variants, most samples would be listed twice
    rows, tasks = [], []
    for experiment in (one for one in session.experiments if one.variant == shown):
        own = lists.rows_for_review(workspace, params, experiment, below)
        if by is Order.uncertainty or (by is None and to):
            own = lists.nearest_first(own)
        rows += own
        if to:
            tasks += lists.label_studio_tasks(own, *wild_addresses(workspace, params, experiment, own, images))
    if to:
        then = f"label them in Label Studio, then: salcli review --from label-studio EXPORT --out {quote(str(out))}"
        session.finish(review_table(rows), lists.write_label_studio(target, tasks), then)
    else:
        lists.write_review(out, rows)
        session.finish(review_table(rows), [out], f"correct the column decision, then: {train}")


def verify(
    folder: Annotated[Path, typer.Argument(metavar="PROJECT", help="The project's folder.")] = Path(),
) -> None:
    """Read every file of a project, and compare it with its checksum."""
    from salcli.project.verify import verify as check
    from salcli.report.console import ConsoleProgress

    done = check(folder, ConsoleProgress())
    for problem in done.problems:
        say(problem, "red")
    if done.problems:
        raise BadArtifactError(f"{len(done.problems)} of {done.n_files} files are damaged or missing; run dvc repro")
    more = f"; {done.n_unknown} without a checksum were not checked" if done.n_unknown else ""
    say(f"{done.n_files - done.n_unknown} files match their checksums{more}")


@taking(PARAMS, OOD, PI, SEED, VARIANT, SCRATCH, SET)
def theory(**given: Any) -> None:
    """Measure what the theorems are about: the discrepancy ζ, π, τ and the errors against T."""
    from salcli.pipeline import theory as stage
    from salcli.report.figures import FORMATS, write_theory_figure
    from salcli.report.stage_tables import theory_view

    session = Session.open("theory", given, parallel=False)
    done = session.run(stage.run, [one for one in session.experiments if one.variant in session.params.variants])
    figures = []
    for result in done:
        drawn = [session.workspace.target(result.experiment.theory(kind)) for kind in FORMATS]
        write_theory_figure(result, drawn)
        figures += drawn
    session.finish(theory_view(done), [*written(done), *figures])


def toy(
    folder: Annotated[Path, typer.Argument(help="Where to put the figure.")] = Path("toy"),
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds; the figure is of the first.")] = 10,
    first_seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    calibration: Annotated[
        str, typer.Option(help="Whose threshold the figure shows: train, holdout or id-svd.")
    ] = "train",
) -> None:
    """Run the paper's example in the plane: three Gaussians, two kinds of outliers, one figure."""
    from salcli.pipeline import toy as stage
    from salcli.report.console import ConsoleProgress, console
    from salcli.report.figures import FORMATS, write_toy_figure
    from salcli.report.stage_tables import toy_table

    if calibration not in stage.CALIBRATIONS:
        raise unknown_name("calibration", calibration, stage.CALIBRATIONS)
    done = stage.run(range(first_seed, first_seed + seeds), progress=ConsoleProgress())
    figures = [folder / f"toy.{kind}" for kind in FORMATS]
    write_toy_figure([result for result in done if result.seed == first_seed], calibration, figures)
    console.print(toy_table(done))
    say(f"wrote {', '.join(map(str, figures))}", "dim")
