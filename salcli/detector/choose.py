"""Which detector is meant where nobody names one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from salcli.artifacts.layout import DETECTOR, RUNS
from salcli.errors import MissingArtifactError, UsageMistakeError

if TYPE_CHECKING:
    from pathlib import Path

SHOWN = 10


def choose_detector(given: Path | None, folder: Path) -> tuple[Path, str]:
    """The detector's path, and what to say about the choice.

    In this order: the given one; detector.safetensors in the folder; the one of the project's runs, with several seeds
    that of the first. What OOD data were in the wild is not for us to choose.
    """
    if given is not None:
        return given, ""
    here = folder / DETECTOR
    if here.is_file():
        return here, ""
    found = sorted((folder / RUNS).glob(f"*/*/{DETECTOR}"), key=_seed_first)
    if not found:
        raise MissingArtifactError(
            f"there is no {DETECTOR} here and none below {RUNS}/; "
            "make one with: salcli detector (or dvc repro), or name a file with --detector"
        )
    if len({path.parent.name for path in found}) > 1:
        names = "".join(f"\n  --detector {path}" for path in found[:SHOWN])
        more = f"\n  and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise UsageMistakeError(f"there are {len(found)} detectors; choose one:{names}{more}")
    others = f", the first of {len(found)} seeds" if len(found) > 1 else ""
    return found[0], f"detector: {found[0]}{others}"


def _seed_first(path: Path) -> tuple[int, str, str]:
    ood, seed = path.parent.name, path.parent.parent.name
    return (int(seed) if seed.isdecimal() else 0), seed, ood
