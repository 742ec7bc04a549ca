"""Passes over images without gradients, by all processes together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from salcli.compute.image_rows import DeviceImages
from salcli.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from salcli.compute.image_rows import ImageRows
    from salcli.compute.numerics import Compute
    from salcli.models.network import Classifier
    from salcli.progress import Task

Outputs = Tensor | tuple[Tensor, ...]

# What more images leave behind does not fit in the caches of a CPU (docs/performance.md).
CPU_BATCH = 128


def in_batches(
    network: Classifier,
    outputs: Callable[[Tensor], Outputs],
    images: ImageRows,
    batch_size: int,
    compute: Compute,
    task: Task,
) -> Iterator[tuple[Tensor, ...]]:
    """`outputs` of all images in order, on the CPU in float32, so many at a time as all processes do in one go.

    Each process does its own part of the images, and gets what the others computed.
    """
    compute.place(network)
    network.eval()
    together = batch_size * compute.processes.size
    groups = torch.arange(len(images)).split(together)  # type: ignore[no-untyped-call]
    own = [group[compute.processes.part(len(group))] for group in groups]
    largest = _LargestBatch(min(batch_size, CPU_BATCH) if compute.device.type == "cpu" else batch_size, task)
    for group, batch in zip(groups, DeviceImages(images, compute.device, resident=False).batches(own), strict=True):
        parts = [_on_cpu(largest.run(outputs, batch, compute))] if len(batch) else []
        joined = [part for process in compute.processes.collect(parts) for part in process]
        yield tuple(torch.cat(column) for column in zip(*joined, strict=True))
        task.advance(len(group))


class _LargestBatch:
    """The largest batch that fits in the device's memory: halved each time that it does not."""

    def __init__(self, size: int, task: Task) -> None:
        self._size, self._task = size, task

    def run(self, outputs: Callable[[Tensor], Outputs], batch: Tensor, compute: Compute) -> list[tuple[Tensor, ...]]:
        results: list[tuple[Tensor, ...]] = []
        done = 0
        while done < len(batch):
            piece = batch[done : done + self._size]
            try:
                with torch.inference_mode(), compute.autocast():
                    result = outputs(piece)
            except torch.OutOfMemoryError:
                self._halve(compute)
                continue
            results.append((result,) if isinstance(result, Tensor) else result)
            done += len(piece)
        return results

    def _halve(self, compute: Compute) -> None:
        if self._size == 1:
            raise DeviceError(
                f"not even one image fits in the memory of {compute.device}; use another device"
            ) from None
        self._size //= 2
        self._task.note(f"out of memory on {compute.device}: goes on with batches of {self._size}")
        if compute.device.type == "cuda":
            torch.cuda.empty_cache()


def _on_cpu(pieces: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """One batch again, in float32 where a lower precision was computed in."""
    columns = zip(*pieces, strict=True)
    return tuple(
        torch.cat([part.float().cpu() if part.is_floating_point() else part.cpu() for part in column])
        for column in columns
    )


def accuracy(
    network: Classifier, images: ImageRows, labels: Tensor, batch_size: int, compute: Compute, task: Task
) -> float:
    """The share of images whose highest logit is that of their label."""

    def predicted(batch: Tensor) -> Tensor:
        logits: Tensor = network(batch)
        return logits.argmax(1)

    parts = [part for (part,) in in_batches(network, predicted, images, batch_size, compute, task)]
    return float((torch.cat(parts) == labels).double().mean())
