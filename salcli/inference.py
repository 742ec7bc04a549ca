"""Passes over images without gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from salcli.progress import Task

Outputs = TypeVar("Outputs")


def in_batches(
    network: nn.Module,
    outputs: Callable[[Tensor], Outputs],
    images: Tensor,
    batch_size: int,
    device: torch.device,
    task: Task,
) -> Iterator[Outputs]:
    """`outputs` of every batch of images, in order, with the network in evaluation mode."""
    network.to(device).eval()
    for start in range(0, len(images), batch_size):
        batch = images[start : start + batch_size]
        with torch.inference_mode():
            result = outputs(batch.to(device))
        yield result
        task.advance(len(batch))


@torch.inference_mode()
def accuracy(
    network: nn.Module, images: Tensor, labels: Tensor, batch_size: int, device: torch.device, task: Task
) -> float:
    """The share of images whose highest logit is that of their label."""
    predicted = [logits.argmax(1).cpu() for logits in in_batches(network, network, images, batch_size, device, task)]
    return float((torch.cat(predicted) == labels).double().mean())
