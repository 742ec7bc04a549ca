"""Errors as people see them: one message on standard error, an exit code, no traceback."""

from __future__ import annotations

import re
import sys
import time
from _thread import interrupt_main
from contextlib import contextmanager, suppress
from errno import ENOSPC
from threading import Timer
from typing import TYPE_CHECKING, Any

import typer

from salcli.errors import SalError
from salcli.ranks import is_main, rank, world_size

# Typer's name for every mistake on the command line, wherever this version of it keeps the class
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

if TYPE_CHECKING:
    from collections.abc import Iterator

BAD_INPUT = 2
INTERRUPTED = 130
SECONDS_FOR_MAIN = 2.0
# how torch.distributed says that somebody at the other end is gone
LOST_PEER = re.compile(r"gloo|nccl|connection (reset|closed|refused)|broken pipe", re.IGNORECASE)


@contextmanager
def friendly_errors() -> Iterator[None]:
    """Turn what a user can mend into a message; let everything else show itself as the bug it is."""
    try:
        yield
    except SalError as error:
        _fail(f"error: {error}", BAD_INPUT)
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # not a mistake: shows the help
            raise
        _fail(f"error: {_usage(error)}", BAD_INPUT)
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
        _fail(f"error: {error.filename}: {error.strerror}; it should be a file that you may read", BAD_INPUT)
    except OSError as error:
        if error.errno != ENOSPC or error.filename:
            raise
        _fail(cannot_print(error), BAD_INPUT)
    except RuntimeError as error:
        if world_size() == 1 or not LOST_PEER.search(str(error)):
            raise
        _fail("error: another process has ended; its own message says why", BAD_INPUT)
    except KeyboardInterrupt:
        _fail("interrupted; nothing half written is left behind, run the same command again", INTERRUPTED)


def keep_interrupts(lost: sys.UnraisableHookArgs) -> None:
    """A Ctrl-C that hits a callback of Python's own would be lost, most likely while torch is imported: repeat it."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        Timer(0.05, interrupt_main).start()
    else:
        sys.__unraisablehook__(lost)


def cannot_print(error: OSError) -> str:
    """What to say when standard output goes to a file on a full disk."""
    return f"error: standard output cannot be written: {error.strerror}; make room, or send it elsewhere"


def _usage(error: Any) -> str:
    where_to_look = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
    return f"{error.format_message().rstrip('.')}{where_to_look}"


def _fail(message: str, code: int) -> None:
    with suppress(OSError):  # a full disk has been reported, or will be
        sys.stdout.flush()
    if not is_main():  # most errors happen in all processes: the main one speaks first, and ends the others
        time.sleep(SECONDS_FOR_MAIN)
        message = f"process {rank()}: {message}"
    print(message, file=sys.stderr, flush=True)
    raise typer.Exit(code)
