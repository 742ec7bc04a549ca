"""Errors that a user's input can cause. Each message says what, where, and the fix; names in it are safe to print."""

import os
import unicodedata
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


class SalError(Exception):
    """Shown as one message, without a traceback."""


class ParamsError(SalError):
    """params.yaml, or what overrides it, is not valid."""


class UnknownNameError(SalError):
    """A name that is not known."""


class ModelError(SalError):
    """A network cannot be built as asked for, or does not take what it is given."""


class WeightsError(SalError):
    """Given weights cannot be read, or are of another network."""


class MissingArtifactError(SalError):
    """A stage was started before the stage that makes its input."""


class BadArtifactError(SalError):
    """A file is damaged, of another kind, or does not belong to the other inputs."""


class ThresholdError(SalError):
    """The filter's threshold leaves no candidate outliers."""


def as_text(name: str | Path) -> str:
    r"""A name as valid text that still identifies it: a byte that is not UTF-8 becomes \xff."""
    text = str(name)
    return text if text.isascii() else os.fsencode(text).decode("utf-8", "backslashreplace")


def printable(name: str | Path) -> str:
    """A name on one line, for people: bytes that are not text, and characters that move the cursor, become �."""
    text = os.fsencode(str(name)).decode(errors="replace")
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def escaped(text: str) -> str:
    r"""Text that a terminal only shows: control characters but newline and tab become \x1b and the like."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else f"\\x{ord(c):02x}" for c in text)


def check_regular(path: Path) -> None:
    """Refuse what is no file: to open a pipe would wait for a writer for ever, and a device may have no end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise SalError(f"{path} is a pipe or a device; it should be a file")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ " (did you mean x?)" for the nearest known name, or nothing if none is near. Upper and lower case are equal."""
    as_written = {one.lower(): one for one in known}
    nearest = get_close_matches(name.lower(), as_written, n=1, cutoff=0.5)
    return f" (did you mean {as_written[nearest[0]]}?)" if nearest else ""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """The look-up error of every list of names."""
    names, shown = sorted(known), name or "''"
    return UnknownNameError(f"no {kind} is called {shown}{did_you_mean(name, names)}; known: {', '.join(names)}")
