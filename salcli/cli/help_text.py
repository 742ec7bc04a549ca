"""Help texts: from docstrings to Rich's markup, and onto the screen without what they do not need."""

from __future__ import annotations

import inspect
import re
import sys
from types import ModuleType

# Typer's help imports these two, with parsers of Markdown and of program code. Ours uses neither.
UNUSED = {"rich.markdown": "Markdown", "rich.traceback": "Traceback"}


def in_markup(text: str | None) -> str | None:
    """`code` and **bold** words of a docstring are bold, each paragraph is one line, and brackets are brackets."""
    if not text:
        return text
    paragraphs = [part.replace("\n", " ") for part in inspect.cleandoc(text).split("\n\n")]
    escaped = "\n\n".join(paragraphs).replace("[", r"\[")
    return re.sub(r"`([^`]+)`|\*\*(.+?)\*\*", lambda found: f"[bold]{found[1] or found[2]}[/bold]", escaped)


def prepare_help() -> None:
    """Import Typer's help with placeholders for what it does not use: twice as fast, and the process ends with it."""
    if "typer.rich_utils" in sys.modules:
        return
    for module, name in UNUSED.items():
        placeholder = ModuleType(module)
        setattr(placeholder, name, object)
        sys.modules.setdefault(module, placeholder)
    import typer.rich_utils  # noqa: F401

    for module in UNUSED:
        if not hasattr(sys.modules[module], "__file__"):
            del sys.modules[module]
