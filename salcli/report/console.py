"""Consoles, tables in every format and progress: text that is safe to print, in one style."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from salcli.errors import escaped
from salcli.progress import is_main_process


class _Console(Console):
    """Control characters in names and labels are shown, not sent to the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escaped(segment.text), segment.style)


PLAIN_WIDTH = 100  # of output that goes to a file or a pipe
SECONDS_BETWEEN_LINES = 10.0

MATH = {"↓": r"\downarrow", "↑": r"\uparrow", "±": r"\pm", "Δ": r"\Delta", "−": "-", "π": r"\pi", "ζ": r"\zeta"}
LATEX = str.maketrans(
    {symbol: f"${command}$" for symbol, command in MATH.items()}
    | {symbol: f"\\{symbol}" for symbol in "_&%#"}
    | {"–": "--", "\n": " "}
)

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


def records_table(
    title: str, records: Sequence[Mapping[str, str | Text]], n_left: int = 1, caption: Sequence[str] = ()
) -> Table:
    """One row for each record; its keys, the same in each, are the columns."""
    table = plain_table(title, *(records[0] if records else ()), n_left=n_left, caption=caption)
    for record in records:
        table.add_row(*record.values())
    return table


def shortened(text: str, width: int) -> str:
    """The end of a long name: files in the same folder differ there."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


def first_few(names: Sequence[str], n: int) -> str:
    return ", ".join(names[:n]) + (", …" if len(names) > n else "")


@dataclass(frozen=True)
class Cell:
    text: str
    is_bold: bool = False
    colour: str = ""  # in the terminal


@dataclass(frozen=True)
class Grid:
    """A table of text in sections; the first cell of each row names its section."""

    title: str
    header: list[str]
    sections: list[list[list[Cell]]]  # section → row → cell
    notes: list[str]
    n_left: int = 2  # columns that are aligned left
    short_header: list[str] | None = None  # for the terminal, where the full one is too wide
    has_headings: bool = False  # in the terminal, sections are named in lines of their own: more room for names of rows

    def rich(self) -> RenderableType:
        n_first = int(self.has_headings)
        header, n_left = (self.short_header or self.header)[n_first:], self.n_left - n_first
        table = plain_table(self.title, *header, n_left=n_left, caption=self.notes)
        for column in table.columns[n_left:]:
            column.no_wrap = True
        for section in self.sections:
            if table.row_count:
                table.add_section()
            if self.has_headings:
                table.add_row(Text(section[0][0].text, "bold"))
            for i, (first, *others) in enumerate(section):
                cells = others if self.has_headings else [Cell("") if i else first, *others]
                table.add_row(*(Text.assemble((cell.text, "bold" if cell.is_bold else cell.colour)) for cell in cells))
        return table

    def markdown(self) -> str:
        lines = [self.header, ["---"] * self.n_left + ["---:"] * (len(self.header) - self.n_left)]
        for row in (row for section in self.sections for row in section):
            texts = [cell.text.replace("\n", " ").replace("|", r"\|") for cell in row]
            lines.append([f"**{text}**" if cell.is_bold else text for text, cell in zip(texts, row, strict=True)])
        return "\n".join([f"**{self.title}**", "", *(f"| {' | '.join(line)} |" for line in lines), "", *self.notes])

    def latex(self) -> str:
        """With booktabs."""
        blocks = [[[name.translate(LATEX) for name in self.header]]]
        blocks += [
            [["" if i else _latex(row[0]), *map(_latex, row[1:])] for i, row in enumerate(section)]
            for section in self.sections
        ]
        body = "\n\\midrule\n".join("\n".join(" & ".join(row) + r" \\" for row in block) for block in blocks)
        columns = "l" * self.n_left + "r" * (len(self.header) - self.n_left)
        notes = "\n".join(f"% {note}" for note in (self.title, *self.notes))
        return f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n{body}\n\\bottomrule\n\\end{{tabular}}\n{notes}"


def _latex(cell: Cell) -> str:
    text = cell.text.translate(LATEX)
    return rf"\textbf{{{text}}}" if cell.is_bold else text


class ConsoleProgress:
    """Progress bars with rate and time left; without a terminal, one line every 10 seconds.

    `seconds` is the time spent inside tasks: the work itself, without start-up and reading.
    """

    def __init__(self, to: Console | None = None) -> None:
        self.seconds = 0.0
        self._console = to or console

    @contextmanager
    def task(self, name: str, total: int, unit: str) -> Iterator["_Meter"]:
        started, columns = (
            time.monotonic(),
            (
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[share]:>4}"),
                TextColumn("{task.fields[rate]}", style="dim"),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[values]}", style="cyan"),
            ),
        )
        bars = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        with bars:
            bar = bars.add_task(name, total=total or None, share="", rate="", values="")
            yield _Meter(name, total, unit, self._console, partial(bars.update, bar))
        self.seconds += time.monotonic() - started


class _Meter:
    def __init__(self, name: str, total: int, unit: str, to: Console, update: Callable[..., None]) -> None:
        self._name, self._total, self._unit, self._console, self._update = name, total, unit, to, update
        self._done = self._skipped = 0
        self._values: dict[str, float] = {}
        self._started = self._last_line = time.monotonic()

    def advance(self, n: int, **values: float) -> None:
        """n more units are done; `values` are shown beside the rate."""
        self._done += n
        self._values |= values
        now = time.monotonic()
        rate = (self._done - self._skipped) / max(now - self._started, 1e-9)
        shown = " ".join(f"{name} {value:.4g}" for name, value in self._values.items())
        # at most 100%: the total may be an estimate
        share = f"{min(self._done / self._total, 1):.0%}" if self._total else self._amount(self._done)
        if self._console.is_terminal:
            self._update(completed=self._done, share=share, rate=self._amount(rate) + "/s", values=shown)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            left = f", {max(self._total - self._done, 0) / rate:.0f} s left" if self._total else ""
            self._console.print(f"{self._name}: {share}, {self._amount(rate)}/s{left} {shown}", highlight=False)

    def skip(self, n: int) -> None:
        """n units were done by an earlier run: they do not count for the rate."""
        self._done += n
        self._skipped += n

    def note(self, text: str) -> None:
        self._console.print(f"{self._name}: {text}", style="yellow", highlight=False, markup=False)

    def _amount(self, n: float) -> str:
        return f"{n / 1e6:,.1f} MB" if self._unit == "bytes" else f"{n:,.0f} {self._unit}"
