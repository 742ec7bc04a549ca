"""Run by test_distributed.py under torchrun: the stages in two processes, and what each of them saw."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from helpers.quick import EXPERIMENT

from salcli.engine.device import Processes, joined
from salcli.params.schema import Params, load_params
from salcli.pipeline import evaluate, extract, train_id, train_ood
from salcli.pipeline import filter as filter_stage
from salcli.store.layout import Workspace

TRAINED = ("sal", "woods")
EVALUATED = {"evaluate.methods": ["sal", "knn", "odin", "sal-posthoc"]}
FILTERS = {
    "agnostic": {"filter.svd": "class-agnostic"},
    "wild": {"filter.svd": "class-agnostic", "filter.directions": "wild"},
    "plus": {"filter.score": "sal-plus"},
}
SHORT = {"train_id.epochs": 2, "train_ood.epochs": 2, "rivals": list(TRAINED[1:])}


def main(root: Path) -> None:
    with joined() as together:
        parts = together.collect(stages(root, together))
        if together.is_main:
            (root / "seen.json").write_text(json.dumps(parts))


def stages(root: Path, together: Processes) -> dict[str, Any]:
    """The stages that read the classifier that one process trained, then all trainings."""
    workspace, seen = Workspace(root), {}
    params = load_params(root / "params.yaml", SHORT)[0]
    extract.run_id(workspace, params, EXPERIMENT)
    extract.run_wild(workspace, params, EXPERIMENT)
    together.wait()
    for name, changes in FILTERS.items():
        seen[name] = wild_scores(workspace, load_params(root / "params.yaml", changes)[0])
    filter_stage.run(workspace, params, EXPERIMENT)
    evaluate.run(workspace, load_params(root / "params.yaml", EVALUATED)[0], EXPERIMENT)
    seen |= {method: loss_and_accuracy(workspace, params, method) for method in TRAINED}
    together.wait()
    seen["train_id"] = loss_and_accuracy(workspace, params, "train_id")
    return seen


def wild_scores(workspace: Workspace, params: Params) -> list[float]:
    scores: list[float] = filter_stage.run(workspace, params, EXPERIMENT).separation.scores.wild.tolist()
    return scores


def loss_and_accuracy(workspace: Workspace, params: Params, what: str) -> dict[str, float]:
    """Of the last epoch of a training."""
    if what == "train_id":
        return asdict(train_id.run(workspace, params, EXPERIMENT).last_epoch)
    rival = None if what == "sal" else what
    return asdict(train_ood.run(workspace, params, EXPERIMENT, rival=rival).last_epochs[""])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
