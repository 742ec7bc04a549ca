"""Which layer is a network's head: the linear one whose output is the network's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from salcli.errors import ModelError
from salcli.models.hooked_backbone import build_network, listed, named_linear
from salcli.models.own_code import described

N_IMAGES = 2


@dataclass
class _Seen:
    """What went into a layer and came out of it."""

    inputs: list[tuple[int, ...]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    @property
    def gets_one_vector_an_image(self) -> bool:
        return len(self.inputs) == 1 and len(self.inputs[0]) == 2 and self.inputs[0][0] == N_IMAGES


def head_of(name: str, head: str | None, n_classes: int, shape: tuple[int, int, int]) -> str:
    """The name of the head of MODULE:NAME or timm:NAME, found by a pass of random images (C, H, W) through it.

    A head that is named is checked in the same way.
    """
    network = build_network(name, shape[0], n_classes).eval()
    if head is not None:
        named_linear(name, network, head)
    seen, output = _watch(name, network, shape)
    usable = {path: one for path, one in seen.items() if one.gets_one_vector_an_image}
    linears = {path: layer for path, layer in network.named_modules() if isinstance(layer, nn.Linear)}
    if head is not None:
        if head not in usable:
            shapes = ", ".join(str(one) for one in seen[head].inputs) if head in seen else "nothing"
            raise ModelError(
                f"{head} of {name} gets {shapes} for {N_IMAGES} images, not one vector for each, so it cannot be the "
                f"head; {listed(linears)}"
            )
        return head
    # the same numbers, else (a softmax comes after it, say) the same width
    same = [path for path, one in usable.items() if _equal(one.outputs[0], output)]
    as_wide = [path for path, one in usable.items() if output is not None and one.outputs[0].shape == output.shape]
    for found in (same, as_wide):
        if len(found) == 1:
            if not found[0]:
                raise ModelError(f"{name} is one linear layer and nothing else; wrap it in a module")
            return found[0]
    if not linears:
        raise ModelError(f"{name} has no linear head: {listed(linears)}")
    raise ModelError(
        f"{name}: {'several layers could be' if same or as_wide else 'no layer is surely'} its head, the last linear "
        f"layer; name it with --head or in model.head; {listed(linears)}"
    )


def _watch(name: str, network: nn.Module, shape: tuple[int, int, int]) -> tuple[dict[str, _Seen], Tensor | None]:
    """What every linear layer sees of a few images, and what the network says of them."""
    seen: dict[str, _Seen] = {}
    hooks = []
    for path, layer in network.named_modules():
        if isinstance(layer, nn.Linear):

            def note(_: nn.Module, inputs: tuple[Any, ...], output: Tensor, path: str = path) -> None:
                one = seen.setdefault(path, _Seen())
                one.inputs.append(tuple(inputs[0].shape))
                one.outputs.append(output.clone())

            hooks.append(layer.register_forward_hook(note))
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.inference_mode():
            output = network(torch.randn(N_IMAGES, *shape, generator=generator))
    except (Exception, SystemExit) as error:  # it is the user's code: anything may happen in it
        raise ModelError(
            f"{name} cannot take images of {shape[0]} × {shape[1]} × {shape[2]} (channels, height, width): "
            f"{described(error)}; set data.image_size and data.channels to what it takes"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return seen, _first_tensor(output)


def _first_tensor(output: Any) -> Tensor | None:
    """Networks return a tensor, a tuple that begins with it, or a mapping with `logits`."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and output:
        return _first_tensor(output.get("logits", next(iter(output.values()))))
    if isinstance(output, list | tuple) and output:
        return _first_tensor(output[0])
    return None


def _equal(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.equal(one, other)
