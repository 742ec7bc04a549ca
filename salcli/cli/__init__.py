"""The command line: parse, load params, call one stage, print one table. torch is imported inside commands only."""

import gc
import sys

# Imports make many objects and no garbage: looking for it after every 700 of them is a tenth of torch's import.
gc.set_threshold(100_000)

from salcli.cli.app import app  # noqa: E402
from salcli.cli.errors import keep_interrupts  # noqa: E402
from salcli.cli.help_text import prepare_help  # noqa: E402
from salcli.cli.leaving import leave  # noqa: E402


def main() -> None:
    """The console script."""
    sys.unraisablehook = keep_interrupts
    if len(sys.argv) == 1 or {"-h", "--help"} & set(sys.argv):
        prepare_help()
    try:
        app(prog_name="salcli")
    except SystemExit as ended:
        leave(ended)
        raise
