"""`salcli monitor`: batches of new samples beside the calibration sample, and an alarm that may be watched for ever.

Scores come from samples, or from files that `salcli predict` wrote. Higher = more OOD.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date, datetime
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from salcli.conformal.evidence import (
    DRIFT,
    FOUND,
    HINT,
    counts_above,
    drift_p_value,
    envelope,
    holm,
    p_values,
    share_of_outliers,
)
from salcli.conformal.stream import log_wealth, online_p_values
from salcli.data.folders import files_below
from salcli.data.sets import some_of
from salcli.data.vectors import ANY, Columns, cell_texts, check_columns, opened
from salcli.detector.detector import Detector
from salcli.detector.predict import FORMAT_OF_SUFFIX, Say, find_files, open_detector
from salcli.errors import SalError, as_text, printable
from salcli.progress import Progress, Silent, Task
from salcli.store.files import as_json, fingerprint, write_text

ALPHA = 0.01
LEAST = 20  # samples of a batch: fewer say nothing about a distribution
SOME_DRIFT = 0.05  # p-value of a hint of it
MOST = 0.5  # share of outliers: with more, they cannot be told from drift
SEED = 0  # of the smoothing: another seed for each run would be another chance of a false alarm
DAY, FILE = "day", "file"
AT_ONCE = 10_000  # rows of a file of predictions

Values = NDArray[np.float64]

# the verdict on a batch, and what it means
FOUND_SOME, CANNOT_TELL, NOTHING, MOVED = "found", "cannot tell", "nothing found", "drift"
HIGHER, FEW, EMPTY, NORMAL = "more ID-like", "too few", "empty", "baseline"
MEANING = {
    FOUND_SOME: "more scores are high than ID data have, while the ID-like ones are where they were: outliers",
    CANNOT_TELL: "more scores are high than usual, but that may be chance, or the ID data may have changed; look at "
    "some, or wait for more samples",
    MOVED: "the batch differs as a whole, also in its ID-like scores (another camera, other preprocessing, another "
    "season), so what is high need not be an outlier; calibrate on labeled samples of the new kind",
    HIGHER: "scores are lower than those of new ID data: easier samples, or samples that the detector was trained on",
    FEW: f"fewer than {LEAST} samples: no verdict",
}


@dataclass(frozen=True)
class Batch:
    """One batch beside the reference: the calibration sample, or the batches that were given as a baseline."""

    batch: str
    n: int
    unreadable: int
    flagged: int  # scores above the detector's threshold
    verdict: str = EMPTY
    pi: float | None = None  # estimated share of outliers with its 90% interval, where some are found
    pi_low: float | None = None  # certified: at least this share is outliers (95%)
    pi_high: float | None = None  # also where nothing is found: at most this share is outliers (95%)
    p_value: float | None = None  # of "there is no outlier"; this and drift are adjusted for the batches (Holm)
    drift: float | None = None  # p-value of "the ID-like half of the scores is where it was"
    log10_martingale: float = 0.0  # after this batch
    alarm: bool = False  # whether there has been an alarm up to the end of this batch


@dataclass(frozen=True)
class Alarm:
    """Where the martingale reached 1/α for the first time."""

    batch: str
    sample: int  # of the stream, counted from 1


@dataclass(frozen=True)
class Monitoring:
    """All batches in the order of the stream."""

    detector: str
    made_from: str  # fingerprint of the detector's file
    alpha: float
    threshold: float
    id_quantile: float
    n_reference: int
    is_exact: bool  # whether the chance of a false alarm is at most α: see Detector.is_exact
    batches: list[Batch]
    alarm: Alarm | None
    wealth: Values = field(repr=False)  # log10 of the martingale after each sample of the stream

    def write(self, path: Path) -> None:
        """As one JSON document, or with one line for each batch if the name ends in .jsonl."""
        rows = [asdict(batch) for batch in self.batches]
        about = as_json({name: one for name, one in asdict(self).items() if name not in ("batches", "wealth")})
        if is_lines(path):
            write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        else:
            write_text(path, json.dumps({**about, "batches": rows}, ensure_ascii=False, indent=1) + "\n")


def is_lines(path: Path) -> bool:
    return FORMAT_OF_SUFFIX.get(path.suffix.lower()) == "jsonl"


def check_outputs(out: Path | None, figure: Path | None) -> None:
    """Refuse names that would only fail after all the work."""
    for option, path, suffixes in (
        ("--out", out, (".json", ".jsonl", ".ndjson")),
        ("--figure", figure, (".png", ".svg")),
    ):
        if path is not None and path.suffix.lower() not in suffixes:
            raise SalError(f"{option} {path}: name it {' or '.join(suffixes[:2])}")
        if path is not None and path.is_dir():
            raise SalError(f"{path} is a folder; name a file in it")


def monitor(
    paths: Sequence[str],
    detector: Path | None = None,
    *,
    by: str = FILE,
    date_column: str | None = None,
    baseline: int = 0,
    alpha: float = ALPHA,
    columns: Columns = ANY,
    say: Say = lambda line, kind: None,
    progress: Progress | None = None,
    **options: Any,  # of Detector.load
) -> Monitoring:
    """Score all samples, or read their scores, and compare each batch and their whole stream with the reference.

    `by`: file (a batch for each path), day, or the name of a column. The first `baseline` batches are the reference
    instead of the calibration sample, for streams that have always had some outliers.
    """
    if not 0 < alpha < 1:
        raise SalError(f"--alpha must be greater than 0 and less than 1, got {alpha:g}; for example {ALPHA}")
    if date_column and by != DAY:
        raise SalError("--date names the column of dates for --by day; add that, or leave out --date")
    path, loaded = open_detector(detector, say, **options)
    reader, shown = _Reader(loaded, path, by, date_column, columns), progress or Silent()
    unit = loaded.takes.kind
    with shown.task("monitor", 0, unit) as task:
        for argument in paths:
            reader.read(argument, task)
    for failed, reason in reader.failed.items():
        say(f"cannot be used: {printable(failed)}: {reason}", "warning")
    scores = reader.batches()
    if not any(len(own) for own in scores.values()):
        raise SalError(f"there is nothing to monitor: no {unit} in {some_of([printable(path) for path in paths])}")
    if not 0 <= baseline < len(scores):
        raise SalError(
            f"--baseline {baseline}: there are {len(scores)} batches, and at least one must be left to compare"
        )
    return _monitored(loaded, path, scores, reader.unreadable, baseline, alpha, shown)


# --- statistics


def _monitored(
    loaded: Detector,
    path: Path,
    scores: dict[str, Values],
    unreadable: Counter[str],
    baseline: int,
    alpha: float,
    progress: Progress,
) -> Monitoring:
    names = [*scores]
    reference = loaded.calibration.astype(np.float64)
    if len(reference) == 0 and not baseline:
        raise SalError("this detector has no calibration data to compare with; use --baseline")
    if baseline:
        reference = np.concatenate([scores[name] for name in names[:baseline]])
        if len(reference) < LEAST:
            raise SalError(f"the baseline has {len(reference)} samples, and needs {LEAST}; take more batches")
    stream = np.concatenate([scores[name] for name in names[baseline:]])
    with progress.task("martingale", len(stream), "samples") as task:
        p = online_p_values(reference, stream, np.random.default_rng(SEED))
        wealth = log_wealth(p, task.advance)
    crossed = np.flatnonzero(wealth >= -math.log10(alpha))
    first = int(crossed[0]) + 1 if len(crossed) else math.inf
    judged = [name for name in names[baseline:] if len(scores[name]) >= LEAST]
    found: dict[str, dict[str, Any]] = {}
    with progress.task("compare", len(judged), "batches") as task:
        for name in judged:
            found[name] = judge(reference, scores[name])
            task.advance(1)
    verdicts = dict(zip(judged, verdicts_of([*found.values()]), strict=True))
    batches, end, alarm = [], 0, None
    for i, (name, own) in enumerate(scores.items()):
        row: dict[str, Any] = {"verdict": NORMAL if i < baseline else FEW if len(own) else EMPTY}
        if name in verdicts:
            row = _shown(found[name], verdicts[name])
        if i >= baseline:
            end += len(own)
            if alarm is None and end >= first:
                alarm = Alarm(as_text(name), int(first))
            row |= {"log10_martingale": float(wealth[end - 1]) if end else 0.0, "alarm": alarm is not None}
        flagged = int((own > loaded.threshold).sum())
        batches.append(Batch(as_text(name), len(own), unreadable[name], flagged, **row))
    return Monitoring(
        detector=as_text(path),
        made_from=fingerprint(path),
        alpha=alpha,
        threshold=loaded.threshold,
        id_quantile=loaded.id_quantile,
        n_reference=len(reference),
        is_exact=loaded.is_exact or baseline > 0,  # no method has learned from the baseline
        batches=batches,
        alarm=alarm,
        wealth=wealth,
    )


def judge(reference: Values, scores: Values) -> dict[str, float]:
    """The evidence in one batch, before p-values are adjusted for the number of batches."""
    limits, share = envelope(len(reference), len(scores)), share_of_outliers(reference, scores)
    return {
        "p_value": limits.p_value(counts_above(reference, scores, limits.ranks)),
        "drift": drift_p_value(reference, scores),
        "id_like": drift_p_value(scores, reference),
        "pi": share.value,
        "pi_low": share.low,
        "pi_high": share.high,
    }


def verdicts_of(found: Sequence[dict[str, float]]) -> list[str]:
    """The words in MEANING, or NOTHING, for all batches; adjusts their p-values by Holm's method.

    Drift moves the ID-like half of the scores as well, and outliers leave it where it was. A find counts only where
    there is no hint of drift, and where most samples are ID-like: else that half says little.
    """
    may_have_moved = [own["drift"] <= SOME_DRIFT or own["pi_high"] > MOST for own in found]
    for key in ("p_value", "drift", "id_like"):
        for own, adjusted in zip(found, holm(np.array([own[key] for own in found])), strict=True):
            own[key] = float(adjusted)
    words = []
    for own, has_hint in zip(found, may_have_moved, strict=True):
        if own["drift"] <= DRIFT:
            words.append(MOVED)
        elif own["p_value"] <= FOUND and not has_hint:
            words.append(FOUND_SOME)
        elif own["p_value"] <= HINT:
            words.append(CANNOT_TELL)
        else:
            words.append(HIGHER if own["id_like"] <= DRIFT else NOTHING)
    return words


def _shown(found: dict[str, float], verdict: str) -> dict[str, Any]:
    """No share of outliers where none is found, and no bound either where all ID data may have changed."""
    hidden = {"id_like"}
    if verdict != FOUND_SOME:
        hidden |= {"pi", "pi_low"}
    if verdict == MOVED:
        hidden |= {"pi_high"}
    return {"verdict": verdict} | {key: value for key, value in found.items() if key not in hidden}


# --- scores of a stream


class _Reader:
    """Collects the scores of each batch."""

    def __init__(self, detector: Detector, path: Path, by: str, date_column: str | None, columns: Columns) -> None:
        self.detector, self.path, self.by, self.columns = detector, path, by, columns
        self.column = date_column if by == DAY else None if by == FILE else by
        self.unreadable: Counter[str] = Counter()
        self.failed: dict[str, str] = {}  # the first samples that could not be used, and why
        self._parts: dict[str, list[Values]] = {}

    def batches(self) -> dict[str, Values]:
        """In the order of their first sample; days in their own order."""
        names = sorted(self._parts) if self.by == DAY else [*self._parts]
        return {name: np.concatenate([np.empty(0), *self._parts[name]]) for name in names}

    def read(self, argument: str, task: Task) -> None:
        if self.by == FILE:
            self._parts.setdefault(argument, [])
        written = self._written(argument)
        for file in written or ():
            self._read_predictions(file, argument, task)
        if written is None:
            for files, labels in self._labeled(find_files(self.detector.takes, [argument]), argument):
                for part in self.detector.scan(files, self.columns):
                    self._add(labels, part.names, part.failed, part.predictions.scores)
                    task.advance(len(part.names))

    def _written(self, argument: str) -> list[Path] | None:
        """Files of predictions; None where there are samples. An empty folder has neither: a day without data."""
        path = Path(argument)
        if not (path.is_dir() or path.is_file()):
            return None
        there = files_below(path) if path.is_dir() else [path]
        written = [file for file in there if file.suffix.lower() in FORMAT_OF_SUFFIX]
        return written if (written or not there) and not self.detector.takes.fitting(there) else None

    def _labeled(self, files: Sequence[Path], argument: str) -> Iterator[tuple[Sequence[Path], Iterator[str]]]:
        """Files that are read together, and the batch of each of their samples."""
        if self.detector.takes.kind == "vectors":
            for file in files:
                cells = _column(file, self.column) if self.column else None
                yield [file], self._labels(file, cells, argument)
        elif self.column:
            raise SalError(
                f"images have no column {self.column}; use --by day or --by file, or give the CSV that "
                "`salcli predict` wrote, with that column added"
            )
        elif self.by == DAY:
            files = sorted(files, key=lambda file: file.stat().st_mtime)
            yield files, map(_day_of, files)
        else:
            yield files, repeat(argument)

    def _labels(self, file: Path, cells: Sequence[str] | None, argument: str, start: int = 0) -> Iterator[str]:
        """The batch of each row, the first of which has the number `start`."""
        if cells is None:
            return repeat(_day_of(file) if self.by == DAY else argument)
        if self.by != DAY:
            return iter([cell or "(none)" for cell in cells])
        days = []
        for row, cell in enumerate(cells, start):
            try:
                days.append(_day(cell))
            except ValueError:
                raise SalError(
                    f"{printable(file)}, row {row}: {self.column} is {printable(cell) or 'empty'}, which is no date "
                    "such as 2026-11-18 or 2026-11-18T06:30"
                ) from None
        return iter(days)

    def _add(self, labels: Iterator[str], names: Sequence[str], failed: dict[int, str], scores: NDArray[Any]) -> None:
        """NaN is the most OOD of all scores."""
        of = list(islice(labels, len(names)))
        for i, reason in failed.items():
            self.unreadable[of[i]] += 1
            if len(self.failed) < 10:
                self.failed[names[i]] = reason
        known = np.array([label for i, label in enumerate(of) if i not in failed])
        exact = np.nan_to_num(scores.astype(np.float64), nan=math.inf, posinf=math.inf, neginf=-math.inf)
        for label in dict.fromkeys(of):
            self._parts.setdefault(label, []).append(exact[known == label])

    def _read_predictions(self, file: Path, argument: str, task: Task) -> None:
        """Scores that `salcli predict` wrote with the same detector: their p-values tell."""
        start = 0
        for rows in _rows(file):
            lacking = {"score", "p_value", *([self.column] if self.column else [])} - rows[0].keys()
            if lacking:
                raise SalError(
                    f"{printable(file)} has no column {', '.join(sorted(lacking))}; "
                    "give samples, or what `salcli predict` wrote"
                )
            failed = {i: str(row["error"]) for i, row in enumerate(rows) if row.get("error")}
            good = [row for i, row in enumerate(rows) if i not in failed]
            try:
                p = np.array([float(row["p_value"]) for row in good])
                # predict leaves out a score that is not finite; its p-value tells at which end it is
                ends = np.where(p < 0.5, math.inf, -math.inf)
                texts = [row.get("score") for row in good]
                scores = np.array([ends[i] if text in ("", None) else float(text) for i, text in enumerate(texts)])
            except (LookupError, TypeError, ValueError) as error:
                raise SalError(f"{printable(file)} holds a score or p-value that is no number: {error}") from None
            expected = p_values(self.detector.calibration, scores.astype(np.float32))
            wrong = np.flatnonzero(~(np.abs(p - expected) < 1e-9))
            if len(wrong):
                i = int(wrong[0])
                raise SalError(
                    f"{printable(file)} holds scores of another detector than {self.path}: to a score of "
                    f"{scores[i]:.6g} belongs the p-value {expected[i]:.6g}, not {p[i]:.6g}; predict the samples again "
                    "with this one"
                )
            cells = [str(row.get(self.column) or "") for row in rows] if self.column else None
            ids = [str(row.get("path") or row.get("id") or start + i) for i, row in enumerate(rows)]
            self._add(self._labels(file, cells, argument, start), ids, failed, scores.astype(np.float32))
            task.advance(len(rows))
            start += len(rows)


def _rows(file: Path) -> Iterator[list[dict[str, Any]]]:
    """Of a CSV or of JSON lines, some at once."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            lines = (json.loads(line) for line in opened if line.strip())
            rows = lines if is_lines(file) else csv.DictReader(opened, strict=True)
            while some := list(islice(rows, AT_ONCE)):
                if not all(isinstance(row, dict) for row in some):
                    raise ValueError("a line is no object")
                yield some
    except (ValueError, RecursionError, csv.Error) as error:  # also what is not UTF-8, or not JSON
        raise SalError(f"{printable(file)} cannot be read as {file.suffix}: {error}") from None


def _column(file: Path, name: str) -> tuple[str, ...]:
    """A column of a file of vectors, as text."""
    if file.suffix.lower() == ".npy":
        raise SalError(f"{printable(file)} has no columns; use --by file, or a .parquet or .npz file")
    with opened(file) as vectors:
        check_columns(file, (name,), vectors.names, "--by, --date")
        return cell_texts(vectors.cells(name))


def _day_of(file: Path) -> str:
    return date.fromtimestamp(file.stat().st_mtime).isoformat()


def _day(text: str) -> str:
    """Of a date, a time stamp, or numpy's and pyarrow's text for them."""
    try:
        return date.fromisoformat(text[:10]).isoformat()
    except ValueError:
        return datetime.fromisoformat(text).date().isoformat()
