"""Errors as people see them: one message on standard error, an exit code, no traceback."""

from __future__ import annotations

import errno
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from salcli.errors import SalError

if TYPE_CHECKING:
    from collections.abc import Iterator

BAD_INPUT = 2
INTERRUPTED = 130


@contextmanager
def friendly_errors() -> Iterator[None]:
    """Turn what a user can mend into a message; let everything else show itself as the bug it is."""
    try:
        yield
    except SalError as error:
        _fail(f"error: {error}", BAD_INPUT)
    except OSError as error:
        if error.errno == errno.ENOSPC or "No space left" in str(error):
            _fail("error: the disk is full; free some space and run the same command again", BAD_INPUT)
        if isinstance(error, PermissionError):
            _fail(f"error: {error.filename} may not be written or read; check its permissions", BAD_INPUT)
        raise
    except KeyboardInterrupt:
        _fail("interrupted; nothing half written is left behind, run the same command again", INTERRUPTED)


def _fail(message: str, code: int) -> None:
    sys.stdout.flush()
    print(message, file=sys.stderr)
    raise typer.Exit(code)
