"""Passes over samples without gradients, shared by all processes."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from salcli.engine.batches import DeviceRows, LabeledRows, Rows
from salcli.engine.device import Compute
from salcli.errors import DeviceError
from salcli.progress import Silent, Task

Outputs = Tensor | tuple[Tensor, ...]

BATCH_SIZE = 512  # of passes for which params.yaml has none
# Activations of more images do not fit in the caches of a CPU (docs/performance.md).
CPU_BATCH = 128


def in_batches(
    network: nn.Module,
    outputs: Callable[[Tensor], Outputs],
    rows: Rows,
    batch_size: int,
    compute: Compute,
    task: Task,
) -> Iterator[tuple[Tensor, ...]]:
    """`outputs` of all rows in order, on the CPU in float32, one global batch at a time.

    Each process computes its part of every batch and receives the others' parts.
    """
    compute.place(network)
    network.eval()
    if len(rows) == 0:  # the OOD test data of a project where nobody knows what is OOD
        return
    positions = torch.arange(len(rows)).split(batch_size * compute.processes.size)  # type: ignore[no-untyped-call]
    own = [some[compute.processes.part(len(some))] for some in positions]
    pieces = _Pieces(min(batch_size, CPU_BATCH) if compute.device.type == "cpu" else batch_size, compute, task)
    for some, batch in zip(positions, DeviceRows(rows, compute.device, resident=False).batches(own), strict=True):
        parts = [pieces.run(outputs, batch)] if len(batch) else []
        joined = [part for process in compute.processes.collect(parts) for part in process]
        yield tuple(torch.cat(column) for column in zip(*joined, strict=True))
        task.advance(len(some))


def outputs_of(
    network: nn.Module,
    outputs: Callable[[Tensor], Outputs],
    rows: Rows,
    batch_size: int,
    compute: Compute,
    task: Task | None = None,
) -> list[Tensor]:
    """Each of the `outputs`, of all rows in one tensor."""
    batches = in_batches(network, outputs, rows, batch_size, compute, task or Silent())
    return [torch.cat(parts) for parts in zip(*batches, strict=True)]


class _Pieces:
    """Runs a batch in pieces that fit in the device's memory: the piece is halved each time that it does not."""

    def __init__(self, size: int, compute: Compute, task: Task) -> None:
        self._size, self._compute, self._task = size, compute, task

    def run(self, outputs: Callable[[Tensor], Outputs], batch: Tensor) -> tuple[Tensor, ...]:
        results: list[tuple[Tensor, ...]] = []
        done = 0
        while done < len(batch):
            piece = batch[done : done + self._size]
            try:
                with torch.inference_mode(), self._compute.autocast():
                    result = outputs(piece)
            except torch.OutOfMemoryError:
                self._halve()
                continue
            results.append((result,) if isinstance(result, Tensor) else result)
            done += len(piece)
        return tuple(torch.cat([_on_cpu(part) for part in column]) for column in zip(*results, strict=True))

    def _halve(self) -> None:
        device = self._compute.device
        if self._size == 1:
            raise DeviceError(f"not even one sample fits in the memory of {device}; use another device") from None
        self._size //= 2
        self._task.note(f"out of memory on {device}: continuing with batches of {self._size}")
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.float().cpu() if tensor.is_floating_point() else tensor.cpu()


def accuracy(network: nn.Module, samples: LabeledRows, compute: Compute, task: Task) -> float:
    """The share of samples whose highest logit is that of their label."""

    def predicted(batch: Tensor) -> Tensor:
        outputs = network(batch)  # class logits, maybe followed by others
        logits: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        return logits.argmax(1)

    (found,) = outputs_of(network, predicted, samples.rows, BATCH_SIZE, compute, task)
    return float((found == samples.labels).double().mean())
