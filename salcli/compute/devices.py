"""Which device to compute on."""

from __future__ import annotations

import torch

from salcli import ranks
from salcli.errors import DeviceError


def resolve_device(name: str) -> torch.device:
    """The named device, or with `auto` the best one there is. Each process of a machine takes a GPU of its own."""
    if name == "auto":
        has_mps = torch.backends.mps.is_available()
        name = "cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"
    if name == "cuda" and ranks.world_size() > 1:
        name = f"cuda:{ranks.local_rank()}"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        there_are = (
            f"{torch.cuda.device_count()} CUDA devices are" if torch.cuda.is_available() else "no CUDA device is"
        )
        raise DeviceError(f"device {name}: {there_are} available here; use device: auto or cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise DeviceError("device mps: not available here; use device: auto or cpu")
    return device
