"""The samples, representations and networks that stages work on, picked from stored files."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from salcli.data.duplicates import Digests, not_in
from salcli.data.sets import check_same_shape
from salcli.data.splits import split_ood
from salcli.engine.batches import LabeledRows, Rows
from salcli.errors import BadArtifactError, SalError
from salcli.models.network import Classifier
from salcli.params.schema import DataParams, Params
from salcli.store.formats import (
    OOD_TEST,
    WILD_HOLDOUT,
    WILD_SET,
    Origin,
    RepresentationFile,
    names_of,
    read_digests,
    read_id_split,
    read_index,
    read_network,
    read_samples,
    read_wild_truth,
)
from salcli.store.layout import Experiment, Workspace, prepared_set, unseen_set

IdPart = Literal["train", "calibration", "test", "all"]  # all: but the test's, the wild ID samples too


def id_samples(workspace: Workspace, params: Params, part: IdPart, experiment: Experiment) -> LabeledRows:
    """One part of the ID data."""
    samples = read_samples(workspace.find(prepared_set(params.data.id)))
    split = read_id_split(workspace.find(experiment.split))
    own = (split.train, split.calibration, split.wild) if part == "all" else (getattr(split, part),)
    index = np.concatenate(own)
    assert samples.labels is not None
    rows = Rows((samples.array,), index)
    return LabeledRows(rows, torch.from_numpy(samples.labels[index]), len(samples.class_names), samples.class_names)


def wild_samples(workspace: Workspace, params: Params, experiment: Experiment) -> Rows:
    """The wild data, without their truth. The index counts through the ID set first, then through the OOD set."""
    return _of_both_sets(workspace, params, experiment, read_index(workspace.find(experiment.wild), WILD_SET))


def wild_holdout_samples(workspace: Workspace, params: Params, experiment: Experiment) -> Rows:
    """Wild data that neither the filter nor any training has seen, without their truth; none if wild_holdout is 0."""
    return _of_both_sets(
        workspace, params, experiment, read_index(workspace.find(experiment.wild_holdout), WILD_HOLDOUT)
    )


def _of_both_sets(workspace: Workspace, params: Params, experiment: Experiment, index: np.ndarray) -> Rows:
    sets = (read_samples(workspace.find(prepared_set(name))) for name in (params.data.id, experiment.ood))
    return Rows(tuple(samples.array for samples in sets), index)


def ood_test_samples(workspace: Workspace, params: Params, experiment: Experiment, unseen: str = "") -> Rows:
    """OOD samples for the test: what is left of the set in the wild data, or an unseen set.

    A set that is in the wild data of another experiment is tested on what is left there, because two sets may share
    images. Of a custom set, samples that are in the ID data or in this wild data are left out.
    """
    if not unseen:
        samples = read_samples(workspace.find(prepared_set(experiment.ood)))
        return Rows((samples.array,), read_index(workspace.find(experiment.ood_test), OOD_TEST))
    found, data = workspace.find(unseen_set(unseen)), params.data
    samples, id_found = read_samples(found), workspace.find(prepared_set(data.id))
    check_same_shape({data.id: read_samples(id_found).array.shape[1:], unseen: samples.array.shape[1:]})
    if unseen in data.ood:
        # split as `prepare` splits it for its own experiment
        pool = np.arange(len(samples))
        if data.may_hold_copies(unseen):
            pool = not_in(read_digests(id_found), read_digests(found), each_once=True)
        is_test = None if samples.is_test is None else samples.is_test[pool]
        index = pool[split_ood(len(pool), is_test, data.ood_wild_share, experiment.seed)[1]]
    else:
        index = np.arange(len(samples)) if samples.is_test is None else np.flatnonzero(samples.is_test)
    rows = Rows((samples.array,), index)
    if not data.may_hold_copies(unseen):
        return rows
    is_known = np.isin(read_digests(found)[index], _known_digests(workspace, params, experiment))
    if is_known.all():
        raise SalError(
            f"all {len(index)} samples of {unseen} are also in the ID data or in the wild data ({experiment.ood}); "
            "a test needs samples that are not"
        )
    return rows.select(~is_known)


def _known_digests(workspace: Workspace, params: Params, experiment: Experiment) -> Digests:
    """Of the samples in the ID data or in the wild data, which networks may have been trained on or chosen by."""
    id_set, ood_set = (read_digests(workspace.find(prepared_set(name))) for name in (params.data.id, experiment.ood))
    wild, held_out = workspace.find(experiment.wild), workspace.find(experiment.wild_holdout)
    source = np.concatenate([read_index(wild, WILD_SET), read_index(held_out, WILD_HOLDOUT)])
    return np.concatenate([id_set, ood_set[source[source >= len(id_set)] - len(id_set)]])


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


def wild_origins(
    workspace: Workspace, params: Params, experiment: Experiment, index: np.ndarray, *, held_out: bool = False
) -> list[Origin]:
    """Where the user finds some wild samples, or some of those that were held out.

    In wild data that salcli mixed itself, origins would tell ID from OOD samples, so they are empty.
    """
    wild = wild_samples(workspace, params, experiment)
    n_id = len(wild.arrays[0])
    if (wild.index < n_id).any():
        return [Origin("")] * len(index)
    rows = wild_holdout_samples(workspace, params, experiment) if held_out else wild
    return names_of(workspace.find(prepared_set(experiment.ood)), rows.index[index] - n_id)


def class_names(workspace: Workspace, data: DataParams) -> tuple[str, ...]:
    return read_samples(workspace.find(prepared_set(data.id))).class_names
