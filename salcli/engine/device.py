"""Where and how a stage computes: device, precision, determinism, compilation, and several processes as one."""

import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from salcli.errors import SalError
from salcli.models.backbones import Backbone
from salcli.progress import rank, world_size
from salcli.sal.gradients import FactorSource, Workers

T = TypeVar("T")
TIMEOUT = 1800  # seconds
SECONDS_TO_REPORT = 5.0
AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Numerics(Protocol):
    """The `numerics` section of params.yaml."""

    @property
    def precision(self) -> str: ...
    @property
    def deterministic(self) -> bool: ...
    @property
    def compile(self) -> bool: ...


def resolve_device(name: str) -> torch.device:
    """The named device, or with `auto` the best one available. Each process of a machine gets its own GPU."""
    if name == "auto":
        has_mps = torch.backends.mps.is_available()
        name = "cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"
    if name == "cuda" and world_size() > 1:
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        n = torch.cuda.device_count()
        available = f"{n} CUDA devices are" if torch.cuda.is_available() else "no CUDA device is"
        raise SalError(f"device {name}: {available} available here; use device: auto or cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise SalError("device mps: not available here; use device: auto or cpu")
    return device


@dataclass(frozen=True)
class Processes(Workers):
    """This process among `size`. All of them must call the same methods in the same order."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes files."""
        return self.rank == 0

    def part(self, n: int) -> slice:
        """This process's part of n items: contiguous, and equal to the others' in size to within one."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def share(self, source: FactorSource) -> FactorSource:
        """This process's part of some gradients."""
        return source if self.size == 1 else source[self.part(len(source))]

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, equal to the last bit in each of them."""
        if self.size == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def join(self, rows: Tensor) -> Tensor:
        """The rows of all processes, ordered by rank."""
        return rows if self.size == 1 else torch.cat([part for part in self.collect(rows) if len(part)])

    def collect(self, item: T) -> list[T]:
        """The items of all processes, ordered by rank."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item)
        return items

    def from_main(self, item: T) -> T:
        """The main process's item, in every process."""
        if self.size == 1:
            return item
        items = [item]
        dist.broadcast_object_list(items, src=0)
        return items[0]

    def equalize(self, network: nn.Module) -> None:
        """Give every process the main one's batch-norm statistics, which each has of its own part of the batches."""
        for statistics in network.buffers() if self.size > 1 else ():
            dist.broadcast(statistics, src=0)

    def wait(self) -> None:
        """Block until all processes are here."""
        if self.size > 1:
            dist.barrier()


def processes() -> Processes:
    """The process group that `joined` has set up, or this process alone."""
    if dist.is_available() and dist.is_initialized():
        return Processes(dist.get_rank(), dist.get_world_size())
    return Processes()


@contextmanager
def joined(timeout: int = TIMEOUT) -> Iterator[Processes]:
    """Inside, the processes that torchrun started work together; without torchrun there is only this one.

    To be entered once: a second group would find the addresses of the first one, and be refused there. A process that
    the others have waited for `timeout` seconds ends all of them.
    """
    if world_size() == 1:
        yield Processes()
        return
    # objects and CPU tensors always go through gloo
    backend, limit = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timedelta(seconds=timeout)
    store = None
    try:
        from torch.distributed.rendezvous import rendezvous  # not in every build of torch

        store, own_rank, size = next(rendezvous("env://", timeout=limit))
        dist.init_process_group(backend, store=store, rank=own_rank, world_size=size, timeout=limit)
        yield processes()
    except RuntimeError as error:
        reason = str(error)
        if not dist.is_initialized() and (refused := re.search(r"connection refused.*", reason, re.IGNORECASE)):
            message = (
                f"cannot reach another process ({refused[0]}): it has ended, and its own message says why, or a "
                "firewall is between them"
            )
        elif re.search("timed out|timeout", reason, re.IGNORECASE):
            message = (
                f"{_who_is_stuck(store)} of {world_size()} has not answered for {timeout} s: it is stuck, stopped or "
                "much slower; look at its machine, or raise timeout in params.yaml, and run the same command again"
            )
        elif re.search(r"gloo|nccl|connection (reset|closed|refused)|broken pipe", reason, re.IGNORECASE):
            message = "another process has ended; its own message says why"
        else:
            raise
        raise SalError(message) from error
    dist.destroy_process_group()  # not after an error: the others would fail before this one has reported it


def _who_is_stuck(store: Any) -> str:
    """All that wait say so; the others are stuck."""
    if store is None:
        return "a process"
    store.set(f"waits/{rank()}", "")
    time.sleep(SECONDS_TO_REPORT)  # the clocks of the others started a little later
    stuck = [str(other) for other in range(world_size()) if not store.check([f"waits/{other}"])]
    return f"process {' and '.join(stuck)}" if stuck else "a process"


def torchrun() -> None:
    """The command of that name, without log and traceback: a process that fails has said why. Exits with its code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    logging.disable(logging.ERROR)
    try:
        main()
    except ChildFailedError as error:
        which, failure = error.get_first_failure()
        if failure.exitcode < 0:  # it could not say anything
            print(f"error: process {which} was ended by {failure.signal_name()}", file=sys.stderr)
        sys.exit(max(failure.exitcode, 1))
    except SignalException as error:
        sys.exit(128 + error.sigval)


@dataclass(frozen=True)
class Compute:
    """Where and how a stage runs its networks."""

    device: torch.device
    numerics: Numerics
    processes: Processes

    def autocast(self) -> AbstractContextManager[object]:
        """Inside, forward passes run in `numerics.precision`."""
        if self.numerics.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=AUTOCAST[self.numerics.precision])

    def scaler(self) -> torch.amp.GradScaler:
        """Loss scaling for float16, whose small gradients would vanish; does nothing in other precisions."""
        return torch.amp.GradScaler(self.device.type, enabled=self.numerics.precision == "float16")

    def place(self, network: nn.Module) -> None:
        """Move a network to the device, and compile its backbone if `numerics.compile` is set."""
        network.to(self.device)
        for part in network.modules() if self.numerics.compile else ():
            if isinstance(part, Backbone) and part._compiled_call_impl is None:  # once
                part.compile()

    def trainee(self, network: nn.Module) -> nn.Module:
        """The module to call in training: the network itself, or its wrapper that all processes train together."""
        if self.processes.size == 1:
            return network
        if self.device.type == "cpu":  # torch has no batch norm over several processes there
            return nn.parallel.DistributedDataParallel(network)
        synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
        return nn.parallel.DistributedDataParallel(synchronised, device_ids=[self.device.index])


@contextmanager
def computing(device: str, numerics: Numerics) -> Iterator[Compute]:
    """Set up the named device and torch's global settings; the settings are restored afterwards."""
    resolved = resolve_device(device)
    if resolved.type == "mps" and numerics.precision == "bfloat16":
        raise SalError("numerics.precision bfloat16 does not work on mps; use float32 or float16")
    with ExitStack() as afterwards:
        if resolved.type == "cuda":  # TF32, and cuDNN's search for the fastest convolution
            torch.cuda.set_device(resolved)
            afterwards.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            afterwards.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.benchmark = not numerics.deterministic
        if numerics.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
            afterwards.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
            torch.use_deterministic_algorithms(True)
        yield Compute(resolved, numerics, processes())
