"""Precision, deterministic kernels, compilation and parallel training: how exactly a network runs."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from salcli.compute.batch_norm import synchronised
from salcli.compute.devices import resolve_device
from salcli.compute.processes import Processes, processes
from salcli.errors import DeviceError
from salcli.models.backbone import Backbone

if TYPE_CHECKING:
    from collections.abc import Iterator

    from salcli.params import NumericsParams, Params

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Compute:
    """Where a stage runs, and how."""

    device: torch.device
    numerics: NumericsParams
    processes: Processes

    def autocast(self) -> AbstractContextManager[object]:
        """Inside, a forward pass runs in the asked-for precision."""
        if self.numerics.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=AUTOCAST[self.numerics.precision])

    def scaler(self) -> torch.amp.GradScaler:
        """Keeps the small gradients of float16 from vanishing; does nothing in other precisions."""
        return torch.amp.GradScaler(self.device.type, enabled=self.numerics.precision == "float16")

    def place(self, network: nn.Module) -> None:
        """Bring a network to the device, its backbone compiled where that is asked for."""
        network.to(self.device)
        for part in network.modules() if self.numerics.compile else ():
            if isinstance(part, Backbone) and part._compiled_call_impl is None:  # once
                part.compile()

    def trainee(self, network: nn.Module) -> nn.Module:
        """What to call in training: the network itself, or one that all processes train together."""
        if self.processes.size == 1:
            return network
        ids = [self.device.index] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(synchronised(network, self.device), device_ids=ids)


@contextmanager
def computing(params: Params) -> Iterator[Compute]:
    """The device and the numerics of params.yaml; torch's own settings are put back afterwards."""
    device = resolve_device(params.device)
    if device.type == "mps" and params.numerics.precision == "bfloat16":
        raise DeviceError("numerics.precision bfloat16 does not work on mps; use float32 or float16")
    with _cuda_settings(device, params.numerics), _deterministic(params.numerics.deterministic):
        yield Compute(device, params.numerics, processes())


@contextmanager
def _cuda_settings(device: torch.device, numerics: NumericsParams) -> Iterator[None]:
    """TF32, and the fastest convolution for the shapes at hand: both concern GPUs alone."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = not numerics.deterministic
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.benchmark = before[1]


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with it
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
