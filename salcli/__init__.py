"""Separate And Learn: out-of-distribution detection with unlabeled wild data."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from salcli.api import SAL
    from salcli.detector.detector import Detector

__all__ = ["SAL", "Detector", "__version__"]
__version__ = "0.2.0"


def __getattr__(name: str) -> object:
    """`from salcli import SAL, Detector`, and torch is loaded only then."""
    if name == "SAL":
        from salcli.api import SAL

        return SAL
    if name == "Detector":
        from salcli.detector.detector import Detector

        return Detector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
