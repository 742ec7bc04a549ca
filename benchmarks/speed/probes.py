"""Pieces of work whose memory is measured, each in a process of its own: `python -m benchmarks.speed.probes NAME …`."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.speed.made_up import OOD, SEED, gradient_experiment, image_experiment
from benchmarks.speed.memory import Peak, peak_during
from salcli.stages import extract_grads
from salcli.stages import filter as filter_stage

if TYPE_CHECKING:
    from collections.abc import Callable


def extract(folder: Path, n_wild: str, backbone: str) -> Peak:
    """extract-grads, after a small run, so that the program is all there."""
    for n, name in ((512, "small"), (int(n_wild), "large")):
        made = image_experiment(folder / name, n, backbone, "cpu")
        result = peak_during(lambda made=made: extract_grads.run_wild(made.workspace, made.params, OOD, SEED))
    return result


def filtering(folder: Path, n_wild: str, n_classes: str, n_features: str, svd: str = "class-conditional") -> Peak:
    """Likewise, filter."""
    shape = int(n_classes), int(n_features)
    small = gradient_experiment(folder / "small", 4 * shape[0], *shape, filter__svd=svd)
    filter_stage.run(small.workspace, small.params, OOD, SEED)
    large = gradient_experiment(folder / "large", int(n_wild), *shape, filter__svd=svd)
    return peak_during(lambda: filter_stage.run(large.workspace, large.params, OOD, SEED))


PROBES: dict[str, Callable[..., Peak]] = {"extract": extract, "filter": filtering}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        peak = PROBES[sys.argv[1]](Path(place), *sys.argv[2:])
    print(json.dumps(asdict(peak)))
