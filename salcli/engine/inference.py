"""Passes over samples without gradients, shared by all processes."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from salcli.engine.batches import DeviceRows, LabeledRows, Rows
from salcli.engine.device import Compute
from salcli.errors import SalError
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
    device, processes = compute.device, compute.processes
    size = min(batch_size, CPU_BATCH) if device.type == "cpu" else batch_size  # of what is computed at once
    positions = torch.arange(len(rows)).split(batch_size * processes.size)  # type: ignore[no-untyped-call]
    own = [some[processes.part(len(some))] for some in positions]
    for some, batch in zip(positions, DeviceRows(rows, device, resident=False).batches(own), strict=True):
        pieces: list[tuple[Tensor, ...]] = []
        done = 0
        while done < len(batch):
            try:
                with torch.inference_mode(), compute.autocast():
                    result = outputs(batch[done : done + size])
            except torch.OutOfMemoryError:
                if size == 1:
                    message = f"not even one sample fits in the memory of {device}; use another device"
                    raise SalError(message) from None
                size //= 2
                task.note(f"out of memory on {device}: continuing with batches of {size}")
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                continue
            tensors = (result,) if isinstance(result, Tensor) else result
            pieces.append(tuple(one.float().cpu() if one.is_floating_point() else one.cpu() for one in tensors))
            done += size
        collected = [piece for process in processes.collect(pieces) for piece in process]
        yield tuple(torch.cat(column) for column in zip(*collected, strict=True))
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


def accuracy(network: nn.Module, samples: LabeledRows, compute: Compute, task: Task) -> float:
    """The share of samples whose highest logit is that of their label."""

    def predicted(batch: Tensor) -> Tensor:
        outputs = network(batch)  # class logits, maybe followed by others
        logits: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        return logits.argmax(1)

    (found,) = outputs_of(network, predicted, samples.rows, BATCH_SIZE, compute, task)
    return float((found == samples.labels).double().mean())
