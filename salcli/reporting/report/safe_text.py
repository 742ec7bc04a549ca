"""Names from data and files as text that every page and figure can hold."""

from __future__ import annotations

import re
from pathlib import Path

# lone surrogates stand for bytes that are no UTF-8; XML and browsers know no control characters
NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
PASSWORD = re.compile(r"(?<=://)[^/\s@]+@")
LONGEST_NAME = 60


def clean(text: str) -> str:
    """What is no text becomes �."""
    return NOT_TEXT.sub("\N{REPLACEMENT CHARACTER}", text)


def name_in_figure(text: str) -> str:
    """One short line, in which no character is taken for mathematics."""
    line = " ".join(clean(text).split())
    short = line if len(line) <= LONGEST_NAME else f"{line[: LONGEST_NAME - 1]}…"
    return short.replace("$", r"\$")


def without_secrets(text: str) -> str:
    """Pages are passed on: nobody needs to read where one's home is, or what stands before the @ of an address."""
    home = str(Path.home())
    shown = re.sub(rf"(?<![\w/]){re.escape(home)}(?![\w-])", "~", text) if len(home) > 1 else text
    return PASSWORD.sub("…@", shown)
