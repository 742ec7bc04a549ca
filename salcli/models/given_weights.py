"""Loading weights into a network: published checkpoints, the user's or salcli's. Nothing in a file is executed."""

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from salcli.errors import WeightsError
from salcli.models.backbones import Backbone
from salcli.models.network import Classifier

State = Mapping[str, Tensor]
Given = dict[str, tuple[str, Tensor]]  # our name → name in the file, tensor

HEAD, OOD_HEAD, BACKBONE = "head.", "ood_head.", "backbone."
# What wrappers around a network put before its names: DataParallel, torch.compile, training programs, salcli.
PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.", "net.", "network.")
# Where training programs keep the state dict; trained weights come before their moving average.
WRAPPERS = (
    "state_dict", "model_state_dict", "model_state", "model", "net_state_dict", "net", "network",
    "state_dict_ema", "model_ema", "ema_state_dict", "ema", "weights", "params",
)  # fmt: skip
COUNTER = "num_batches_tracked"  # old files lack it, and nothing here reads it
NOT_WEIGHTS = ("n_averaged",)  # how many networks a moving average is of
N_SHOWN = 8  # names of a kind in a message
SAVE_ALONE = "save the weights alone: torch.save(network.state_dict(), path)"


@dataclass(frozen=True)
class WeightsReport:
    """What was loaded. A head that the file does not hold keeps its random weights."""

    head_was_loaded: bool
    note: str | None = None  # for the user: a head for other classes was left out


def load_state(network: Classifier, state: State, source: str) -> WeightsReport:
    """Fill the network with tensors, or raise and leave it as it was; `source` names them in messages.

    A head for other classes is left out, and so is what has no use here, such as auxiliary heads.
    """
    label = f"{network.spec.backbone} with {network.spec.n_classes} classes"
    return _load(network, network.backbone, label, state, source)


def load_backbone(backbone: Backbone, name: str, state: State, source: str) -> None:
    """Fill a backbone alone; heads are ignored."""
    _load(nn.ModuleDict({BACKBONE.rstrip("."): backbone}), backbone, name, state, source)


def _load(network: nn.Module, backbone: Backbone, label: str, state: State, source: str) -> WeightsReport:
    expected, note = network.state_dict(), None
    start, head = BACKBONE + backbone.weights_prefix, f"{HEAD}weight"
    body = [name.removeprefix(start) for name in expected if name.startswith(start)]
    unused = (OOD_HEAD, *(start + name for name in backbone.unused_weights), *(() if head in expected else (HEAD,)))
    names = our_names([name for name in state if name not in NOT_WEIGHTS], backbone, body)
    given = {ours: (name, state[name]) for name, ours in names.items() if not ours.startswith(unused)}
    if head in given:
        name, weight = given[head]
        if not backbone.head_has_bias:
            given.setdefault(f"{HEAD}bias", (f"{HEAD}bias", torch.zeros(len(weight))))
        n_classes = len(expected[head])
        if weight.shape[1:] == (backbone.n_features,) and len(weight) != n_classes:  # as published weights mostly have
            del given[head]
            given.pop(f"{HEAD}bias", None)
            note = (
                f"{source} is for {len(weight)} classes ({name} is {_shape(weight)}), the ID data have {n_classes}: "
                "it is used without its head, which starts from random weights"
            )
    if not given:
        raise WeightsError(f"{source} holds nothing that belongs to a network; give a state dict of {label}")
    if problems := _problems(expected, given, start):
        raise WeightsError(
            f"{source} does not hold the weights of {label}\n{problems}"
            "set model.backbone to the network that the weights are of, or give other weights"
        )
    network.load_state_dict({ours: tensor for ours, (_, tensor) in given.items()}, strict=False)
    return WeightsReport(head in given, note)


# --- reading files


