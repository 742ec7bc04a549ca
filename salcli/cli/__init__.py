"""The command line: parse, load params, call one stage, print one table. torch is imported inside commands only."""

import sys

from salcli.cli.app import app
from salcli.cli.errors import keep_interrupts


def main() -> None:
    """The console script."""
    sys.unraisablehook = keep_interrupts
    app(prog_name="salcli")
