"""Several processes that work together through torch.distributed, or one that works alone."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from salcli import ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from salcli.sal.gradients import FactorSource

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among `size`. All of them have to call the same methods in the same order."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def part(self, n: int) -> slice:
        """This process's part of n things: contiguous, and as large as the others' to within one."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def share(self, source: FactorSource) -> FactorSource:
        """This process's part of some gradients."""
        return source if self.size == 1 else source.between(self.part(len(source)))

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, the same to the last bit in each of them."""
        if self.size == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def join(self, rows: Tensor) -> Tensor:
        """The rows of all processes, in their order."""
        return rows if self.size == 1 else torch.cat([part for part in self.collect(rows) if len(part)])

    def collect(self, item: T) -> list[T]:
        """The items of all processes, in their order."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item)
        return items

    def from_main(self, item: T) -> T:
        """What the main process has."""
        if self.size == 1:
            return item
        items = [item]
        dist.broadcast_object_list(items, src=0)
        return items[0]

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            dist.barrier()


def processes() -> Processes:
    """Those that were joined, or this one alone."""
    if dist.is_available() and dist.is_initialized():
        return Processes(dist.get_rank(), dist.get_world_size())
    return Processes()


@contextmanager
def joined() -> Iterator[Processes]:
    """Inside, the processes that torchrun started work together; without torchrun there is only this one."""
    if ranks.world_size() == 1 or dist.is_initialized():
        yield processes()
        return
    # objects and CPU tensors always go through gloo
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    yield processes()
    dist.destroy_process_group()  # after an error not at all: the others would fail before this one has spoken
