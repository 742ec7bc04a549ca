"""Commands that use a detector: predict, monitor, export."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from salcli.cli.session import say

if TYPE_CHECKING:  # loads numpy
    from salcli.data.vectors import Columns

SOME_ARE_OOD = ALARM = 3
AS_TRAINED = "as in the training data, else found by name and type"

DetectorFile = Annotated[
    Path | None,
    typer.Option(
        "--detector", help="The detector.", show_default="detector.safetensors here, or that of the project's runs"
    ),
]
IdQuantile = Annotated[
    float, typer.Option("--id-quantile", help="Share of ID data to keep: what scores below its threshold is OOD.")
]
Vector = Annotated[
    list[str] | None,
    typer.Option(
        "--vector",
        metavar="COL",
        help="The column of vectors; or repeat for several columns of numbers.",
        show_default=AS_TRAINED,
    ),
]
RowId = Annotated[
    str | None,
    typer.Option("--row-id", metavar="COL", help="The column that names vectors.", show_default=AS_TRAINED),
]
BatchSize = Annotated[int, typer.Option(help="Samples in a pass.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
AllowImport = Annotated[
    bool,
    typer.Option("--allow-import", help="If the network is a custom one, import the module that the file names."),
]


class Format(StrEnum):
    table = "table"
    csv = "csv"
    jsonl = "jsonl"


class Target(StrEnum):
    onnx = "onnx"
    torch_export = "torch-export"


def predict(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH",
            help="Images, or .npz, .npy and .parquet files of vectors: files, folders (whole trees), quoted patterns "
            "such as 'new/**/*.jpg', or - for a list of paths on standard input.",
        ),
    ],
    detector: DetectorFile = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write a file: .csv or .jsonl.", show_default="standard output")
    ] = None,
    output_format: Annotated[
        Format | None,
        typer.Option(
            "--format", help="How to write predictions.", show_default="by --out; table in a terminal, else csv"
        ),
    ] = None,
    id_quantile: IdQuantile = 0.95,
    fdr: Annotated[
        float | None,
        typer.Option(
            "--fdr",
            metavar="SHARE",
            help="Call so many samples OOD that on average at most this share of them is ID "
            "(Benjamini–Hochberg over all p-values), instead of --id-quantile.",
            show_default=False,
        ),
    ] = None,
    vector: Vector = None,
    row_id: RowId = None,
    fail_on_ood: Annotated[bool, typer.Option("--fail-on-ood", help="Exit with code 3 if any sample is OOD.")] = False,
    null: Annotated[bool, typer.Option("--null", "-0", help="Paths on standard input end with NUL.")] = False,
    batch_size: BatchSize = 256,
    device: Device = "auto",
    allow_import: AllowImport = False,
) -> None:
    """Predict for each image or vector: its class, its OOD score, whether it is OOD, and a p-value.

    Exit code 0, or 3 with --fail-on-ood if any sample is OOD, or 2 if nothing could be done.
    """
    from salcli.detector.predict import choose_format
    from salcli.detector.predict import predict as run
    from salcli.report.console import ConsoleProgress, console, side_console
    from salcli.report.listings import LowestScores

    chosen_format, table = choose_format(output_format, out), LowestScores()
    tally = run(
        paths,
        detector,
        out=out,
        output_format=chosen_format,
        table=table.write,
        null=null,
        columns=_columns(vector, row_id),
        id_quantile=id_quantile,
        fdr=fdr,
        batch_size=batch_size,
        device=device,
        allow_import=allow_import,
        say=say_aside,
        progress=ConsoleProgress(side_console),
    )
    if chosen_format == "table":
        console.print(table.table(console.width))
    say_aside(str(tally))
    if out:
        say_aside(f"wrote {out}", "note")
    if fail_on_ood and tally.n_ood:
        raise typer.Exit(SOME_ARE_OOD)


def monitor(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH",
            help="Images or vectors as for predict, or .csv and .jsonl files that predict wrote, in the order of time.",
        ),
    ],
    detector: DetectorFile = None,
    by: Annotated[
        str,
        typer.Option(
            "--by",
            metavar="file|day|COL",
            help="What a batch is: each PATH; each day, by the time stamps of files or by --date; or each value of a "
            "column of vectors or predictions.",
        ),
    ] = "file",
    date: Annotated[
        str | None,
        typer.Option("--date", metavar="COL", help="The column of dates for --by day.", show_default="file times"),
    ] = None,
    baseline: Annotated[
        int,
        typer.Option(
            "--baseline",
            metavar="N",
            min=0,
            help="Compare with the first N batches, not with the calibration data: for streams that always have had "
            "some outliers.",
        ),
    ] = 0,
    alpha: Annotated[
        float, typer.Option("--alpha", help="Chance of a false alarm, however long the stream is.")
    ] = 0.01,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write a file: .json, or .jsonl with a line for each batch.")
    ] = None,
    figure: Annotated[Path | None, typer.Option("--figure", help="Draw a figure: .png or .svg.")] = None,
    fail_on_alarm: Annotated[
        bool, typer.Option("--fail-on-alarm", help="Exit with code 3 if there is an alarm.")
    ] = False,
    id_quantile: IdQuantile = 0.95,
    vector: Vector = None,
    row_id: RowId = None,
    batch_size: BatchSize = 256,
    device: Device = "auto",
    allow_import: AllowImport = False,
) -> None:
    """Watch a stream of new data: the share of outliers in each batch, drift, and an alarm that is valid at any time.

    Give the whole stream each time. Exit code 0, or 3 with --fail-on-alarm if there is an alarm, or 2 if nothing could
    be done.
    """
    from salcli.detector.monitor import check_outputs
    from salcli.detector.monitor import monitor as run
    from salcli.report.console import ConsoleProgress, console, side_console
    from salcli.report.monitoring import monitor_notes, monitor_table, write_monitor_figure

    check_outputs(out, figure)
    found = run(
        paths,
        detector,
        by=by,
        date_column=date,
        baseline=baseline,
        alpha=alpha,
        columns=_columns(vector, row_id),
        id_quantile=id_quantile,
        batch_size=batch_size,
        device=device,
        allow_import=allow_import,
        say=say_aside,
        progress=ConsoleProgress(side_console),
    )
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


def say_aside(line: str, style: str = "") -> None:
    """Print a line on standard error."""
    from salcli.report.console import side_console

    style = {"note": "dim", "warning": "yellow"}.get(style, style)
    side_console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def _columns(vector: list[str] | None, row_id: str | None) -> "Columns":
    from salcli.data.vectors import Columns

    return Columns(vector[0] if vector and len(vector) == 1 else tuple(vector or ()) or None, row_id=row_id)


def export(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write: detector.onnx, detector.pt2.")],
    to: Annotated[Target, typer.Option("--to", help="onnx, or torch-export for torch.export.load.")],
    detector: DetectorFile = None,
    id_quantile: IdQuantile = 0.95,
    allow_import: AllowImport = False,
) -> None:
    """Write the detector as one graph for other programs: logits, score, is_ood and p_value of a batch of any size.

    The file is compared with the network before it is put in place. ONNX needs `pip install 'salcli[onnx]'`.
    """
    from salcli.detector.export import BATCH_SIZES
    from salcli.detector.export import export as write
    from salcli.detector.predict import open_detector

    _, loaded = open_detector(
        detector, lambda note, _: say(note, "dim"), id_quantile=id_quantile, device="cpu", allow_import=allow_import
    )
    largest = write(loaded, out, to.value)
    say(
        f"wrote {out}: checked against the network with batches of {', '.join(map(str, BATCH_SIZES))}, "
        f"largest difference {largest:.1e}"
    )
