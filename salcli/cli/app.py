"""The Typer application: its commands, and errors as people see them. Mistakes in options are reported by Typer."""

import atexit
import gc
import io
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, EIO, ELOOP, EMFILE, ENAMETOOLONG, ENOSPC, EROFS
from threading import Thread
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from salcli import __version__
from salcli.cli import prediction, projects, results, stages
from salcli.cli.session import OF_COMMAND
from salcli.errors import SalError, escaped
from salcli.progress import is_main_process, rank, world_size

BAD_INPUT, INTERRUPTED, CLOSED_PIPE, TERMINATED = 2, 130, 141, 143
ENDED = "{}; nothing half-written is left behind, run the same command again"
SECONDS_TO_END = 3.0  # after a signal, for what is being written
SECONDS_FOR_MAIN = 5.0  # in which the main process ends, and torchrun ends the others
# what is wrong with a disk or a path, not with salcli
OF_THE_SYSTEM = {EDQUOT, EFBIG, EIO, ELOOP, EMFILE, ENAMETOOLONG, ENOSPC, EROFS}
NO_MEMORY = re.compile("can't allocate memory|out of memory", re.IGNORECASE)


class _Terminated(BaseException):
    """SIGTERM."""


@contextmanager
def friendly_errors() -> Iterator[None]:
    """Turn what a user can fix into one message and an exit code. Everything else is a bug and shows its traceback."""
    try:
        yield
        sys.stdout.flush()  # a full disk is noticed here, not when Python ends
    except SalError as error:
        _fail(f"error: {error}", BAD_INPUT)
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
        _fail(f"error: {error.filename}: {error.strerror}; it should be a file that you may read", BAD_INPUT)
    except (BrokenPipeError, SystemExit) as error:  # salcli … | head; rich makes an exit of it
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        _discard_output()
        raise typer.Exit(CLOSED_PIPE) from None
    except OSError as error:
        if error.errno == ENOSPC and not error.filename:
            message = f"standard output cannot be written: {error.strerror}; make room, or send it elsewhere"
        elif error.errno in OF_THE_SYSTEM:
            message = f"{error.filename or 'a file'}: {error.strerror}; fix that and run the same command again"
        else:
            raise
        _fail(f"error: {message}", BAD_INPUT)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or NO_MEMORY.search(str(error)):
            reason = str(error).partition("\n")[0] or "more than there is"
            message = f"there is not enough memory ({reason}); use smaller images, batches or a smaller network"
        else:
            raise
        _fail(f"error: {message}", BAD_INPUT)
    except KeyboardInterrupt:
        _fail(ENDED.format("interrupted"), INTERRUPTED)
    except _Terminated:
        _fail(ENDED.format("terminated"), TERMINATED)


def _fail(message: str, code: int) -> NoReturn:
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
    if not is_main_process():  # most errors happen in all processes: the main one speaks first
        if code == INTERRUPTED:  # always in all
            raise typer.Exit(code)
        time.sleep(SECONDS_FOR_MAIN)
        message = f"process {rank()}: {message}"
    print(escaped(message), file=sys.stderr, flush=True)
    raise typer.Exit(code)


def _discard_output() -> None:
    """Keep Python from trying again, when it ends, to write what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Group(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with friendly_errors():  # --help is printed here
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with friendly_errors(), OF_COMMAND:
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Find out-of-distribution data with the help of mixed, unlabeled data.\n\n"
    "SAL, Separate And Learn (Du et al., ICLR 2024), as stages that `dvc repro` runs when their inputs change. "
    "By hand: prepare, train-id, extract-grads, filter, train-ood, evaluate, table.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"salcli {__version__}", flush=True)
        raise typer.Exit


@app.callback()
def _salcli(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


EXPERIMENTS = "Data and experiments"
PANELS: dict[str, dict[str, Callable[..., None]]] = {
    EXPERIMENTS: {
        "init": projects.init,
        "presets": projects.list_presets,
        "methods": projects.list_methods,
        "toy": results.toy,
    },
    "The pipeline, stage by stage": {
        "prepare": stages.prepare,
        "train-id": stages.train_id,
        "extract-grads": stages.extract_grads,
        "filter": stages.filter_,
        "train-ood": stages.train_ood,
        "train-encoder": stages.train_encoder,
        "evaluate": stages.evaluate,
        "detector": stages.detector,
    },
    "New images": {"predict": prediction.predict, "monitor": prediction.monitor, "export": prediction.export},
    "Results and files": {
        "table": results.table,
        "report": results.report,
        "select": results.select,
        "review": results.review,
        "inspect": results.inspect,
        "verify": results.verify,
        "theory": results.theory,
    },
}
for panel, commands in PANELS.items():
    for name, function in commands.items():
        app.command(name, rich_help_panel=panel)(function)
app.command("fingerprints", hidden=True)(stages.fingerprints)
app.command("summary", hidden=True)(stages.summary)
app.add_typer(projects.data, name="data", rich_help_panel=EXPERIMENTS)


def main() -> None:
    """The console script."""
    _open_streams()
    end_well_when_terminated()
    atexit.register(_skip_last_collection)
    app(prog_name="salcli")


def _open_streams() -> None:
    """Make sure that results can be printed: to a closed stream, or in an encoding that lacks some characters."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # or the next file would get the number of a closed stream
        pass
    os.close(number)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def end_well_when_terminated() -> None:
    """SIGTERM ends the main process as Ctrl-C does; other processes of torchrun, and those that load data, at once."""

    def end(number: int, frame: object) -> None:
        raise _Terminated

    if not is_main_process():
        return
    signal.signal(signal.SIGTERM, end)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    if world_size() > 1:  # gloo waits for other processes in C++, where Python's handlers do not run
        signals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup)
        Thread(target=_end_soon, args=(signals,), daemon=True).start()


def _end_soon(signals: int) -> None:
    """Wait for a signal, then end this process if its main thread has not done so."""
    while os.read(signals, 1)[0] not in (signal.SIGINT, signal.SIGTERM):
        pass
    time.sleep(SECONDS_TO_END)
    print(ENDED.format("terminated"), file=sys.stderr, flush=True)
    os._exit(TERMINATED)


def _skip_last_collection() -> None:
    """Python would look for garbage among all that torch has built, for half a second, although the process ends."""
    if "triton" not in sys.modules:  # whose bindings would report leaks
        gc.freeze()
