"""What a network that is trained from scratch is built from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from salcli.errors import ParamsError
from salcli.models.backbone_names import is_hooked
from salcli.models.head_search import head_of
from salcli.models.network import NetworkSpec
from salcli.models.own_code import code_fingerprint

if TYPE_CHECKING:
    from salcli.artifacts.layout import Workspace
    from salcli.compute.image_rows import ImageRows
    from salcli.params import ModelParams
    from salcli.stages.inputs import LabeledImages

IMAGES_FOR_STATISTICS = 1024  # at a time


def network_spec(params: ModelParams, training: LabeledImages) -> NetworkSpec:
    """The network of params.yaml, for these classes and channels."""
    n_channels = training.images.sets[0].shape[1]
    auto = _channel_statistics(training.images) if "auto" in (params.mean, params.std) else None
    values = {}
    for place, name in enumerate(("mean", "std")):
        given = getattr(params, name)
        values[name] = given if given != "auto" else auto[place] if auto else ()
        if len(values[name]) != n_channels:
            raise ParamsError(
                f"model.{name} has {len(values[name])} values, but the images have {n_channels} channels; "
                "give one for each, or auto"
            )
    head = None
    if is_hooked(params.backbone):
        head = head_of(params.backbone, params.head, training.n_classes, training.images.sets[0].shape[1:])
    return NetworkSpec(
        params.backbone, training.n_classes, values["mean"], values["std"], drop_rate=params.drop_rate, head=head
    )


def code_of_network(workspace: Workspace, params: ModelParams) -> dict[str, str]:
    """The fingerprint of a network's code where that is the user's own: with other code it is another network."""
    code = code_fingerprint(params.backbone, workspace.given(params.code))
    return {"code": code} if code else {}


def _channel_statistics(images: ImageRows) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, on a scale of 0 to 1."""
    count, total, squares = 0, torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for start in range(0, len(images), IMAGES_FOR_STATISTICS):
        block = images.read(slice(start, start + IMAGES_FOR_STATISTICS))
        pixels = block.transpose(0, 1).flatten(1).double() / 255
        count += pixels.shape[1]
        total = total + pixels.sum(dim=1)
        squares = squares + pixels.square().sum(dim=1)
    mean = total / count
    std = ((squares / count - mean.square()) * count / (count - 1)).clamp(min=0).sqrt()
    std = std.clamp(min=1e-3)  # a channel that never changes carries nothing to scale
    return tuple(mean.tolist()), tuple(std.tolist())
