"""The state of an unfinished training run: kept outside of what DVC tracks, so that it survives a kill."""

from __future__ import annotations

import hashlib
import io
import json
from typing import TYPE_CHECKING, Any

import torch

from salcli.artifacts.atomic import atomic_path

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from salcli.progress import Task


class ResumePoint:
    """One file for each run. `made_with` is all that the run depends on: params, inputs, versions."""

    def __init__(self, path: Path, made_with: Mapping[str, Any], task: Task) -> None:
        everything = {**made_with, "torch": torch.__version__}
        self._path, self._task = path, task
        self._config = hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()

    def load(self) -> dict[str, Any] | None:
        """The state that an earlier run of the same kind left. One of another kind is left aside."""
        try:
            content = torch.load(self._path, map_location="cpu", weights_only=True)
            config, state = content["config"], content["state"]
        except FileNotFoundError:
            return None
        except Exception:  # whatever is wrong with it, it cannot be used
            self._task.note("starts anew: what an earlier run kept cannot be read")
            return None
        if config != self._config:
            self._task.note("starts anew: params or inputs have changed since the earlier run that was stopped")
            return None
        assert isinstance(state, dict)
        return state

    def save(self, state: dict[str, Any]) -> None:
        """Replace what was kept."""
        content = io.BytesIO()  # torch's own writer reports a full disk in a way that nobody could tell from a bug
        torch.save({"config": self._config, "state": state}, content)
        with atomic_path(self._path) as partial:
            partial.write_bytes(content.getbuffer())

    def clear(self) -> None:
        """The run is over."""
        self._path.unlink(missing_ok=True)
