"""What can go wrong because of the user's input. Each message says what, where, and the cure."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class SalError(Exception):
    """The base of all errors that are shown as one message, without a traceback."""


class ParamsError(SalError):
    """params.yaml, or what overrides it, is not valid."""


class UnknownNameError(SalError):
    """A name that no registry knows."""


class ModelError(SalError):
    """A network cannot be built as asked for, or does not take what it is given."""


class WeightsError(SalError):
    """Given weights cannot be read, or are of another network."""


class MissingArtifactError(SalError):
    """A stage was started before the stage that makes its input."""


class BadArtifactError(SalError):
    """A file is truncated, foreign, or does not belong to the other inputs."""


class StorageError(SalError):
    """A file cannot be written."""


class DataError(SalError):
    """The data cannot be split or mixed as asked for."""


class FetchError(SalError):
    """A file of a data set cannot be fetched."""


class ThresholdError(SalError):
    """The filter's threshold leaves no candidate outliers, or nothing but them."""


class TrainingError(SalError):
    """Training left the realm of finite numbers."""


class UsageMistakeError(SalError):
    """A command was started in a way that cannot work."""


class DeviceError(SalError):
    """The asked-for device is not there."""


class ProjectError(SalError):
    """A folder cannot be made ready for `dvc repro`."""


class PaperError(SalError):
    """The paper reports nothing that these results could be compared with."""


class ReviewError(SalError):
    """A list of candidates that a person corrected cannot be used."""


class MetricsError(SalError):
    """Scores that no metric can be computed from."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """« (did you mean x?)» for the nearest known name, or nothing where none is near."""
    nearest = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """The one look-up error of every registry."""
    names, shown = sorted(known), name or "''"
    return UnknownNameError(f"no {kind} is called {shown}{did_you_mean(name, names)}; known: {', '.join(names)}")
