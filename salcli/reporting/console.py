"""Where everything is printed."""

from __future__ import annotations

import sys

from rich.console import Console

PLAIN_WIDTH = 100  # of what goes to a file or a pipe

console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, soft_wrap=False)
