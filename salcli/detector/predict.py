"""`salcli predict`: choose a detector, find samples, predict them, write rows. Printing is left to the command."""

import csv
import glob
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
from numpy.typing import NDArray

from salcli.conformal.evidence import certificate, false_discovery_cutoff
from salcli.data.folders import files_below
from salcli.data.sets import some_of
from salcli.data.vectors import ANY, Columns
from salcli.detector.detector import BATCH_SIZE, MADE_BY, Detector, Scanned, custom_code
from salcli.detector.images import ImageFormat
from salcli.detector.vectors import VectorFormat
from salcli.errors import MissingArtifactError, SalError, as_text, escaped, printable
from salcli.models.backbones import import_path
from salcli.models.custom import make_importable
from salcli.params.reading import lookup, read_yaml
from salcli.progress import Progress, Silent
from salcli.sal.metrics import ID_QUANTILE
from salcli.store.files import Found, atomic_path, read_header
from salcli.store.layout import DETECTOR, RUNS

COLUMNS = ("class", "probability", "score", "is_ood", "p_value", "error")  # after the path or the id
STANDARD_INPUT = "-"
FORMAT_OF_SUFFIX = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
MOST_LISTED = 10
PARAMS_YAML = Path("params.yaml")

Takes = ImageFormat | VectorFormat
Write = Callable[[Scanned], None]
Say = Callable[[str, Literal["note", "warning"]], None]


@dataclass
class Tally:
    """How many samples there were and how many are OOD, at which threshold or false discovery rate."""

    threshold: float
    id_quantile: float
    kind: str = "images"
    fdr: float | None = None
    n_samples: int = 0
    n_ood: int = 0
    certified: int = 0  # at least so many of them are outliers (95%); 0 where that is not known
    n_unreadable: int = 0
    unreadable: list[str] = field(default_factory=list)  # the first of them

    def add(self, part: Scanned) -> None:
        self.n_samples += len(part.predictions)
        self.n_ood += int(part.predictions.is_ood.sum())
        self.n_unreadable += len(part.failed)
        self.unreadable += [part.names[i] for i in list(part.failed)[: MOST_LISTED - len(self.unreadable)]]

    def __str__(self) -> str:
        share = f" ({self.n_ood / self.n_samples:.1%})" if self.n_samples else ""
        verb = "read" if self.kind == "images" else "used"
        unreadable = f", {self.n_unreadable:,} could not be {verb}" if self.n_unreadable else ""
        rule = f"OOD: scores above {self.threshold:.4g}, which keeps {self.id_quantile:.4g} of ID data"
        if self.fdr is not None:
            rule = f"on average at most {self.fdr:.4g} of those called OOD are ID (false discovery rate)"
        if self.certified:
            rule += f", and at least {self.certified:,} of the {self.n_ood:,} flagged are outliers (95%)"
        return f"{self.n_samples:,} {self.kind}, {self.n_ood:,} OOD{share}{unreadable}; {rule}"


def predict(
    paths: Sequence[str],
    detector: Path | None = None,
    *,
    out: Path | None = None,
    output_format: str = "csv",
    table: Write | None = None,
    null: bool = False,
    columns: Columns = ANY,
    id_quantile: float = ID_QUANTILE,
    fdr: float | None = None,
    batch_size: int = BATCH_SIZE,
    device: str = "auto",
    allow_import: bool = False,
    say: Say = lambda line, kind: None,
    progress: Progress | None = None,
) -> Tally:
    """Predict files, folders, patterns, or "-" for a list on standard input; write a row for each image or vector.

    Rows go to `out`, or to standard output as they come, as `output_format` says (see `choose_format`); rows of a
    table go to `table` instead. `say` receives the lines for people, except for the returned tally. With `fdr`, is_ood
    is decided when all p-values are known, and rows are written then.
    """
    if fdr is not None and id_quantile != ID_QUANTILE:
        raise SalError("--fdr and --id-quantile both decide what is OOD; use one of them")
    if out and out.is_dir():  # otherwise this would only show after all the work
        raise SalError(f"{out} is a folder; name a file in it")
    _, loaded = open_detector(
        detector, say, id_quantile=id_quantile, batch_size=batch_size, device=device, allow_import=allow_import
    )
    takes = loaded.takes
    if fdr is not None:
        loaded.check_fdr(fdr)
    elif loaded.too_few:
        say(loaded.too_few, "warning")
    listed = split_list(sys.stdin.buffer.read(), null=null) if STANDARD_INPUT in paths else []
    files = find_files(takes, paths, listed)
    tally = Tally(loaded.threshold, loaded.id_quantile, takes.kind, fdr)
    n_known = len(files) if takes.kind == "images" else 0
    with (
        _opened(out, output_format, table, takes.name_column) as write,
        (progress or Silent()).task("predict", n_known, takes.kind) as task,
        closing(loaded.scan(files, columns)) as parts,
    ):
        held: list[Scanned] = []
        for part in parts:
            if takes.kind == "images":
                for i, why in part.failed.items():
                    say(f"cannot be read: {printable(part.names[i])}: {why}", "warning")
            tally.add(part)
            held.append(part)
            while fdr is None and tally.n_samples and held:  # of errors alone, nothing is printed
                write(held.pop(0))
            task.advance(len(part.names))
        if tally.n_samples == 0 and takes.kind == "images":
            raise SalError(f"no image could be read, of {len(files):,} files; the lines above say why")
        if tally.n_samples == 0:
            reason = next(iter(held[0].failed.values()))
            raise SalError(f"none of {tally.n_unreadable:,} vectors can be used: {reason}")
        if fdr is not None:
            p, scores = (
                np.concatenate([getattr(part.predictions, name) for part in held]) for name in ("p_values", "scores")
            )
            cutoff = false_discovery_cutoff(p, fdr)
            tally.n_ood = int((p <= cutoff).sum())
            for part in held:
                write(replace(part, predictions=replace(part.predictions, is_ood=part.predictions.p_values <= cutoff)))
            if tally.n_ood and loaded.is_exact:
                tally.certified = int(certificate(loaded.calibration, scores)[tally.n_ood - 1])
            elif not tally.n_ood and (reason := loaded.too_few_for(fdr, len(p))):
                say(reason, "warning")
    if tally.n_unreadable and takes.kind == "vectors":
        rows = some_of(tally.unreadable)
        say(f"cannot be used: {tally.n_unreadable:,} vectors (rows {rows}); the column error says why", "warning")
    return tally


