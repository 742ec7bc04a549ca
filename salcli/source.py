"""Which code each stage runs, as one fingerprint, so that DVC notices when it changes. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

PACKAGE = Path(__file__).parent
STAGES = ("prepare", "train_id", "train_encoder", "extract_grads", "filter", "train_ood", "evaluate", "detector")
# They hold no code that could change a result.
WITHOUT_RESULT = {"salcli.errors", "salcli.progress"}
# An import at a file's top, of our own modules or of names in them. Parsing all code takes a hundred times as long.
IMPORT = re.compile(r"^from (salcli[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)


def stage_fingerprints() -> dict[str, str]:
    """For each stage, the fingerprint of its own module and of all that it imports of ours."""
    return {stage: stage_fingerprint(stage) for stage in STAGES}


def stage_fingerprint(stage: str) -> str:
    """The fingerprint of one stage, also of those that are no part of the pipeline."""
    return _fingerprint(stage_files(stage))


def stage_files(stage: str) -> list[Path]:
    """The source files that a stage imports when it is loaded, directly or not."""
    found: dict[str, Path] = {}
    waiting = [f"salcli.stages.{stage}"]
    while waiting:
        module = waiting.pop()
        path = _path(module)
        if path is None or module in found or module in WITHOUT_RESULT:
            continue
        found[module] = path
        waiting += _imports(path)
    return sorted(path for path in found.values() if path.name != "__init__.py")


def _path(module: str) -> Path | None:
    base = PACKAGE.parent.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.exists()), None)


def _imports(path: Path) -> list[str]:
    """Our own modules that a file imports at its top, and names in them; what only type checkers see does not run."""
    found = IMPORT.findall(path.read_text(encoding="utf-8"))
    return [
        name for module, names in found for name in (module, *(f"{module}.{own}" for own in re.findall(r"\w+", names)))
    ]


def _fingerprint(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