def check_is_file(path: Path) -> None:
    """Raise an error if weights cannot be read from there."""
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise WeightsError(f"{path} {what}; give the path of a .safetensors, .pt or .pth file")


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Name → tensor, from .safetensors or else from a file of torch.save."""
    check_is_file(path)
    if path.suffix != ".safetensors":
        return _unwrap(path, _read_pickle(path))
    try:
        return _unwrap(path, load_file(path))
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{path} is damaged or not a safetensors file ({error}); get it again") from None


def _read_pickle(path: Path) -> Any:
    try:
        with warnings.catch_warnings():  # torch warns of old formats, but reads or refuses them all the same
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes can raise anything
        wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
        if wanted:
            raise WeightsError(
                f"{path} holds more than tensors: it asks for {wanted[1]}, and salcli runs no code from files; "
                f"if you trust its source, {SAVE_ALONE}"
            ) from None
        # torch's own message starts with the advice to run the code after all
        reason = str(error).rpartition("WeightsUnpickler error:")[2].strip().split("\n")[0][:200]
        raise WeightsError(
            f"{path} is damaged or not a file of torch.save ({reason or type(error).__name__}); "
            f"get it again, or {SAVE_ALONE}"
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


# --- translating names


def our_names(names: Iterable[str], backbone: Backbone, body: Iterable[str]) -> dict[str, str]:
    """Name in the file → name in a Classifier; `body` are the backbone's own names, as published."""
    known = set(body)
    heads = {f"{name}.{part}" for name in backbone.head_names for part in ("weight", "bias")}
    plain = _without_prefixes(list(names), [*PREFIXES, *filter(None, [backbone.weights_prefix])], known | heads)
    others = set(plain.values()) - known
    # the last linear layer in the file; our own name for it first
    candidates = (HEAD.rstrip("."), *backbone.head_names)
    head = next((name for name in candidates if {f"{name}.weight", f"{name}.bias"} & others), None)
    renamed = {}
    for name, short in plain.items():
        if head is not None and short.startswith(f"{head}."):
            renamed[name] = HEAD + short.removeprefix(f"{head}.")
        elif short.startswith(OOD_HEAD):
            renamed[name] = short
        else:
            renamed[name] = BACKBONE + backbone.weights_prefix + short
    return renamed


def _without_prefixes(names: list[str], prefixes: list[str], known: set[str]) -> dict[str, str]:
    """Strip each name separately, since a head is often outside of what holds the rest. Never make two names one."""

    def strip(name: str) -> str:
        while name not in known and (found := [prefix for prefix in prefixes if name.startswith(prefix)]):
            name = name.removeprefix(found[0])
        return name

    short = {name: strip(name) for name in names}
    if len(set(short.values())) == len(names):
        return short
    # two networks in one file, such as student and teacher: only what all names share can go
    short = {name: name for name in names}
    while shared := [prefix for prefix in prefixes if all(name.startswith(prefix) for name in short.values())]:
        short = {name: kept.removeprefix(shared[0]) for name, kept in short.items()}
    return short


# --- checks


def _problems(expected: State, given: Given, start: str) -> str:
    """All that is wrong with names, shapes and numbers, or ""."""
    has_head = any(ours.startswith(HEAD) for ours in given)
    found: dict[str, list[str]] = {"missing": [], "unexpected": [], "of another shape": [], "unusable": []}
    for ours, wanted in expected.items():
        if ours not in given and not ours.endswith(COUNTER) and (has_head or not ours.startswith(HEAD)):
            found["missing"].append(f"{ours.removeprefix(start)} {_shape(wanted)}")
    for ours, (name, tensor) in given.items():
        if ours not in expected:
            found["unexpected"].append(f"{name} {_shape(tensor)}")
        elif tensor.shape != expected[ours].shape:
            found["of another shape"].append(f"{name} {_shape(tensor)}, not {_shape(expected[ours])}")
        elif not ours.endswith(COUNTER) and (reason := _unusable(tensor, expected[ours])):
            found["unusable"].append(f"{name} {reason}")
    lines = []
    for what, items in found.items():
        if items:
            rest = [f"and {len(items) - N_SHOWN} more"] if len(items) > N_SHOWN else []
            lines += [f"  {what} ({len(items)}):", *(f"    {item}" for item in [*items[:N_SHOWN], *rest])]
    return "".join(f"{line}\n" for line in lines)


def _unusable(tensor: Tensor, wanted: Tensor) -> str:
    """Why a tensor of the right shape cannot be copied, or ""."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return "is not a dense tensor of numbers"
    if tensor.is_floating_point() != wanted.is_floating_point():
        return f"is of type {str(tensor.dtype).removeprefix('torch.')}"
    return "" if tensor.isfinite().all() else "holds NaN or infinity"


def _shape(tensor: Tensor) -> str:
    return f"({', '.join(str(size) for size in tensor.shape)})"
