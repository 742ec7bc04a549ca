"""The samples, representations and networks that stages work on, picked from stored files."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from salcli.data.duplicates import not_in, pixel_digests
from salcli.data.splits import split_ood
from salcli.engine.batches import LabeledRows, Rows
from salcli.errors import BadArtifactError, DataError, ParamsError
from salcli.models.backbones import is_hooked
from salcli.models.custom import code_fingerprint, find_head
from salcli.models.network import Classifier, NetworkSpec
from salcli.params.schema import AUTO, DataParams, ModelParams, Params
from salcli.progress import Progress, Silent
from salcli.store.formats import (
    RepresentationFile,
    read_file_names,
    read_id_split,
    read_network,
    read_samples,
    read_wild_set,
    read_wild_truth,
)
from salcli.store.layout import Experiment, Workspace, prepared_set, unseen_set

IdPart = Literal["train", "calibration", "test"]
ROWS_FOR_STATISTICS = 1024  # at a time


def id_samples(workspace: Workspace, params: Params, part: IdPart, experiment: Experiment) -> LabeledRows:
    """One part of the ID data."""
    samples = read_samples(workspace.find(prepared_set(params.data.id)))
    index = getattr(read_id_split(workspace.find(experiment.split)), part)
    assert samples.labels is not None
    labels = torch.from_numpy(samples.labels[index])
    return LabeledRows(Rows((samples.array,), index), labels, len(samples.class_names), samples.class_names)


def wild_samples(workspace: Workspace, params: Params, experiment: Experiment) -> Rows:
    """The wild data, without their truth. The index counts through the ID set first, then through the OOD set."""
    source = read_wild_set(workspace.find(experiment.wild)).source
    names = params.data.id, experiment.ood
    return Rows(tuple(read_samples(workspace.find(prepared_set(name))).array for name in names), source)


def ood_test_samples(
    workspace: Workspace, params: Params, experiment: Experiment, unseen: str = "", progress: Progress | None = None
) -> Rows:
    """OOD samples for the test: what is left of the set in the wild data, or an unseen set.

    A set that is in the wild data of another experiment is tested on what is left there, because two sets may share
    images. Of a custom set, samples that are in the ID data or in this wild data are left out.
    """
    if not unseen:
        samples = read_samples(workspace.find(prepared_set(experiment.ood)))
        return Rows((samples.array,), read_wild_set(workspace.find(experiment.wild)).ood_test)
    samples, data = read_samples(workspace.find(unseen_set(unseen))), params.data
    if unseen in data.ood:
        # split as `prepare` splits it for its own experiment
        pool = np.arange(len(samples))
        if unseen in data.custom:
            id_set = read_samples(workspace.find(prepared_set(data.id)))
            pool = not_in(id_set.array, samples.array, each_once=True)
        is_test = None if samples.is_test is None else samples.is_test[pool]
        index = pool[split_ood(len(pool), is_test, data.ood_wild_share, experiment.seed).test]
    else:
        index = np.arange(len(samples)) if samples.is_test is None else np.flatnonzero(samples.is_test)
    rows = Rows((samples.array,), index)
    if unseen not in data.custom:
        return rows
    is_known = _is_known(rows, wild_samples(workspace, params, experiment), unseen, progress or Silent())
    if is_known.all():
        raise DataError(
            f"all {len(index)} images of {unseen} are also in the ID data or in the wild data ({experiment.ood}); "
            "a test needs images that are not"
        )
    return rows.select(~is_known)


def _is_known(rows: Rows, wild: Rows, name: str, progress: Progress) -> np.ndarray:
    """Which images are in the ID data or in the wild data, so that networks may have been trained on them."""
    id_set, ood_set = wild.arrays
    in_wild = wild.index[wild.index >= len(id_set)] - len(id_set)
    n_compared = len(rows) + len(id_set) + len(in_wild)
    with progress.task(f"compare {name} with ID and wild data", n_compared, "images") as task:
        known = [pixel_digests(id_set, task=task), pixel_digests(ood_set, in_wild, task)]
        return np.isin(pixel_digests(rows.arrays[0], rows.index, task), np.concatenate(known))


def classifier(workspace: Workspace, experiment: Experiment) -> Classifier:
    """The ID classifier h_w."""
    return read_network(workspace.find(experiment.classifier), Classifier)


def id_representation(workspace: Workspace, part: IdPart, experiment: Experiment) -> RepresentationFile:
    return RepresentationFile.open(workspace.find(experiment.id_representation(part)))


def wild_representation(workspace: Workspace, experiment: Experiment) -> RepresentationFile:
    return RepresentationFile.open(workspace.find(experiment.wild_representation))


def known_truth(workspace: Workspace, n_wild: int, experiment: Experiment) -> Tensor | None:
    """Which wild samples are OOD; None if that is not known.

    For diagnosis, after everything is decided. The only reader of the truth.
    """
    if not workspace.has(experiment.truth):
        return None
    found = workspace.find(experiment.truth)
    truth = read_wild_truth(found)
    if truth is None:
        return None
    if len(truth) != n_wild:
        raise BadArtifactError(f"{found.path} is about {len(truth)} wild samples, but there are {n_wild}; {found.fix}")
    return torch.from_numpy(truth)


def wild_file_names(workspace: Workspace, params: Params, experiment: Experiment, index: np.ndarray) -> list[str]:
    """The file of each wild sample, empty where it is not known.

    In wild data that salcli mixed itself, names would tell ID from OOD samples, so they are not shown.
    """
    wild = wild_samples(workspace, params, experiment)
    n_id = len(wild.arrays[0])
    if (wild.index < n_id).any():
        return [""] * len(index)
    names = read_file_names(workspace.find(prepared_set(experiment.ood)))
    return [names[i - n_id] if names else "" for i in wild.index[index]]


def class_names(workspace: Workspace, data: DataParams) -> tuple[str, ...]:
    return read_samples(workspace.find(prepared_set(data.id))).class_names


# -- the network that params.yaml asks for


def network_spec(params: ModelParams, training: LabeledRows) -> NetworkSpec:
    """The network of params.yaml, for these classes and channels."""
    shape = training.rows.sample_shape
    auto = _channel_statistics(training.rows) if AUTO in (params.mean, params.std) else ((), ())
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
