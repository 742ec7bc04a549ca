"""From the names in a published state dict to ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from salcli.models.backbone import Backbone

# What wrappers around a network put before its names: DataParallel, torch.compile, training programs, ourselves.
PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.", "net.", "network.")
HEAD, OOD_HEAD, BACKBONE = "head.", "ood_head.", "backbone."


def our_names(names: Iterable[str], backbone: Backbone, body: Iterable[str]) -> dict[str, str]:
    """Name in the file → name in a Classifier; `body` are the backbone's own names, as published."""
    known = set(body)
    heads = {f"{name}.{part}" for name in backbone.head_names for part in ("weight", "bias")}
    plain = _without_prefixes(list(names), [*PREFIXES, *filter(None, [backbone.weights_prefix])], known | heads)
    head = _head_name(set(plain.values()) - known, backbone)
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
    """Strip each name on its own: a head often stands outside of what holds the rest. Never make two names one."""
    short = {name: _strip(name, prefixes, known) for name in names}
    if len(set(short.values())) == len(names):
        return short
    # two networks in one file, such as student and teacher: only what all names share can go
    short = {name: name for name in names}
    while shared := [prefix for prefix in prefixes if all(name.startswith(prefix) for name in short.values())]:
        short = {name: kept.removeprefix(shared[0]) for name, kept in short.items()}
    return short


def _strip(name: str, prefixes: list[str], known: set[str]) -> str:
    while name not in known and (found := [prefix for prefix in prefixes if name.startswith(prefix)]):
        name = name.removeprefix(found[0])
    return name


def _head_name(names: set[str], backbone: Backbone) -> str | None:
    """What the file calls the last linear layer, our own name first, or None where it has none."""
    for name in (HEAD.rstrip("."), *backbone.head_names):
        if f"{name}.weight" in names or f"{name}.bias" in names:
            return name
    return None
