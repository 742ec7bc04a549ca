"""`salcli monitor`: batches of new samples beside the calibration sample, and an alarm that may be watched for ever.

Scores come from samples, or from files that `salcli predict` wrote. Here as in a detector, higher = more ID-like.
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

from salcli.data.folders import files_below
from salcli.data.sets import some_of
from salcli.data.vectors import ANY, Columns, cell_texts, check_columns, opened
from salcli.detector.decisions import holm, log_wealth, online_p_values, p_values
from salcli.detector.detector import Detector
from salcli.detector.predict import FORMAT_OF_SUFFIX, Say, find_files, open_detector
from salcli.errors import DataError, StorageError, UsageMistakeError, as_text, printable
from salcli.progress import Progress, Silent, Task
from salcli.sal.metrics import is_below
from salcli.sal.outlier_share import DRIFT, drift_of, share_of_outliers
from salcli.store.files import fingerprint, write_text

ALPHA = 0.01
LEAST = 20  # samples of a batch: fewer say nothing about a distribution
N_RESAMPLES = 200  # of the bootstrap: a 90% interval of π̂
SOME_DRIFT = 2.0  # standard errors; beyond DRIFT there is no doubt
SEED = 0  # of the smoothing: another seed for each run would be another chance of a false alarm
DAY, FILE = "day", "file"

Values = NDArray[np.float64]

# What a batch may look like, and what that means.
EXPECTED, OUTLIERS, EITHER, MOVED = "as expected", "outliers", "outliers or drift", "drift"
HIGHER, OTHER, FEW, EMPTY, NORMAL = "more ID-like", "other scores", "too few", "empty", "baseline"
MEANING = {
    OUTLIERS: "more scores are low than ID data have, while the others are where they were",
    MOVED: "all scores have become lower, also the ID-like ones: the ID data have changed (another camera, other "
    "preprocessing, another season), and what is low need not be an outlier",
    EITHER: "more scores are low than ID data have; these samples do not tell whether some are outliers or all ID data "
    "have changed",
    HIGHER: "scores are higher than those of new ID data: easier samples, or samples that the detector was trained on",
    OTHER: "the scores are distributed differently, but neither lower nor higher as a whole",
    FEW: f"fewer than {LEAST} samples: no estimate",
}


@dataclass(frozen=True)
class Batch:
    """One batch beside the reference: the calibration sample, or the batches that were given as a baseline."""

    batch: str
    n: int
    unreadable: int
    flagged: int  # scores below the detector's threshold
    pi: float | None = None  # estimated share of outliers, with its 90% interval
    pi_low: float | None = None
    pi_high: float | None = None
    distance: float | None = None  # Kolmogorov–Smirnov
    p_value: float | None = None  # of that test, adjusted for the number of batches (Holm)
    p_flagged: float | None = None  # of so many flagged samples, adjusted likewise
    p_tail: float | None = None  # of so many after the medians are aligned, not adjusted
    drift: float | None = None  # how far the ID-like half of the scores has moved, in standard errors
    looks_like: str = EMPTY
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
    batches: list[Batch]
    alarm: Alarm | None
    wealth: Values = field(repr=False)  # log10 of the martingale after each sample of the stream

    def write(self, path: Path) -> None:
        """As one JSON document, or with one line for each batch if the name ends in .jsonl."""
        rows = [asdict(batch) for batch in self.batches]
        for row in rows:  # JSON has no infinity
            row["drift"] = row["drift"] if math.isfinite(row["drift"] or 0) else None
        about = {name: value for name, value in asdict(self).items() if name not in ("batches", "wealth")}
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
            raise UsageMistakeError(f"{option} {path}: name it {' or '.join(suffixes[:2])}")
        if path is not None and path.is_dir():
            raise StorageError(f"{path} is a folder; name a file in it")


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
        raise UsageMistakeError(f"--alpha must be greater than 0 and less than 1, got {alpha:g}; for example {ALPHA}")
    if date_column and by != DAY:
        raise UsageMistakeError("--date names the column of dates for --by day; add that, or leave out --date")
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
        raise DataError(f"there is nothing to monitor: no {unit} in {some_of([printable(path) for path in paths])}")
    if not 0 <= baseline < len(scores):
        raise UsageMistakeError(
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
        raise DataError("this detector has no calibration data to compare with; use --baseline")
    if baseline:
        reference = np.concatenate([scores[name] for name in names[:baseline]])
        if len(reference) < LEAST:
            raise DataError(f"the baseline has {len(reference)} samples, and needs {LEAST}; take more batches")
    stream = np.concatenate([scores[name] for name in names[baseline:]])
    with progress.task("martingale", len(stream), "samples") as task:
        p = online_p_values(reference, stream, np.random.default_rng(SEED))
        wealth = log_wealth(p, task.advance)
    crossed = np.flatnonzero(wealth >= -math.log10(alpha))
    first = int(crossed[0]) + 1 if len(crossed) else math.inf
    found: dict[str, dict[str, Any]] = {}
    with progress.task("compare", len(names) - baseline, "batches") as task:
        for name in names[baseline:]:
            found[name] = judge_batch(reference, scores[name], loaded.threshold)
            task.advance(1)
    for key in ("p_value", "p_flagged"):
        tested = [one for one in found.values() if key in one]
        for one, adjusted in zip(tested, holm(np.array([one[key] for one in tested])), strict=True):
            one[key] = float(adjusted)
    batches, end, alarm = [], 0, None
    for name, own in scores.items():
        row: dict[str, Any] = {"looks_like": NORMAL}
        if name in found:
            row = found[name] | {"looks_like": looks_like(len(own), found[name], alpha)}
            if row["looks_like"] == MOVED:  # π̂ would count changed ID data as outliers
                row |= {"pi": None, "pi_low": None, "pi_high": None}
            end += len(own)
            if alarm is None and end >= first:
                alarm = Alarm(as_text(name), int(first))
            row |= {"log10_martingale": float(wealth[end - 1]) if end else 0.0, "alarm": alarm is not None}
        batches.append(Batch(as_text(name), len(own), unreadable[name], _n_flagged(own, loaded.threshold), **row))
    return Monitoring(
        detector=as_text(path),
        made_from=fingerprint(path),
        alpha=alpha,
        threshold=loaded.threshold,
        id_quantile=loaded.id_quantile,
        n_reference=len(reference),
        batches=batches,
        alarm=alarm,
        wealth=wealth,
    )


def judge_batch(reference: Values, scores: Values, threshold: float) -> dict[str, float]:
    """What one batch says, before p-values are adjusted. A batch that is too small has only its test."""
    from scipy.stats import betabinom, ks_2samp

    n, m = len(reference), len(scores)
    if m == 0:
        return {}
    # exact where that is fast: the asymptotic p-value is good from some dozens of samples on
    tested = ks_2samp(reference, scores, method="exact" if m < 100 and n < 5000 else "asymp")
    below = _n_flagged(reference, threshold)
    # the chance that a new ID sample is below the k-th smallest of n scores has the distribution Beta(k, n + 1 − k)
    n_flagged = _n_flagged(scores, threshold)
    n_tail = _n_flagged(scores + (np.median(reference) - np.median(scores)), threshold)
    p_flagged, p_tail = (float(betabinom.sf(k - 1, m, below + 1, max(n - below, 1))) for k in (n_flagged, n_tail))
    found = {"distance": float(tested.statistic), "p_value": float(tested.pvalue), "p_flagged": p_flagged}
    if m < LEAST:
        return found
    pi, low, high = share_of_outliers(reference, scores, N_RESAMPLES)
    drift = drift_of(reference, scores)
    return {**found, "p_tail": p_tail, "pi": pi, "pi_low": low, "pi_high": high, "drift": drift}


def looks_like(n: int, found: dict[str, float], alpha: float) -> str:
    """One of the words in MEANING.

    Drift moves all scores, so the ID-like half moves, too, and after the medians are aligned the low tail is what it
    was. Outliers leave the ID-like half where it was, and make the tail heavier however it is aligned. Both tests need
    some hundred samples; where they do not agree, the word is "outliers or drift".
    """
    if n < LEAST:
        return FEW if n else EMPTY
    has_more_low, differs = found["p_flagged"] < alpha, found["p_value"] < alpha
    if not (has_more_low or differs):
        return EXPECTED
    drift, has_tail = found["drift"], found["p_tail"] < alpha
    if drift > DRIFT or (drift > SOME_DRIFT and has_more_low and not has_tail):
        return EITHER if math.isinf(drift) else MOVED
    if has_more_low:
        return OUTLIERS if has_tail and drift < SOME_DRIFT else EITHER
    return HIGHER if drift < -SOME_DRIFT else OTHER


def _n_flagged(scores: Values, threshold: float) -> int:
    return int(is_below(scores, threshold).sum())


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
            raise UsageMistakeError(
                f"images have no column {self.column}; use --by day or --by file, or give the CSV that "
                "`salcli predict` wrote, with that column added"
            )
        elif self.by == DAY:
            files = sorted(files, key=lambda file: file.stat().st_mtime)
            yield files, map(_day_of, files)
        else:
            yield files, repeat(argument)

    def _labels(self, file: Path, cells: Sequence[str] | None, argument: str) -> Iterator[str]:
        """The batch of each row."""
        if cells is None:
            return repeat(_day_of(file) if self.by == DAY else argument)
        if self.by != DAY:
            return iter([cell or "(none)" for cell in cells])
        days = []
        for row, cell in enumerate(cells):
            try:
                days.append(_day(cell))
            except ValueError:
                raise DataError(
                    f"{printable(file)}, row {row}: {self.column} is {printable(cell) or 'empty'}, which is no date "
                    "such as 2026-11-18 or 2026-11-18T06:30"
                ) from None
        return iter(days)

    def _add(self, labels: Iterator[str], names: Sequence[str], failed: dict[int, str], scores: NDArray[Any]) -> None:
        """NaN is the least ID-like of all scores."""
        of = list(islice(labels, len(names)))
        for i, reason in failed.items():
            self.unreadable[of[i]] += 1
            if len(self.failed) < 10:
                self.failed[names[i]] = reason
        known = np.array([label for i, label in enumerate(of) if i not in failed])
        exact = np.nan_to_num(scores.astype(np.float64), nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        for label in dict.fromkeys(of):
            self._parts.setdefault(label, []).append(exact[known == label])

    def _read_predictions(self, file: Path, argument: str, task: Task) -> None:
        """Scores that `salcli predict` wrote with the same detector: their p-values tell."""
        rows, names = _rows(file)
        lacking = {"score", "p_value", *([self.column] if self.column else [])} - names
        if lacking and rows:
            raise DataError(
                f"{printable(file)} has no column {', '.join(sorted(lacking))}; "
                "give samples, or what `salcli predict` wrote"
            )
        failed = {i: str(row["error"]) for i, row in enumerate(rows) if row.get("error")}
        good = [row for i, row in enumerate(rows) if i not in failed]
        try:
            p = np.array([float(row["p_value"]) for row in good])
            # predict leaves out a score that is not finite; its p-value tells at which end it is
            none = np.where(p < 0.5, -math.inf, math.inf)
            texts = [row["score"] for row in good]
            scores = np.array([none[i] if text in ("", None) else float(text) for i, text in enumerate(texts)])
        except (TypeError, ValueError) as error:
            raise DataError(f"{printable(file)} holds a score or p-value that is no number: {error}") from None
        expected = p_values(self.detector.calibration, scores.astype(np.float32))
        wrong = np.flatnonzero(~(np.abs(p - expected) < 1e-9))
        if len(wrong):
            i = int(wrong[0])
            raise DataError(
                f"{printable(file)} holds scores of another detector than {self.path}: to a score of {scores[i]:.6g} "
                f"belongs the p-value {expected[i]:.6g}, not {p[i]:.6g}; predict the samples again with this one"
            )
        cells = [str(row[self.column] or "") for row in rows] if self.column else None
        ids = [str(row.get("path") or row.get("id") or i) for i, row in enumerate(rows)]
        self._add(self._labels(file, cells, argument), ids, failed, scores.astype(np.float32))
        task.advance(len(rows))


def _rows(file: Path) -> tuple[list[dict[str, Any]], set[str]]:
    """Of a CSV or of JSON lines, and the names of their columns."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            if is_lines(file):
                rows = [json.loads(line) for line in opened if line.strip()]
                if not all(isinstance(row, dict) for row in rows):
                    raise ValueError("a line is no object")
                return rows, set(rows[0]) if rows else set()
            reader = csv.DictReader(opened, strict=True)
            return list(reader), set(reader.fieldnames or ())
    except (ValueError, RecursionError, csv.Error) as error:  # also what is not UTF-8, or not JSON
        raise DataError(f"{printable(file)} cannot be read as {file.suffix}: {error}") from None


def _column(file: Path, name: str) -> tuple[str, ...]:
    """A column of a file of vectors, as text."""
    if file.suffix.lower() == ".npy":
        raise UsageMistakeError(f"{printable(file)} has no columns; use --by file, or a .parquet or .npz file")
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
