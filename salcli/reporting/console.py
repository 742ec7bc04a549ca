"""Where everything is printed."""

from __future__ import annotations

import sys

from rich.console import Console

from salcli.ranks import is_main

PLAIN_WIDTH = 100  # of what goes to a file or a pipe

# of several processes, one speaks
console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, soft_wrap=False, quiet=not is_main())
# for what is said beside an output that other programs read
side_console = Console(width=None if sys.stderr.isatty() else PLAIN_WIDTH, stderr=True, quiet=not is_main())
