"""The command line: parse, load params, call one stage, print one table. torch is imported inside commands only."""

from salcli.cli.app import app


def main() -> None:
    """The console script."""
    app(prog_name="salcli")
