"""Progress bars with rate and time left; plain lines where nobody watches a terminal."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from salcli.reporting.console import console

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

SECONDS_BETWEEN_LINES = 10.0


class ConsoleProgress:
    """Shows tasks on the console, and knows how long all of them took: the work, without start-up and reading.

    Another console is for commands whose output other programs read.
    """

    def __init__(self, to: Console | None = None) -> None:
        self.seconds = 0.0
        self._console = to or console

    @contextmanager
    def task(self, name: str, total: int, unit: str) -> Iterator[_Meter]:
        """Begin a task of `total` units."""
        started = time.monotonic()
        with self._shown(name, total, unit) as meter:
            yield meter
        self.seconds += time.monotonic() - started

    @contextmanager
    def _shown(self, name: str, total: int, unit: str) -> Iterator[_Meter]:
        meter = _Meter(name, total, unit, self._console)
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
            meter.attach(bars, bars.add_task(name, total=total or None, share="", rate="", values=""))
            yield meter


class _Meter:
    """Counts what is done, and shows it."""

    def __init__(self, name: str, total: int, unit: str, to: Console) -> None:
        self._name, self._total, self._unit, self._console = name, total, unit, to
        self._done = self._skipped = 0
        self._values: dict[str, float] = {}
        self._started = self._last_line = time.monotonic()
        self._bar: tuple[Progress, TaskID] | None = None

    def attach(self, bars: Progress, task: TaskID) -> None:
        """Show a bar from now on."""
        self._bar = bars, task

    def advance(self, n: int, **values: float) -> None:
        """n more units are done."""
        self._done += n
        self._values |= values
        now = time.monotonic()
        rate = (self._done - self._skipped) / max(now - self._started, 1e-9)
        shown = " ".join(f"{name} {value:.4g}" for name, value in self._values.items())
        if self._bar:
            bars, task = self._bar
            bars.update(task, completed=self._done, share=self._share(), rate=self._amount(rate) + "/s", values=shown)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            left = f", {max(self._total - self._done, 0) / rate:.0f} s left" if self._total else ""
            self._console.print(f"{self._name}: {self._share()}, {self._amount(rate)}/s{left} {shown}", highlight=False)

    def skip(self, n: int) -> None:
        """n units were done by an earlier run."""
        self._done += n
        self._skipped += n

    def note(self, text: str) -> None:
        """A line of its own."""
        self._console.print(f"{self._name}: {text}", style="yellow", highlight=False, markup=False)

    def _share(self) -> str:
        """How much is done: of the whole where it is known, and never more than that, should it be a guess."""
        return f"{min(self._done / self._total, 1):.0%}" if self._total else self._amount(self._done)

    def _amount(self, n: float) -> str:
        return f"{n / 1e6:,.1f} MB" if self._unit == "bytes" else f"{n:,.0f} {self._unit}"
