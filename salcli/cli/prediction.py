"""One run of `predict`: what it says, and where its rows go."""

from __future__ import annotations

import io
import sys
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from salcli.errors import DataError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from salcli.detector.detector import Detector
    from salcli.reporting.prediction_rows import Tally, Writer


@dataclass(frozen=True)
class Prediction:
    """Files to predict, and the detector to do it with."""

    files: tuple[Path, ...]
    detector: Path
    note: str  # how the detector was chosen

    def run(self, out: Path | None, output_format: str, **options: Any) -> Tally:
        """Load, predict, write. Rows go out as they come, all else to standard error."""
        from salcli.detector.detector import Detector

        if out and out.is_dir():  # or all the work would be done before this shows
            raise StorageError(f"{out} is a folder; name a file in it")
        _say(self.note, "dim")
        detector = Detector.load(self.detector, **options)
        with _writer(out, output_format) as writer:
            tally = self._predict(detector, writer)
        _say(f"{tally}; OOD: scores below {detector.threshold:.4g}, which keeps {detector.id_quantile:.4g} of ID data")
        _say(f"wrote {out}" if out else "", "dim")
        return tally

    def _predict(self, detector: Detector, writer: Writer) -> Tally:
        from salcli.reporting.console import side_console
        from salcli.reporting.prediction_rows import Tally, as_text, one_line
        from salcli.reporting.progress import ConsoleProgress

        tally = Tally()
        with (
            ConsoleProgress(side_console).task("predict", len(self.files), "images") as task,
            closing(detector.scan(self.files)) as parts,
        ):
            for part in parts:
                for place, reason in part.failed.items():
                    _say(f"cannot be read: {one_line(as_text(part.files[place]))}: {reason}", "yellow")
                writer.write(part)
                tally.add(part)
                task.advance(len(part.files))
        if tally.n_images == 0:
            raise DataError(f"no image could be read, of {len(self.files):,} files; the lines above say why")
        return tally


@contextmanager
def _writer(out: Path | None, output_format: str) -> Iterator[Writer]:
    from salcli.artifacts.atomic import atomic_path
    from salcli.reporting.console import console
    from salcli.reporting.prediction_rows import CsvWriter, JsonLinesWriter
    from salcli.reporting.prediction_table import TableOfLowest

    make = CsvWriter if output_format == "csv" else JsonLinesWriter
    if output_format == "table":
        table = TableOfLowest()
        yield table
        console.print(table.table(console.width))
    elif out:
        with atomic_path(out) as partial, partial.open("w", encoding="utf-8", newline="") as file:
            yield make(file)
    else:
        with _standard_output() as file:
            yield make(file)


@contextmanager
def _standard_output() -> Iterator[TextIO]:
    """In UTF-8 whatever the locale says, and not closed in the end."""
    file = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", newline="")
    try:
        yield file
    finally:
        file.detach()


def _say(line: str, style: str = "") -> None:
    from salcli.reporting.console import side_console

    if line:
        side_console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)
