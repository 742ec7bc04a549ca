"""Run by test_distributed.py under torchrun: the stages in two processes, and what each of them saw."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from salcli.artifacts.layout import Workspace
from salcli.compute.augmentation import Augmentation
from salcli.compute.batch_norm import synchronised
from salcli.compute.numerics import Compute
from salcli.compute.processes import Processes, joined
from salcli.params import Params, load_params
from salcli.stages import evaluate, extract_grads, train_id, train_ood
from salcli.stages import filter as filter_stage
from salcli.stages.batches import Batches
from salcli.stages.inputs import id_images

OOD, SEED = "digits-8-9", 0


def main(root: Path) -> None:
    workspace = Workspace(root)
    params, _ = load_params(root / "params.yaml", {"train_id.epochs": 2, "train_ood.epochs": 2})
    agnostic, _ = load_params(root / "params.yaml", {"filter.svd": "class-agnostic"})
    with joined() as together:
        seen: dict[str, object] = {"rank": together.rank, "size": together.size}
        # the stages that read the classifier that one process trained
        extract_grads.run_id(workspace, params, SEED)
        extract_grads.run_wild(workspace, params, OOD, SEED)
        together.wait()
        filtered = filter_stage.run(workspace, agnostic, OOD, SEED)
        seen["agnostic"] = filtered.candidates.wild_score.tolist()
        filter_stage.run(workspace, params, OOD, SEED)
        together.wait()
        seen["evaluation"] = {
            method: asdict(own) for method, own in evaluate.run(workspace, params, OOD, SEED).metrics.items()
        }
        for method in ("sal", "oe", "energy-oe", "woods"):
            seen[method] = asdict(train_ood.run(workspace, params, OOD, SEED, method=method).last_epoch)
        together.wait()
        seen["train_id"] = asdict(train_id.run(workspace, params, SEED).last_epoch)
        seen["images"] = images_of_one_epoch(workspace, params, together)
        seen["batch_norm"] = batch_norm(together)
        parts = together.collect(seen)
        if together.is_main:
            (root / "seen.json").write_text(json.dumps(parts))


def images_of_one_epoch(workspace: Workspace, params: Params, together: Processes) -> list[str]:
    """Which training samples this process got, by what they look like."""
    compute = Compute(torch.device("cpu"), params.numerics, together)
    training = id_images(workspace, params.data.id, "train", SEED)
    batches = Batches(training, compute, Augmentation("none", torch.Generator()))
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(0))
    return [image.numpy().tobytes().hex() for images, _ in batches(order.split(64)) for image in images]


def batch_norm(together: Processes) -> dict[str, list[float]]:
    """Gradients and statistics of a small network with batch norm, each process having half of the batch."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, 1))
    images = torch.randn(10, 2, 6, 6)
    parallel = nn.parallel.DistributedDataParallel(synchronised(network, torch.device("cpu")))
    parallel(images[together.part(10)]).square().mean().backward()
    return {
        "gradients": torch.cat([weight.grad.flatten() for weight in network.parameters()]).tolist(),
        "running": torch.cat([network[1].running_mean, network[1].running_var]).tolist(),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