# --- which detector


def open_detector(given: Path | None, say: Say, *, allow_import: bool = False, **options: Any) -> tuple[Path, Detector]:
    """`Detector.load`, with custom code looked for in this folder and where params.yaml says.

    Importing it must be allowed, unless the detector is below runs/ and params.yaml here names the same code: then the
    stages of this project have imported it already.
    """
    path, note = choose_detector(given)
    custom = custom_code(read_header(Found(path, MADE_BY))) if path.is_file() else []
    custom = [name for name in custom if import_path(name)]
    if custom:
        params = read_yaml(PARAMS_YAML) if PARAMS_YAML.is_file() else {}
        keys = "model.backbone", "detector.method", "rivals", "encoders", "evaluate.methods"
        named = [lookup(params, key) for key in keys]
        used = {name for one in named for name in (one if isinstance(one, list) else [one])}
        if path.parts[0] == RUNS and used.issuperset(custom):
            allow_import = True
        if allow_import:
            make_importable(Path())
            make_importable(Path(str(lookup(params, "model.code") or "")).expanduser())
    with redirect_stdout(sys.stderr):  # custom networks may print, and predictions go to standard output
        loaded = Detector.load(path, allow_import=allow_import, **options)
    if note:
        say(note, "note")
    return path, loaded


def choose_detector(given: Path | None) -> tuple[Path, str]:
    """The path of the detector, and a note about the choice.

    In this order: the given one; detector.safetensors here; the one of the project's runs, with several seeds that of
    the first. Experiments that differ in more than the seed are not ours to choose from.
    """
    here, runs = Path(DETECTOR), Path(RUNS)
    if given is not None or here.is_file():
        return given or here, ""
    by_path = {path: path.relative_to(runs).parts for path in runs.rglob(DETECTOR)}  # SEED, experiment …, file
    found = sorted(by_path, key=lambda path: (len(by_path[path][0]), by_path[path]))  # seeds as numbers
    if not found:
        raise MissingArtifactError(
            f"there is no {DETECTOR} here and none below {RUNS}/; "
            f"make one with: {MADE_BY} (or dvc repro), or name a file with --detector"
        )
    if len({parts[1:] for parts in by_path.values()}) > 1:
        names = "".join(f"\n  --detector {path}" for path in found[:MOST_LISTED])
        more = f"\n  and {len(found) - MOST_LISTED} more" if len(found) > MOST_LISTED else ""
        raise SalError(f"there are {len(found)} detectors; choose one:{names}{more}")
    others = f", the first of {len(found)} seeds" if len(found) > 1 else ""
    return found[0], f"detector: {found[0]}{others}"


# --- which files


def find_files(takes: Takes, arguments: Iterable[str], listed: Iterable[str] = ()) -> tuple[Path, ...]:
    """All files in the order of the arguments. `listed` are the paths that "-" stands for.

    An image that is named is taken whatever its suffix is; a folder or a pattern brings in files with a fitting suffix.
    A listed image that does not exist is left to the reader of files: one entry must not stop all others.
    """
    found: list[Path] = []
    for argument in arguments:
        if argument == STANDARD_INPUT:
            for path in map(Path, listed):
                found += takes.fitting(files_below(path)) if _holds(path.is_dir) else [path]
        else:
            found += _files_of(argument, takes)
    if not found:
        raise SalError("there are no paths on standard input; give one on each line, or with --null after each NUL")
    return tuple(found)


def split_list(content: bytes, *, null: bool) -> list[str]:
    """The paths of a list. File names need not be valid text."""
    entries = content.split(b"\0") if null else [line.removesuffix(b"\r") for line in content.split(b"\n")]
    return [os.fsdecode(entry) for entry in entries if entry]


