"""Batch normalisation over all processes, so that several of them train as one would."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def synchronised(network: nn.Module, device: torch.device) -> nn.Module:
    """Every batch norm takes its statistics over all processes. Weights and their names stay as they are."""
    if device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
        return converted
    for module in network.modules():  # torch's own works on GPUs alone
        if type(module) is nn.BatchNorm2d:
            module.__class__ = _SyncBatchNorm
    return network


class _Sum(torch.autograd.Function):
    """The sum over all processes; its gradient is the sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class _SyncBatchNorm(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """As nn.BatchNorm2d, with the statistics of all processes while training."""
        if not self.training:
            return super().forward(input)
        n = torch.tensor([input.numel() / input.shape[1]], device=input.device)
        dist.all_reduce(n)
        mean = _Sum.apply(input.sum((0, 2, 3))) / n
        centred = input - mean[:, None, None]
        variance = _Sum.apply(centred.square().sum((0, 2, 3))) / n
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * n / (n - 1), self.momentum)
        scale = self.weight * (variance + self.eps).rsqrt()
        normalised: Tensor = centred * scale[:, None, None] + self.bias[:, None, None]
        return normalised
