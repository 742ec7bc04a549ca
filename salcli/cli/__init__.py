"""The command line: parse, call one function, print one table. torch is imported inside commands only."""

from salcli.cli.app import main

__all__ = ["main"]
