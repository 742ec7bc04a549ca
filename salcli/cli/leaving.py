"""The end of the process. Python would take apart all that torch has built: longer than the work of many a stage."""

from __future__ import annotations

import atexit
import os
import sys

from salcli.cli.errors import BAD_INPUT, cannot_print


def leave(ended: SystemExit) -> None:
    """End at once: exit handlers have run, what was printed is out, and the operating system frees the rest.

    Returns, so that Python ends in its own way, where nobody reads on, or where a profiler or a debugger is to have the
    last word.
    """
    if _is_watched() or not isinstance(ended.code, int | None):
        return
    atexit._run_exitfuncs()
    code = ended.code or 0
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except BrokenPipeError:
        return
    except OSError as error:
        if not code:  # else it has been said
            os.write(2, f"{cannot_print(error)}\n".encode())
        code = code or BAD_INPUT
    os._exit(code)


def _is_watched() -> bool:
    monitoring = getattr(sys, "monitoring", None)  # since Python 3.12
    tools = [monitoring.get_tool(number) for number in range(6)] if monitoring else []
    return bool(sys.getprofile() or sys.gettrace() or any(tools))
