"""A state dict out of a file that somebody else wrote. Nothing in it is ever executed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from salcli.errors import WeightsError

if TYPE_CHECKING:
    from pathlib import Path

# Where training programs keep the state dict; the weights as trained come before their moving average.
WRAPPERS = (
    "state_dict", "model_state_dict", "model_state", "model", "net_state_dict", "net", "network",
    "state_dict_ema", "model_ema", "ema_state_dict", "ema", "weights", "params",
)  # fmt: skip
SAVE_ALONE = "save the weights alone: torch.save(network.state_dict(), path)"


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Name → tensor, from .safetensors or else from what torch.save wrote."""
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise WeightsError(f"{path} {what}; give the path of a .safetensors, .pt or .pth file")
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    return _unwrap(path, content)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{path} is damaged or no safetensors file ({error}); get it again") from None


def _read_pickle(path: Path) -> Any:
    try:
        with warnings.catch_warnings():  # torch warns of old formats; they are read or refused all the same
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes can raise anything
        wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
        if wanted:
            raise WeightsError(
                f"{path} holds more than tensors: it asks for {wanted[1]}, and salcli runs no code from files; "
                f"where you trust its source, {SAVE_ALONE}"
            ) from None
        # torch's own message starts with the advice to run the code after all
        reason = (
            str(error).rpartition("WeightsUnpickler error:")[2].strip().split("\n")[0][:200] or type(error).__name__
        )
        raise WeightsError(
            f"{path} is damaged or no file of torch.save ({reason}); get it again, or {SAVE_ALONE}"
        ) from None


def _unwrap(path: Path, content: Any) -> dict[str, Tensor]:
    """The innermost mapping that holds tensors and nothing else."""
    while isinstance(content, Mapping) and content:
        if all(isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()):
            return dict(content)
        inner = [content[name] for name in WRAPPERS if isinstance(content.get(name), Mapping) and content[name]]
        if not inner:
            names = ", ".join(str(name) for name in list(content)[:8])
            raise WeightsError(
                f"{path} holds no state dict under a name that salcli knows, but {names}; "
                f"{SAVE_ALONE}, or put them under state_dict"
            )
        content = inner[0]
    what = "is empty" if isinstance(content, Mapping) else f"holds a {type(content).__name__}, not a state dict"
    raise WeightsError(f"{path} {what}; {SAVE_ALONE}")
