"""Commands that use a detector: predict, monitor, export."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from salcli.cli.options import ALLOW_IMPORT, DETECTOR, ID_QUANTILE, SCORING, columns_of, taking
from salcli.cli.session import say

SOME_ARE_OOD = ALARM = 3


Format = StrEnum("Format", ["table", "csv", "jsonl"])
Target = StrEnum("Target", ["onnx", "torch-export"])


@taking(*SCORING)
def predict(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH",
            help="Images, or .npz, .npy and .parquet files of vectors: files, folders (whole trees), quoted patterns "
            "such as 'new/**/*.jpg', or - for a list of paths on standard input.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Write a file: .csv or .jsonl.", show_default="standard output")
    ] = None,
    output_format: Annotated[
        Format | None,
        typer.Option(
            "--format", help="How to write predictions.", show_default="by --out; table in a terminal, else csv"
        ),
    ] = None,
    fdr: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Call so many samples OOD that on average at most this share of them is ID "
            "(Benjamini–Hochberg over all p-values), instead of --id-quantile.",
            show_default=False,
        ),
    ] = None,
    fail_on_ood: Annotated[bool, typer.Option("--fail-on-ood", help="Exit with code 3 if any sample is OOD.")] = False,
    null: Annotated[bool, typer.Option("--null", "-0", help="Paths on standard input end with NUL.")] = False,
    **given: Any,
) -> None:
    """Predict for each image or vector: its class, its score (higher = more OOD), whether it is OOD, and a p-value.

    Exit code 0, or 3 with --fail-on-ood if any sample is OOD, or 2 if nothing could be done.
    """
    from salcli.detector.predict import choose_format
    from salcli.detector.predict import predict as run
    from salcli.report.console import console
    from salcli.report.listings import LowestScores

    chosen_format, table = choose_format(output_format, out), LowestScores()
    tally = run(paths, out=out, output_format=chosen_format, table=table.write, null=null, fdr=fdr, **_scoring(given))
    if chosen_format == "table":
        console.print(table.table(console.width))
    say_aside(str(tally))
    if out:
        say_aside(f"wrote {out}", "note")
    if fail_on_ood and tally.n_ood:
        raise typer.Exit(SOME_ARE_OOD)


@taking(*SCORING)
def monitor(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH",
            help="Images or vectors as for predict, or .csv and .jsonl files that predict wrote, in the order of time.",
        ),
    ],
    by: Annotated[
        str,
        typer.Option(
            metavar="file|day|COL",
            help="What a batch is: each PATH; each day, by the time stamps of files or by --date; or each value of a "
            "column of vectors or predictions.",
        ),
    ] = "file",
    date: Annotated[
        str | None, typer.Option(metavar="COL", help="The column of dates for --by day.", show_default="file times")
    ] = None,
    baseline: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Compare with the first N batches, not with the calibration data: for streams that always have had "
            "some outliers.",
        ),
    ] = 0,
    alpha: Annotated[float, typer.Option(help="Chance of a false alarm, however long the stream is.")] = 0.01,
    out: Annotated[Path | None, typer.Option(help="Write a file: .json, or .jsonl with a line for each batch.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw a figure: .png or .svg.")] = None,
    fail_on_alarm: Annotated[
        bool, typer.Option("--fail-on-alarm", help="Exit with code 3 if there is an alarm.")
    ] = False,
    **given: Any,
) -> None:
    """Watch a stream of new data: the share of outliers in each batch, drift, and an alarm that is valid at any time.

    Give the whole stream each time. Exit code 0, or 3 with --fail-on-alarm if there is an alarm, or 2 if nothing could
    be done.
    """
    from salcli.detector.monitor import check_outputs
    from salcli.detector.monitor import monitor as run
    from salcli.report.console import console
    from salcli.report.monitoring import monitor_notes, monitor_table, write_monitor_figure

    check_outputs(out, figure)
    found = run(paths, by=by, date_column=date, baseline=baseline, alpha=alpha, **_scoring(given))
    console.print(monitor_table(found))
    for note in monitor_notes(found):
        console.print(note, style="bold red" if note.startswith("ALARM") else "", highlight=False, markup=False)
    if out:
        found.write(out)
    if figure:
        write_monitor_figure(found, figure)
    if out or figure:
        say_aside(f"wrote {', '.join(str(path) for path in (out, figure) if path)}", "note")
    if fail_on_alarm and found.alarm:
        raise typer.Exit(ALARM)


def _scoring(given: dict[str, Any]) -> dict[str, Any]:
    """What `predict` and `monitor` have in common, by the names of their parameters."""
    from salcli.report.console import ConsoleProgress, side_console

    columns = columns_of(given.pop("vector"), row_id=given.pop("row_id"))
    return {**given, "columns": columns, "say": say_aside, "progress": ConsoleProgress(side_console)}


def say_aside(line: str, style: str = "") -> None:
    """Print a line on standard error."""
    from salcli.report.console import side_console

    style = {"note": "dim", "warning": "yellow"}.get(style, style)
    side_console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


@taking(DETECTOR, ID_QUANTILE, ALLOW_IMPORT)
def export(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write: detector.onnx, detector.pt2.")],
    to: Annotated[Target, typer.Option(help="onnx, or torch-export for torch.export.load.")],
    detector: Path | None = None,
    **given: Any,
) -> None:
    """Write the detector as one graph for other programs: logits, score, is_ood and p_value of a batch of any size.

    The file is compared with the network before it is put in place. ONNX needs `pip install 'salcli[onnx]'`.
    """
    from salcli.detector.export import BATCH_SIZES
    from salcli.detector.export import export as write
    from salcli.detector.predict import open_detector

    _, loaded = open_detector(detector, lambda note, _: say(note, "dim"), device="cpu", **given)
    largest = write(loaded, out, to.value)
    say(
        f"wrote {out}: checked against the network with batches of {', '.join(map(str, BATCH_SIZES))}, "
        f"largest difference {largest:.1e}"
    )
