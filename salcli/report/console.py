"""The terminal: consoles, progress, the house style of tables, and text that is safe to print."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table

from salcli.errors import escaped
from salcli.progress import is_main_process


class _Console(Console):
    """Control characters in names and labels are shown, not sent to the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escaped(segment.text), segment.style)


PLAIN_WIDTH = 100  # of output that goes to a file or a pipe
SECONDS_BETWEEN_LINES = 10.0

# of several processes, only the main one prints
console = _Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, soft_wrap=False, quiet=not is_main_process())
# for messages of a command whose standard output other programs read
side_console = _Console(width=None if sys.stderr.isatty() else PLAIN_WIDTH, stderr=True, quiet=not is_main_process())


def plain_table(title: str, *columns: str, n_left: int = 1, caption: Sequence[str] = ()) -> Table:
    """The house style: the first columns aligned left, numbers right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < n_left else "right")
    table.caption, table.caption_justify = "\n".join(caption) or None, "left"
    return table


class ConsoleProgress:
    """Progress bars with rate and time left; without a terminal, one line every 10 seconds.

    `seconds` is the time spent inside tasks: the work itself, without start-up and reading.
    """

    def __init__(self, to: Console | None = None) -> None:
        self.seconds = 0.0
        self._noted: set[str] = set()
        self._console = to or console

    @contextmanager
    def task(self, name: str, total: int, unit: str) -> Iterator["_Meter"]:
        started = time.monotonic()
        with self._shown(name, total, unit) as meter:
            yield meter
        self.seconds += time.monotonic() - started

    @contextmanager
    def _shown(self, name: str, total: int, unit: str) -> Iterator["_Meter"]:
        meter = _Meter(name, total, unit, self._console, self._noted)
        if not self._console.is_terminal:
            yield meter
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[share]:>4}"),
            TextColumn("{task.fields[rate]}", style="dim"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[values]}", style="cyan"),
        )
        with Progress(*columns, console=self._console) as bars:
            meter.bar = bars, bars.add_task(name, total=total or None, share="", rate="", values="")
            yield meter


class _Meter:
    def __init__(self, name: str, total: int, unit: str, to: Console, noted: set[str]) -> None:
        self._name, self._total, self._unit, self._console, self._noted = name, total, unit, to, noted
        self._done = self._skipped = 0
        self._values: dict[str, float] = {}
        self._started = self._last_line = time.monotonic()
        self.bar: tuple[Progress, TaskID] | None = None

    def advance(self, n: int, **values: float) -> None:
        """n more units are done; `values` are shown beside the rate."""
        self._done += n
        self._values |= values
        now = time.monotonic()
        rate = (self._done - self._skipped) / max(now - self._started, 1e-9)
        shown = " ".join(f"{name} {value:.4g}" for name, value in self._values.items())
        if self.bar:
            bars, task = self.bar
            bars.update(task, completed=self._done, share=self._share(), rate=self._amount(rate) + "/s", values=shown)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            left = f", {max(self._total - self._done, 0) / rate:.0f} s left" if self._total else ""
            self._console.print(f"{self._name}: {self._share()}, {self._amount(rate)}/s{left} {shown}", highlight=False)

    def skip(self, n: int) -> None:
        """n units were done by an earlier run: they do not count for the rate."""
        self._done += n
        self._skipped += n

    def note(self, text: str) -> None:
        """Once, whatever the number of experiments it holds for."""
        if text in self._noted:
            return
        self._noted.add(text)
        self._console.print(f"{self._name}: {text}", style="yellow", highlight=False, markup=False)

    def _share(self) -> str:
        """At most 100%: the total may be an estimate."""
        return f"{min(self._done / self._total, 1):.0%}" if self._total else self._amount(self._done)

    def _amount(self, n: float) -> str:
        return f"{n / 1e6:,.1f} MB" if self._unit == "bytes" else f"{n:,.0f} {self._unit}"