def _files_of(argument: str, takes: Takes) -> Sequence[Path]:
    """A path that exists is taken literally, even if its name looks like a pattern."""
    path, is_images = Path(argument), takes.kind == "images"
    suffixes = ".png, .jpg, .webp or the like" if is_images else ", ".join(takes.suffixes)
    if _holds(path.is_dir):
        in_folder = takes.fitting(files_below(path))
        if not in_folder:
            for file in files_below(path):
                takes.check_file(file)
            raise SalError(f"{printable(path)} holds no {takes.kind}: no file with {suffixes}")
        return in_folder
    if _holds(path.is_file):
        return [path]
    if _holds(path.exists):
        raise SalError(f"{printable(path)} is neither a file nor a folder")
    if not glob.has_magic(argument):
        raise SalError(f"{printable(path)} is not there")
    matches = map(Path, glob.iglob(argument, recursive=True))  # noqa: PTH207  # Path.glob takes no absolute patterns
    fitting = takes.fitting(match for match in matches if match.is_file())
    if not fitting:
        what = "image" if is_images else "file of vectors"
        raise SalError(f"no {what} matches {argument}: a pattern finds files with {suffixes}")
    # links that lead back up find the same folders again and again; keep the shortest path to each file
    shortest: dict[tuple[str, str], Path] = {}
    for match in sorted(fitting, key=lambda match: (len(match.parts), match.parts)):
        shortest.setdefault((os.path.realpath(match.parent), match.name), match)
    return sorted(shortest.values(), key=lambda match: match.parts)


def _holds(question: Callable[[], bool]) -> bool:
    """False where there is no answer: the name is too long, or it is in a folder that may not be read."""
    try:
        return question()
    except (OSError, ValueError):
        return False


# --- rows


def choose_format(wanted: str | None, out: Path | None) -> str:
    """csv, jsonl or table: as asked for, else by the suffix of `out`, else a table in a terminal and csv in a pipe."""
    if out is None:
        return wanted or ("table" if sys.stdout.isatty() else "csv")
    if wanted == "table":
        raise SalError("--format table is for people; write a file with --format csv or jsonl")
    if wanted is None and out.suffix.lower() not in FORMAT_OF_SUFFIX:
        raise SalError(f"--out {out}: name it .csv or .jsonl, or say which with --format")
    return wanted or FORMAT_OF_SUFFIX[out.suffix.lower()]


@contextmanager
def _opened(out: Path | None, output_format: str, table: Write | None, name_column: str) -> Iterator[Write]:
    if output_format == "table" and table:
        yield table
    elif out:
        with atomic_path(out) as partial, partial.open("w", encoding="utf-8", newline="") as file:
            yield row_writer(file, output_format, name_column)
    else:
        # UTF-8 whatever the locale says; detached, so that standard output stays open
        file = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", newline="")
        try:
            yield row_writer(file, output_format, name_column)
        finally:
            file.detach()


def row_writer(file: TextIO, output_format: str, name_column: str = "path") -> Write:
    """A function that writes one row for each sample: of one that could not be read, only its name and the error.

    csv: with a header, quoted so that names with commas, quotes and newlines can be read back. jsonl: one object on
    each line, null for missing values.
    """
    table, columns = csv.writer(file, lineterminator="\n"), (name_column, *COLUMNS)
    header = [columns]

    def write(part: Scanned) -> None:
        if output_format == "csv":
            table.writerows(header)
            header.clear()
            table.writerows(map(_cells, rows(part)))
        else:
            for row in rows(part):
                file.write(json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False) + "\n")
        file.flush()  # for the program at the other end of a pipe

    return write


def _cells(row: tuple[Any, ...]) -> list[Any]:
    """Of a CSV file: names must not move the cursor of who looks at it."""
    text = [str(value).lower() if isinstance(value, bool) else value for value in row]
    return [escaped(value) if isinstance(value, str) else value for value in text]


def rows(part: Scanned) -> Iterator[tuple[Any, ...]]:
    """The name and the values of COLUMNS for each sample, in plain Python types; None for missing values."""
    found, names = part.predictions, {name: as_text(name) for name in set(part.predictions.classes)}
    good = zip(  # by columns, since there may be millions of rows
        [names[name] for name in found.classes],
        _shortest(found.probabilities),
        _shortest(found.scores),
        found.is_ood.tolist(),
        found.p_values.tolist(),
        strict=True,
    )
    for i, name in enumerate(part.names):
        if i in part.failed:
            yield as_text(name), None, None, None, None, None, part.failed[i]
        else:
            yield as_text(name), *next(good), None


def _shortest(values: NDArray[np.float32]) -> list[float | None]:
    """Each as the float with the fewest digits that is the same float32; None for what JSON has no number for."""
    finite = np.isfinite(values).tolist()
    return [float(text) if known else None for text, known in zip(values.astype(str).tolist(), finite, strict=True)]
