"""metrics.json and filter.json files as `evaluate` and `filter` write them, with any numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from salcli.report.results import METRICS

SETS, SEEDS, METHODS = ("far", "near_one"), (0, 3, 11), ("sal", "msp", "knn")
LABELS = {"sal": "SAL", "msp": "MSP", "knn": "KNN"}


def write_runs(
    root: Path,
    values: NDArray[np.floating],  # set × seed × method × metric, between 0 and 1
    sets: Sequence[str] = SETS,
    pi: str = "0.1",
    methods: Sequence[str] = METHODS,
) -> Path:
    for i, ood in enumerate(sets):
        for j in range(values.shape[1]):
            rows = {
                name: {"label": LABELS.get(name, name), **dict(zip(METRICS, map(float, row), strict=True))}
                for name, row in zip(methods, values[i, j], strict=False)
            }
            folder = root / "runs" / str(SEEDS[j]) / ood / f"pi-{pi}"
            write_json(folder / "evaluation" / "metrics.json", rows | {"samples": {"id_test": 288, "ood_test": 106}})
            counts = {"n_id_train": 462, "n_calibration": 115, "n_wild": 1642, "n_candidates": 70 + j}
            write_json(folder / "sal" / "filter.json", counts | {"err_in": 0.05, "err_out": 0.4})
    return root / "runs"


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
