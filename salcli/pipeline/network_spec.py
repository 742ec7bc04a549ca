"""The network that params.yaml asks for, for given ID training data."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from salcli.engine.batches import LabeledRows, Rows
from salcli.errors import BadArtifactError, ParamsError
from salcli.models.backbones import AUTO, is_hooked
from salcli.models.custom import code_fingerprint, find_head
from salcli.models.network import NetworkSpec
from salcli.models.pretrained import library_preprocessing
from salcli.params.schema import ModelParams
from salcli.store.layout import Workspace

ROWS_FOR_STATISTICS = 1024  # at a time


def network_spec(params: ModelParams, training: LabeledRows) -> NetworkSpec:
    """The network of params.yaml, for these classes and channels or dimensions."""
    shape = training.rows.sample_shape
    if (len(shape) == 1) != params.takes_vectors:  # a scratch run may have left vectors of a frozen backbone
        kinds = ("vectors", "images") if len(shape) == 1 else ("images", "vectors")
        raise BadArtifactError(
            f"the prepared samples are {kinds[0]}, but the network takes {kinds[1]}; make them again: salcli prepare"
        )
    if params.takes_vectors:
        mean, std = _vector_statistics(training.rows)
        return NetworkSpec(params.trained, training.n_classes, mean, std)
    auto: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    if AUTO in (params.mean, params.std):
        known = library_preprocessing(params.backbone, params.weights)
        auto = (known.mean, known.std) if known else _channel_statistics(training.rows)
    given = {"mean": params.mean, "std": params.std}
    values = {name: auto[i] if given[name] == AUTO else given[name] for i, name in enumerate(given)}
    for name, value in values.items():
        if len(value) != shape[0]:
            raise ParamsError(
                f"model.{name} has {len(value)} values, but the images have {shape[0]} channels; "
                "give one for each, or auto"
            )
    head = None
    if is_hooked(params.backbone):
        head = find_head(params.backbone, params.head, training.n_classes, shape)  # type: ignore[arg-type]
    return NetworkSpec(
        backbone=params.backbone,
        n_classes=training.n_classes,
        mean=tuple(values["mean"]),  # type: ignore[arg-type]
        std=tuple(values["std"]),  # type: ignore[arg-type]
        drop_rate=params.drop_rate,
        head=head,
    )


def code_of_network(workspace: Workspace, params: ModelParams) -> dict[str, str]:
    """The fingerprint of a custom network's code: with other code it is another network."""
    code = code_fingerprint(params.backbone, workspace.given(params.code))
    return {"code": code} if code else {}


def _vector_statistics(rows: Rows) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each dimension; a constant one is left as it is."""

    def mean_of(values: Callable[[Tensor], Tensor]) -> Tensor:
        total = torch.zeros(rows.sample_shape, dtype=torch.float64)
        for start in range(0, len(rows), ROWS_FOR_STATISTICS):
            total += values(rows.read(slice(start, start + ROWS_FOR_STATISTICS)).double()).sum(dim=0)
        return total / len(rows)

    mean = mean_of(lambda vectors: vectors)
    variance = mean_of(lambda vectors: (vectors - mean).square())
    std = torch.where(variance > 0, variance.sqrt(), 1.0).float()
    return tuple(mean.float().tolist()), tuple(std.clamp(min=1e-20).tolist())


def _channel_statistics(rows: Rows) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, on a scale of 0 to 1."""
    count, total, squares = 0, torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for start in range(0, len(rows), ROWS_FOR_STATISTICS):
        block = rows.read(slice(start, start + ROWS_FOR_STATISTICS))
        pixels = block.transpose(0, 1).flatten(1).double() / 255
        count += pixels.shape[1]
        total = total + pixels.sum(dim=1)
        squares = squares + pixels.square().sum(dim=1)
    mean = total / count
    std = ((squares / count - mean.square()) * count / (count - 1)).clamp(min=0).sqrt()
    std = std.clamp(min=1e-3)  # a constant channel has nothing to scale
    return tuple(mean.tolist()), tuple(std.tolist())
