"""Run by test_distributed.py under torchrun: the engine and the stages in two processes, and what each of them saw."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from helpers.compute import CPU, Numerics, rows_of, some_images
from torch import Tensor, nn

from salcli.engine.batches import Batches, LabeledRows
from salcli.engine.device import Compute, Processes, joined, synchronised

OOD, SEED = "digits-8-9", 0


def main(root: Path) -> None:
    with joined() as together:
        seen = {"rank": together.rank, "size": together.size, **engine(together), **stages(root, together)}
        parts = together.collect(seen)
        if together.is_main:
            (root / "seen.json").write_text(json.dumps(parts))


def engine(together: Processes) -> dict[str, Any]:
    return {
        "labels": labels_of_one_epoch(together),
        "images": batch_norm(together, image_network(), torch.randn(10, 2, 6, 6)),
        "vectors": batch_norm(together, vector_network(), torch.randn(10, 5)),
    }


def labels_of_one_epoch(together: Processes) -> list[int]:
    training = LabeledRows(rows_of(some_images(100)), torch.arange(100), 100)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    batches = Batches(training, Compute(CPU, Numerics(), together))
    return [label for _, labels in batches(order.split(13)) for label in labels.tolist()]


def image_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, 1))


def vector_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3, momentum=None), nn.ReLU(), nn.Linear(3, 1))


def batch_norm(together: Processes, network: nn.Sequential, samples: Tensor) -> dict[str, list[float]]:
    """Gradients and statistics of a network with batch norm, each process having half of the batch."""
    trained: nn.Module = network
    if together.size > 1:
        trained = nn.parallel.DistributedDataParallel(synchronised(network, CPU))
    trained(samples[together.part(10)]).square().mean().backward()
    return {
        "gradients": torch.cat([weight.grad.flatten() for weight in network.parameters()]).tolist(),
        "running": torch.cat([network[1].running_mean, network[1].running_var]).tolist(),
    }


def stages(root: Path, together: Processes) -> dict[str, Any]:
    """STAGES: everything below needs the pipeline."""
    from salcli.artifacts.layout import Workspace
    from salcli.params import load_params
    from salcli.stages import evaluate, extract_grads, train_id, train_ood
    from salcli.stages import filter as filter_stage

    workspace, seen = Workspace(root), {}
    params, _ = load_params(root / "params.yaml", {"train_id.epochs": 2, "train_ood.epochs": 2})
    agnostic, _ = load_params(root / "params.yaml", {"filter.svd": "class-agnostic"})
    # the stages that read the classifier that one process trained
    extract_grads.run_id(workspace, params, SEED)
    extract_grads.run_wild(workspace, params, OOD, SEED)
    together.wait()
    seen["agnostic"] = filter_stage.run(workspace, agnostic, OOD, SEED).candidates.wild_score.tolist()
    filter_stage.run(workspace, params, OOD, SEED)
    together.wait()
    metrics = evaluate.run(workspace, params, OOD, SEED).metrics
    seen["evaluation"] = {method: asdict(own) for method, own in metrics.items()}
    for method in ("sal", "oe", "energy-oe", "woods"):
        seen[method] = asdict(train_ood.run(workspace, params, OOD, SEED, method=method).last_epoch)
    together.wait()
    seen["train_id"] = asdict(train_id.run(workspace, params, SEED).last_epoch)
    return seen


if __name__ == "__main__":
    main(Path(sys.argv[1]))
