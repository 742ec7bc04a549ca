"""Given weights into a network: published checkpoints, one's own, or salcli's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from salcli.errors import WeightsError
from salcli.models.backbone_names import timm_name
from salcli.models.weights_file import read_state_dict
from salcli.models.weights_names import BACKBONE, HEAD, OOD_HEAD, our_names

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from salcli.models.network import Classifier

Given = dict[str, tuple[str, "Tensor"]]  # our name → name in the file, tensor

N_SHOWN = 8
COUNTER = "num_batches_tracked"  # old files lack it, and nothing here reads it
NOT_WEIGHTS = ("n_averaged",)  # how many networks a moving average is of


@dataclass(frozen=True)
class WeightsReport:
    """What was loaded. Heads that the file does not hold keep their random weights."""

    n_loaded: int  # tensors
    head_was_loaded: bool
    ood_head_was_loaded: bool
    ignored: tuple[str, ...]  # names in the file that have no use here, such as heads for training alone


def load_weights(network: Classifier, path: Path) -> WeightsReport:
    """Fill the network with the file's tensors, or raise and leave it as it was."""
    given, ignored = _for_network(network, read_state_dict(path))
    if timm_name(network.spec.backbone) is not None:
        ignored += _drop_foreign_head(network, given)
    if not given:
        raise WeightsError(f"{path} holds nothing that belongs to a network; give a state dict of {_describe(network)}")
    _check_names_and_shapes(network, path, given)
    _check_numbers(network, path, given)
    network.load_state_dict({ours: tensor for ours, (_, tensor) in given.items()}, strict=False)
    return WeightsReport(len(given), f"{HEAD}weight" in given, f"{OOD_HEAD}weight" in given, tuple(ignored))


def _for_network(network: Classifier, state: dict[str, Tensor]) -> tuple[Given, list[str]]:
    """The tensors by our names, and the names that are of no use."""
    expected = network.state_dict()
    start = BACKBONE + network.backbone.weights_prefix
    body = [name.removeprefix(start) for name in expected if name.startswith(start)]
    unused = tuple(start + name for name in network.backbone.unused_weights)
    if f"{OOD_HEAD}weight" not in expected:
        unused += (OOD_HEAD,)
    names = our_names([name for name in state if name not in NOT_WEIGHTS], network.backbone, body)
    useful = {
        ours: (name, state[name]) for name, ours in names.items() if ours in expected or not ours.startswith(unused)
    }
    kept = {name for name, _ in useful.values()}
    if f"{HEAD}weight" in useful and not network.backbone.head_has_bias:
        useful.setdefault(f"{HEAD}bias", (f"{HEAD}bias", torch.zeros(network.spec.n_classes)))
    return useful, [name for name in state if name not in kept]


def _drop_foreign_head(network: Classifier, given: Given) -> list[str]:
    """timm's weights are mostly for other classes: what they are good for is the rest. The head's names in the file."""
    head = given.get(f"{HEAD}weight")
    if head is None or head[1].shape[:1] == (network.spec.n_classes,):
        return []
    return [given.pop(ours)[0] for ours in (f"{HEAD}weight", f"{HEAD}bias") if ours in given]


def _check_names_and_shapes(network: Classifier, path: Path, given: Given) -> None:
    expected = network.state_dict()
    start = BACKBONE + network.backbone.weights_prefix
    optional = tuple(head for head in (HEAD, OOD_HEAD) if not any(ours.startswith(head) for ours in given))
    missing = [
        f"{ours.removeprefix(start)} {_shape(wanted)}"
        for ours, wanted in expected.items()
        if ours not in given and not ours.endswith(COUNTER) and not ours.startswith(optional)
    ]
    unexpected = [f"{name} {_shape(tensor)}" for ours, (name, tensor) in given.items() if ours not in expected]
    misshapen = {
        ours: f"{name} {_shape(tensor)}, not {_shape(expected[ours])}"
        for ours, (name, tensor) in given.items()
        if ours in expected and tensor.shape != expected[ours].shape
    }
    if misshapen and not missing and not unexpected and all(ours.startswith(HEAD) for ours in misshapen):
        _check_classes(network, path, *given[f"{HEAD}weight"])
    if missing or unexpected or misshapen:
        raise WeightsError(
            f"{path} does not hold the weights of {_describe(network)}\n"
            + _listing("missing", missing)
            + _listing("unexpected", unexpected)
            + _listing("of another shape", list(misshapen.values()))
            + "set model.backbone to the network that the weights are of, or give other weights"
        )


def _check_classes(network: Classifier, path: Path, name: str, head: Tensor) -> None:
    """The most common misfit, and one with a cure of its own."""
    n_classes = network.spec.n_classes
    if head.ndim == 2 and len(head) != n_classes and head.shape[1] == network.n_features:
        layer = name.removesuffix("weight")
        raise WeightsError(
            f"{path} is for {len(head)} classes ({name} is {_shape(head)}), the ID data have {n_classes}; "
            f"use weights for {n_classes} classes, or take {layer}weight and {layer}bias out of the file: "
            f"the head then starts from random weights"
        )


def _check_numbers(network: Classifier, path: Path, given: Given) -> None:
    expected = network.state_dict()
    unusable = [
        f"{name} {reason}"
        for ours, (name, tensor) in given.items()
        if not ours.endswith(COUNTER) and (reason := _unusable(tensor, expected[ours]))
    ]
    if unusable:
        raise WeightsError(f"{path} cannot be used\n{_listing('unusable', unusable)}give other weights")


def _unusable(tensor: Tensor, wanted: Tensor) -> str:
    """Why a tensor of the right shape cannot be copied, or nothing."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return "holds no plain numbers"
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


def _describe(network: Classifier) -> str:
    return f"{network.spec.backbone} with {network.spec.n_classes} classes"
