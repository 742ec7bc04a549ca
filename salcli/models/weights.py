"""Loading weights into a network: published checkpoints, the user's or salcli's. Nothing in a file is executed."""

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
    """What was loaded. Heads that the file does not hold keep their random weights."""

    n_loaded: int  # tensors
    head_was_loaded: bool
    ood_head_was_loaded: bool
    ignored: tuple[str, ...]  # names in the file that have no use here, such as auxiliary heads
    note: str | None = None  # for the user: a head for other classes was left out


def load_weights(network: Classifier, path: Path) -> WeightsReport:
    """Fill the network with the file's tensors, or raise and leave it as it was."""
    return load_state(network, read_state_dict(path), str(path))


def load_state(network: Classifier, state: State, source: str) -> WeightsReport:
    """The same with tensors at hand; `source` names them in messages. A head for other classes is left out."""
    label = f"{network.spec.backbone} with {network.spec.n_classes} classes"
    return _load(_Target(network, network.backbone, label), state, source)


def load_backbone(backbone: Backbone, name: str, state: State, source: str) -> WeightsReport:
    """Fill a backbone alone; heads are ignored."""
    return _load(_Target(nn.ModuleDict({BACKBONE.rstrip("."): backbone}), backbone, name), state, source)


@dataclass(frozen=True)
class _Target:
    """What is filled: a network with this backbone, and perhaps with heads."""

    network: nn.Module
    backbone: Backbone
    label: str

    @cached_property
    def expected(self) -> State:
        return self.network.state_dict()


def _load(target: _Target, state: State, source: str) -> WeightsReport:
    given, ignored = _for_network(target, state)
    note, names = _drop_foreign_head(target, given, source)
    if not given:
        raise WeightsError(f"{source} holds nothing that belongs to a network; give a state dict of {target.label}")
    _check_names_and_shapes(target, source, given)
    _check_numbers(target, source, given)
    target.network.load_state_dict({ours: tensor for ours, (_, tensor) in given.items()}, strict=False)
    has_head, has_ood_head = (f"{head}weight" in given for head in (HEAD, OOD_HEAD))
    left_out = (*ignored, *(name for name in names if name in state))  # a bias of zeros is ours
    return WeightsReport(len(given), has_head, has_ood_head, left_out, note)


# --- reading files


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Name → tensor, from .safetensors or else from a file of torch.save."""
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise WeightsError(f"{path} {what}; give the path of a .safetensors, .pt or .pth file")
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


def _for_network(target: _Target, state: State) -> tuple[Given, list[str]]:
    """The tensors by our names, and the names in the file that have no use."""
    expected, backbone = target.expected, target.backbone
    start = BACKBONE + backbone.weights_prefix
    body = [name.removeprefix(start) for name in expected if name.startswith(start)]
    unused = tuple(start + name for name in backbone.unused_weights)
    unused += tuple(head for head in (HEAD, OOD_HEAD) if f"{head}weight" not in expected)
    names = our_names([name for name in state if name not in NOT_WEIGHTS], backbone, body)
    useful = {
        ours: (name, state[name]) for name, ours in names.items() if ours in expected or not ours.startswith(unused)
    }
    kept = {name for name, _ in useful.values()}
    if f"{HEAD}weight" in useful and not backbone.head_has_bias:
        useful.setdefault(f"{HEAD}bias", (f"{HEAD}bias", torch.zeros(len(useful[f"{HEAD}weight"][1]))))
    return useful, [name for name in state if name not in kept]


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


def _drop_foreign_head(target: _Target, given: Given, source: str) -> tuple[str | None, list[str]]:
    """Drop a head for another number of classes, as published weights mostly have. Returns a note, and its names."""
    name, head = given.get(f"{HEAD}weight", ("", torch.zeros(0)))
    ours = target.expected.get(f"{HEAD}weight")
    n_classes = None if ours is None else len(ours)
    if head.shape[1:] != (target.backbone.n_features,) or len(head) == n_classes:
        return None, []
    note = (
        f"{source} is for {len(head)} classes ({name} is {_shape(head)}), the ID data have {n_classes}: "
        "it is used without its head, which starts from random weights"
    )
    return note, [given.pop(part)[0] for part in (f"{HEAD}weight", f"{HEAD}bias") if part in given]


# --- checks


def _check_names_and_shapes(target: _Target, source: str, given: Given) -> None:
    expected = target.expected
    start = BACKBONE + target.backbone.weights_prefix
    optional = tuple(head for head in (HEAD, OOD_HEAD) if not any(ours.startswith(head) for ours in given))
    missing = [
        f"{ours.removeprefix(start)} {_shape(wanted)}"
        for ours, wanted in expected.items()
        if ours not in given and not ours.endswith(COUNTER) and not ours.startswith(optional)
    ]
    unexpected = [f"{name} {_shape(tensor)}" for ours, (name, tensor) in given.items() if ours not in expected]
    misshapen = [
        f"{name} {_shape(tensor)}, not {_shape(expected[ours])}"
        for ours, (name, tensor) in given.items()
        if ours in expected and tensor.shape != expected[ours].shape
    ]
    if missing or unexpected or misshapen:
        raise WeightsError(
            f"{source} does not hold the weights of {target.label}\n"
            + _listing("missing", missing)
            + _listing("unexpected", unexpected)
            + _listing("of another shape", misshapen)
            + "set model.backbone to the network that the weights are of, or give other weights"
        )


def _check_numbers(target: _Target, source: str, given: Given) -> None:
    unusable = [
        f"{name} {reason}"
        for ours, (name, tensor) in given.items()
        if not ours.endswith(COUNTER) and (reason := _unusable(tensor, target.expected[ours]))
    ]
    if unusable:
        raise WeightsError(f"{source} cannot be used\n{_listing('unusable', unusable)}give other weights")


def _unusable(tensor: Tensor, wanted: Tensor) -> str:
    """Why a tensor of the right shape cannot be copied, or ""."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return "is not a dense tensor of numbers"
    if tensor.is_floating_point() != wanted.is_floating_point():
        return f"is of type {str(tensor.dtype).removeprefix('torch.')}"
    return "" if tensor.isfinite().all() else "holds NaN or infinity"


def _listing(what: str, items: Sequence[str]) -> str:
    if not items:
        return ""
    rest = f"\n    and {len(items) - N_SHOWN} more" if len(items) > N_SHOWN else ""
    return f"  {what} ({len(items)}):" + "".join(f"\n    {item}" for item in items[:N_SHOWN]) + rest + "\n"


def _shape(tensor: Tensor) -> str:
    return f"({', '.join(str(size) for size in tensor.shape)})"
