"""The command line: parse, load params, call one stage, print one table. torch is imported inside commands only."""

import sys

from salcli.cli.app import app
from salcli.cli.errors import keep_interrupts
from salcli.cli.help_text import prepare_help


def main() -> None:
    """The console script."""
    sys.unraisablehook = keep_interrupts
    if len(sys.argv) == 1 or {"-h", "--help"} & set(sys.argv):
        prepare_help()
    app(prog_name="salcli")
