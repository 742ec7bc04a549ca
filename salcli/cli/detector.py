"""Commands around the detector: make it, use it, export it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from salcli.cli.options import PARAMS_YAML, Assignments, Device, OodSets, ParamsFile, Scratch, Seeds
from salcli.errors import UsageMistakeError

SOME_ARE_OOD = 3
SUFFIXES = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}

DetectorFile = Annotated[
    Path | None,
    typer.Option(
        "--detector", help="The detector.", show_default="detector.safetensors here, or that of the project's runs"
    ),
]
IdQuantile = Annotated[
    float, typer.Option("--id-quantile", help="Share of ID data to keep: what scores below its threshold is OOD.")
]
AllowImport = Annotated[
    bool,
    typer.Option("--allow-import", help="Where the network is somebody's own, import the module that the file names."),
]


class Format(StrEnum):
    """How predictions are written."""

    table = "table"
    csv = "csv"
    jsonl = "jsonl"


class Target(StrEnum):
    """What a detector is exported to."""

    onnx = "onnx"
    torch_export = "torch-export"


def detector(
    params: ParamsFile = PARAMS_YAML,
    ood: OodSets = None,
    seed: Seeds = None,
    device: Device = None,
    scratch: Scratch = False,
    assignments: Assignments = None,
) -> None:
    """Put SAL's OOD classifier and its calibration scores into one file, for `predict` and `export`."""
    import os
    from shlex import quote

    from salcli.cli.session import Session
    from salcli.reporting.console import console
    from salcli.reporting.stage_tables import detector_table
    from salcli.stages import detector as stage

    session = Session.open(
        params, assignments, {"device": device}, reads=("data.id",), ood=ood, seed=seed, scratch=scratch
    )
    done = [
        stage.run(session.workspace, session.params, *experiment, session.progress)
        for experiment in session.experiments()
    ]
    console.print(detector_table(done))
    written = [path for result in done for path in result.written]
    session.finish(written, "")
    if "DVC_STAGE" not in os.environ:
        example = f"salcli predict --detector {quote(str(written[0]))} FOLDER"
        console.print(f"next: {example}", style="dim", highlight=False, markup=False, soft_wrap=True)


def predict(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH…",
            help="Image files, folders (whole trees), quoted patterns such as 'new/**/*.jpg', "
            "or - for a list of paths on standard input.",
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
    fail_on_ood: Annotated[bool, typer.Option("--fail-on-ood", help="Exit with code 3 if any image is OOD.")] = False,
    null: Annotated[bool, typer.Option("--null", "-0", help="Paths on standard input end with NUL.")] = False,
    batch_size: Annotated[int, typer.Option(help="Images in a pass.")] = 256,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    allow_import: AllowImport = False,
) -> None:
    """Say of each image: its class, its OOD score, whether it is OOD, and a p-value.

    Exit code 0, or 3 with --fail-on-ood if any image is OOD, or 2 if nothing could be done.
    """
    import sys

    from salcli.cli.prediction import Prediction
    from salcli.detector.choose import choose_detector
    from salcli.detector.find_images import LIST, find_images, split_list

    chosen_format = _format(output_format, out)
    chosen, note = choose_detector(detector, Path())
    listed = split_list(sys.stdin.buffer.read(), null=null) if LIST in paths else []
    prediction = Prediction(find_images(paths, listed), chosen, note)
    tally = prediction.run(
        out,
        chosen_format,
        id_quantile=id_quantile,
        device=device,
        batch_size=batch_size,
        allow_import=_may_import(chosen, asked=allow_import),
    )
    if fail_on_ood and tally.n_ood:
        raise typer.Exit(SOME_ARE_OOD)


def _format(wanted: Format | None, out: Path | None) -> Format:
    import sys

    if out is None:
        return wanted or (Format.table if sys.stdout.isatty() else Format.csv)
    if wanted is Format.table:
        raise UsageMistakeError("--format table is for people; write a file with --format csv or jsonl")
    if wanted is None and out.suffix.lower() not in SUFFIXES:
        raise UsageMistakeError(f"--out {out}: name it .csv or .jsonl, or say which with --format")
    return wanted or Format(SUFFIXES[out.suffix.lower()])


def _may_import(chosen: Path, *, asked: bool) -> bool:
    """Whether a module of somebody's own may be imported; if so, it is looked for here and where params.yaml says.

    Not only where that is asked for: a detector from the runs of this project, whose params.yaml names the same
    network, was made by a command that imported it.
    """
    from salcli.artifacts.checkpoint import read_header
    from salcli.artifacts.layout import RUNS, Found
    from salcli.detector.detector import MADE_BY
    from salcli.models.import_check import own_code
    from salcli.models.own_code import make_importable
    from salcli.params_file import lookup, read_yaml

    if not chosen.is_file():
        return asked  # whoever loads it will say so
    module = own_code(str(read_header(Found(chosen, MADE_BY)).spec.get("backbone")))
    if module is None:
        return asked
    params = read_yaml(PARAMS_YAML) if PARAMS_YAML.is_file() else {}
    is_allowed = asked or (chosen.parts[0] == RUNS and lookup(params, "model.backbone") == module)
    if is_allowed:
        make_importable(Path())
        make_importable(Path(str(lookup(params, "model.code") or "")).expanduser())
    return is_allowed


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
    from salcli.detector.choose import choose_detector
    from salcli.reporting.console import console

    chosen, note = choose_detector(detector, Path())
    if note:
        console.print(note, style="dim", highlight=False, markup=False, soft_wrap=True)
    from salcli.detector.detector import Detector
    from salcli.detector.export import export as write

    loaded = Detector.load(
        chosen, id_quantile=id_quantile, device="cpu", allow_import=_may_import(chosen, asked=allow_import)
    )
    done = write(loaded, out, to.value)
    console.print(
        f"wrote {out}: checked against the network with batches of {', '.join(map(str, done.batch_sizes))}, "
        f"largest difference {done.largest_difference:.1e}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
